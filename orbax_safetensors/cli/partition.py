"""Meshes and partitions as they are written on a command line, and a partition for users who wrote none.

No device is started for them, so that mistakes are answered before there is one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orbax_safetensors.cli.arguments import UsageError
from orbax_safetensors.devices.partition import Spec, partition
from orbax_safetensors.devices.sharding import Axes


class Rule(NamedTuple):
    """One `--spec`: arrays in whose names `regex` is found are sharded by `spec`. `text` is as it was written."""

    text: str
    regex: str
    spec: Spec


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
    """Parse `REGEX=AXES`. The regex may hold `=`, the axes may not."""
    regex, equals, axes = text.rpartition("=")
    if not equals:
        raise UsageError(f"expected REGEX=AXES as in 'kernel$=data,model', found {text!r}")
    parts = [() if part in ("", "-") else tuple(part.split("+")) for part in axes.split(",")] if axes else []
    if not all(axis.isidentifier() for part in parts for axis in part):
        raise UsageError(f"expected for every dimension -, AXIS or AXIS+AXIS in {axes!r} of {text!r}")
    return Rule(text, regex, tuple(part[0] if len(part) == 1 else part or None for part in parts))


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


def given_spec(rules: Sequence[Rule], mesh: Mapping[str, int] | None) -> dict[str, Spec] | None:
    """Return the rules of `--spec` as the functions take them.

    Raises `UsageError` or `RuleError` if they do not fit the mesh.
    """
    if rules and mesh is None:
        raise UsageError("--spec names the axes of a --mesh; also pass --mesh")
    spec: dict[str, Spec] = {}
    for rule in rules:
        if rule.regex in spec:
            raise UsageError(f"--spec {rule.text!r}: is passed twice")
        spec[rule.regex] = rule.spec
    partition(mesh, spec)
    return spec or None


def spread(shape: tuple[int, ...], mesh: Mapping[str, int]) -> Spec:
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
    return tuple(part or None for part in axes)


def axes_text(axes: Axes) -> str:
    """Return axes as `--spec` takes them."""
    return ",".join("+".join(entry) or "-" for entry in axes)


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Return a mesh as `--mesh` takes it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())
