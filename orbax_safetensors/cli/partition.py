"""Meshes and partitions as they are written on a command line, and a partition for users who wrote none.

Plain data, for which no device is started, so that mistakes are answered before there is one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from orbax_safetensors.cli.arguments import UsageError
from orbax_safetensors.devices.rules import Misfit, check_fit, check_used, first_match

Axes = tuple[tuple[str, ...], ...]
"""For every dimension the mesh axes that shard it; dimensions that are left out at the end are whole."""


@dataclass(frozen=True)
class Rule:
    """One `--spec`: arrays in whose names `pattern` is found are sharded by `axes`. `text` is as it was written."""

    text: str
    pattern: re.Pattern[str]
    axes: Axes


def parse_mesh(text: str) -> dict[str, int]:
    """Parse `data=2,model=4` as axis sizes by name."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"expected NAME=SIZE,... as in data=2,model=4, found {text!r}")
        if name in mesh:
            raise UsageError(f"the axis {name!r} is passed twice in {text!r}")
        mesh[name] = int(size)
    return mesh


def parse_rule(text: str) -> Rule:
    """Parse `REGEX=axes`. The regex may hold `=`, the axes may not."""
    regex, equals, spec = text.rpartition("=")
    if not equals:
        raise UsageError(f"expected REGEX=AXES as in 'kernel$=data,model', found {text!r}")
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise UsageError(f"{regex!r} is not a regular expression: {error}") from error
    entries = spec.split(",") if spec else []
    axes = tuple(() if entry in ("", "-") else tuple(entry.split("+")) for entry in entries)
    used = [axis for entry in axes for axis in entry]
    if not all(axis.isidentifier() for axis in used):
        raise UsageError(f"expected for every dimension -, AXIS or AXIS+AXIS in {spec!r} of {text!r}")
    if len(set(used)) < len(used):
        raise UsageError(f"a mesh axis is passed twice in {spec!r} of {text!r}")
    return Rule(text, pattern, axes)


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how arrays will be sharded."""
    parser.add_argument(
        "--mesh", type=parse_mesh, metavar="AXIS=SIZE,...", help="mesh of the devices that will restore it, as fsdp=16"
    )
    add_spec(parser)


def add_spec(parser: argparse.ArgumentParser) -> None:
    """Add the option for rules, which are tried in order."""
    parser.add_argument(
        "--spec",
        type=parse_rule,
        action="append",
        default=[],
        metavar="REGEX=AXES",
        help="how arrays of these names are sharded; repeatable",
    )


def given_spec(rules: Sequence[Rule], mesh: Mapping[str, int] | None) -> Mapping[str, Any] | None:
    """Return the rules of `--spec` as the functions take them; raises `UsageError` if they do not fit the mesh."""
    if rules and mesh is None:
        raise UsageError("--spec names the axes of a --mesh; also pass --mesh")
    spec: dict[str, Any] = {}
    for rule in rules:
        _check_axes(rule, mesh or {})
        if rule.pattern.pattern in spec:
            raise UsageError(f"--spec {rule.text!r}: is passed twice")
        spec[rule.pattern.pattern] = entries(rule.axes)
    return spec or None


def _check_axes(rule: Rule, mesh: Mapping[str, int]) -> None:
    for axis in (axis for entry in rule.axes for axis in entry):
        if axis not in mesh:
            raise UsageError(f"--spec {rule.text!r}: the mesh has no axis {axis!r}, it has {', '.join(mesh)}")


def entries(axes: Axes) -> tuple[str | tuple[str, ...] | None, ...]:
    """Return axes as the functions take them, and `PartitionSpec`."""
    return tuple(entry[0] if len(entry) == 1 else entry or None for entry in axes)


def axes_of(spec: Iterable[str | tuple[str, ...] | None]) -> Axes:
    """Return the axes of a `PartitionSpec`."""
    return tuple((entry,) if isinstance(entry, str) else entry or () for entry in spec)


def assign(shapes: Mapping[str, tuple[int, ...]], rules: Sequence[Rule], mesh: Mapping[str, int]) -> dict[str, Axes]:
    """Return the axes of every array: those of the first rule whose regex matches its name, none if there is none.

    A scalar has none in any case. An array of fewer dimensions than its rule has none either, with a warning.

    Raises `UsageError` if a rule names an axis that the mesh does not have, and `RuleError` if it matches no array,
    or none of so many dimensions.
    """
    for rule in rules:
        _check_axes(rule, mesh)
    patterns = [rule.pattern for rule in rules]
    check_used("spec", patterns, shapes)
    out: dict[str, Axes] = dict.fromkeys(shapes, ())
    misfits: list[list[Misfit]] = [[] for _ in rules]
    fitting = [0] * len(rules)
    for name, shape in shapes.items():
        number = first_match(patterns, name)
        if number is None or not shape:
            continue
        if len(rules[number].axes) > len(shape):
            misfits[number].append((name, shape, f"expected at most {len(shape)} entries"))
        else:
            out[name] = rules[number].axes
            fitting[number] += 1
    for rule, count, unfit in zip(rules, fitting, misfits, strict=True):
        check_fit(f"spec: {rule.pattern.pattern!r}", axes_text(rule.axes), count, unfit)
    return out


def spread(shape: tuple[int, ...], mesh: Mapping[str, int]) -> Axes:
    """Return a partition that divides evenly, for users who have given none.

    Every mesh axis in turn shards the first dimension whose shards so far it divides, or none. Leading dimensions come
    first because their shards are contiguous in a file.
    """
    axes: list[tuple[str, ...]] = [() for _ in shape]
    left = list(shape)
    for axis, size in mesh.items():
        at = next((at for at, length in enumerate(left) if length and length % size == 0), None)
        if at is not None:
            axes[at] += (axis,)
            left[at] //= size
    while axes and not axes[-1]:
        axes.pop()
    return tuple(axes)


def shards(axes: Axes, mesh: Mapping[str, int]) -> list[int]:
    """Return how many blocks each dimension that `axes` names is cut into."""
    return [prod(mesh[axis] for axis in entry) for entry in axes]


def axes_text(axes: Axes) -> str:
    """Return axes as `--spec` takes them."""
    return ",".join("+".join(entry) or "-" for entry in axes)


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Return a mesh as `--mesh` takes it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())
