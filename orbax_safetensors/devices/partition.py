"""How the arrays of a checkpoint are to be sharded over a mesh whose devices are not here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orbax_safetensors.devices.rules import (
    Misfit,
    RuleError,
    check_fit,
    check_pattern,
    check_used,
    first_found,
    none_of,
)
from orbax_safetensors.devices.sharding import device_boxes
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.names import same
from orbax_safetensors.geometry.box import Box

Spec = Sequence[str | Sequence[str] | None] | PartitionSpec
AskedMesh = Mapping[str, int] | Mesh | AbstractMesh | None

# The mesh of an array that nobody shards. MaxText's own converter calls its only axis so.
_UNSHARDED = {"checkpoint_sharding_axis": 1}


@dataclass(frozen=True)
class Partition:
    """A mesh, and for patterns of names, or whole names, the axes that shard an array's dimensions.

    The first pattern that is found in a name (`re.search`) decides; an array that none is found in is not sharded, and
    neither is one whose shape does not fit. `names` are those of a target, which has no patterns.
    """

    mesh: Mapping[str, int]
    patterns: Mapping[str, Spec] = field(default_factory=dict)
    names: Mapping[str, Spec] = field(default_factory=dict)

    @cached_property
    def _compiled(self) -> list[re.Pattern[str]]:
        return [re.compile(pattern) for pattern in self.patterns]

    def check(self, arrays: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Checks patterns and names against the names and shapes of all arrays; warns of arrays that do not fit.

        Raises `RuleError` if a pattern or a name counts for none of them, or for none that it fits.
        """
        shapes = list(arrays)
        stored = [name for name, _ in shapes]
        check_used("spec", self._compiled, stored)
        if self.names and (unknown := self.names.keys() - {same(name, self.names) for name in stored}):
            raise RuleError(f"like: {min(unknown)!r} is {none_of(stored)}")
        fitting: Counter[tuple[str, str]] = Counter()
        misfits: dict[tuple[str, str], list[Misfit]] = {}
        for name, shape in shapes:
            rule = self._rule(name)
            if rule is None or not shape:
                continue
            if why := self._misfit(self._spec(rule), shape):
                misfits.setdefault(rule, []).append((name, shape, why))
            else:
                fitting[rule] += 1
        for rule, found in misfits.items():
            argument, key = rule
            check_fit(argument if argument == "like" else f"spec: {key!r}", self._spec(rule), fitting[rule], found)

    def _rule(self, name: str) -> tuple[str, str] | None:
        """Which argument says how an array is sharded, and under which key."""
        if (key := same(name, self.names)) in self.names:
            return "like", key
        number = first_found(self._compiled, name)
        return None if number is None else ("spec", self._compiled[number].pattern)

    def _spec(self, rule: tuple[str, str]) -> tuple[str | tuple[str, ...] | None, ...]:
        argument, key = rule
        asked = self.names[key] if argument == "like" else self.patterns[key]
        return tuple(part if part is None or isinstance(part, str) else tuple(part) for part in asked)

    def _misfit(self, spec: Sequence[str | tuple[str, ...] | None], shape: tuple[int, ...]) -> str | None:
        """Why arrays of a shape cannot be sharded so, None if they can."""
        if len(spec) > len(shape):
            return f"expected at most {len(shape)} entries"
        parts = zip(shape, map(self._parts, spec), strict=False)
        return next((f"{size} does not divide by {count}" for size, count in parts if size % count), None)

    def spec(self, name: str, shape: tuple[int, ...]) -> tuple[str | tuple[str, ...] | None, ...]:
        """The mesh axes of each leading dimension of an array; none if they do not fit the shape."""
        rule = self._rule(name)
        spec = () if rule is None else self._spec(rule)
        return () if self._misfit(spec, shape) else spec

    def _parts(self, part: str | tuple[str, ...] | None) -> int:
        return prod(self.mesh[axis] for axis in (() if part is None else (part,) if isinstance(part, str) else part))

    def shard(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an array's shards."""
        spec = self.spec(name, shape)
        parts = [self._parts(part) for part in spec] + [1] * (len(shape) - len(spec))
        return tuple(size // count for size, count in zip(shape, parts, strict=True))

    def boxes(self, name: str, shape: tuple[int, ...]) -> list[Box]:
        """The box of every device, in the order of the mesh."""
        mesh = AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh))
        return device_boxes(NamedSharding(mesh, PartitionSpec(*self.spec(name, shape))), shape)


def partition(mesh: AskedMesh, patterns: Mapping[str, Spec] | None, like: Any = None) -> Partition:
    """Checks what a caller says; without a mesh, nothing is sharded. `like` is a tree that says both."""
    if like is not None:
        if mesh is not None or patterns:
            raise TensorMismatchError("like says the mesh and all specs: pass like alone, or mesh and spec")
        return _of_target(like)
    if mesh is None:
        if patterns:
            raise TensorMismatchError("spec names the axes of a mesh: pass mesh, too")
        return Partition(_UNSHARDED)
    sizes = mesh.shape if isinstance(mesh, Mesh | AbstractMesh) else mesh
    if (
        not isinstance(sizes, Mapping)
        or not sizes
        or not all(isinstance(axis, str) and _is_size(size) for axis, size in sizes.items())
    ):
        raise TensorMismatchError(f"mesh: expected the sizes of its axes by name, as {{'fsdp': 16}}, found {mesh!r}")
    if not isinstance(patterns or {}, Mapping):
        raise TensorMismatchError(
            f"spec: expected axes by pattern, as {{'kernel': ('fsdp', None)}}, found {patterns!r}"
        )
    specs = {}
    for pattern, spec in (patterns or {}).items():
        check_pattern("spec", pattern)
        specs[pattern] = tuple(spec) if isinstance(spec, PartitionSpec) else spec
        if not _is_spec(specs[pattern]):
            raise TensorMismatchError(f"spec: {pattern!r}: expected a tuple of axes and None, found {spec!r}")
        _check_axes(pattern, specs[pattern], sizes)
    return Partition({axis: int(size) for axis, size in sizes.items()}, specs)


def _check_axes(pattern: str, spec: Spec, mesh: Mapping[str, int]) -> None:
    named = [axis for part in spec if part is not None for axis in ((part,) if isinstance(part, str) else part)]
    if unknown := [axis for axis in named if axis not in mesh]:
        raise RuleError(f"spec: {pattern!r}: the mesh has no axis {unknown[0]!r}, it has {list(mesh)}")
    if len(set(named)) < len(named):
        raise RuleError(f"spec: {pattern!r}: an axis of a mesh can shard one dimension only")


def _of_target(tree: Any) -> Partition:
    """The shardings of a restore's target, by the names of its leaves: of those that are sharded, as others may be none
    of the arrays, as scalars are not.
    """
    mesh: Mapping[str, int] | None = None
    specs = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: hasattr(node, "sharding")):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        sharding = _sharding(leaf)
        if sharding is None:
            continue
        if not isinstance(sharding, NamedSharding):
            raise TensorMismatchError(f"like: {name!r}: expected a sharding over a mesh, found {sharding}")
        own = dict(sharding.mesh.shape)
        mesh = own if mesh is None else mesh
        if list(own.items()) != list(mesh.items()):
            raise TensorMismatchError(f"like: {name!r}: is over the mesh {own}, others are over {dict(mesh)}")
        if any(sharding.spec):
            specs[name] = tuple(sharding.spec)
    if mesh is None:
        raise TensorMismatchError("like: expected a tree with shardings, found none in it")
    return Partition(mesh, names=specs)


def _sharding(leaf: Any) -> Any:
    """That of a target's leaf, which `ArrayRestoreArgs` may have as a mesh and its axes."""
    if getattr(leaf, "mesh", None) is not None and getattr(leaf, "mesh_axes", None) is not None:
        return NamedSharding(leaf.mesh, leaf.mesh_axes)
    return getattr(leaf, "sharding", None)


def _is_size(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) > 0


def _is_spec(spec: Any) -> bool:
    def is_tuple(value: Any) -> bool:
        return isinstance(value, Sequence) and not isinstance(value, str)

    return is_tuple(spec) and all(
        part is None or isinstance(part, str) or (is_tuple(part) and all(isinstance(axis, str) for axis in part))
        for part in spec
    )
