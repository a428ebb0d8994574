"""How to shard the arrays of a checkpoint over a mesh without access to its devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orbax_safetensors.devices.rules import (
    Misfit,
    check_fit,
    check_pattern,
    check_used,
    first_match,
    none_of,
)
from orbax_safetensors.devices.sharding import device_boxes
from orbax_safetensors.errors import RuleError, TensorMismatchError
from orbax_safetensors.format.names import same
from orbax_safetensors.geometry.box import Box

Spec = Sequence[str | Sequence[str] | None] | PartitionSpec
MeshLike = Mapping[str, int] | Mesh | AbstractMesh | None

# The mesh of unsharded arrays, with the only axis of MaxText's converter.
_UNSHARDED = {"checkpoint_sharding_axis": 1}


@dataclass(frozen=True)
class Partition:
    """A mesh, and for regular expressions of names, or whole names, the axes that shard an array's dimensions.

    The first pattern that matches anywhere in a name (`re.search`) decides. An array is not sharded if no pattern
    matches its name, or if its shape does not fit. `names` are whole names, for partitions without patterns.
    """

    mesh: Mapping[str, int]
    patterns: Mapping[str, Spec] = field(default_factory=dict)
    names: Mapping[str, Spec] = field(default_factory=dict)

    @cached_property
    def _compiled(self) -> list[re.Pattern[str]]:
        return [re.compile(pattern) for pattern in self.patterns]

    def check(self, arrays: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Check patterns and names against the names and shapes of all arrays; warn of arrays that do not fit.

        Raises `RuleError` if a pattern or a name applies to no array, or fits none of its arrays.
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
        for rule, rule_misfits in misfits.items():
            argument, key = rule
            check_fit(
                argument if argument == "like" else f"spec: {key!r}", self._spec(rule), fitting[rule], rule_misfits
            )

    def _rule(self, name: str) -> tuple[str, str] | None:
        """Return the argument and the key in it that decide how an array is sharded."""
        if (key := same(name, self.names)) in self.names:
            return "like", key
        number = first_match(self._compiled, name)
        return None if number is None else ("spec", self._compiled[number].pattern)

    def _spec(self, rule: tuple[str, str]) -> tuple[str | tuple[str, ...] | None, ...]:
        argument, key = rule
        spec = self.names[key] if argument == "like" else self.patterns[key]
        return tuple(part if part is None or isinstance(part, str) else tuple(part) for part in spec)

    def _misfit(self, spec: Sequence[str | tuple[str, ...] | None], shape: tuple[int, ...]) -> str | None:
        """Return why arrays of a shape cannot be sharded as `spec`, None if they can."""
        if len(spec) > len(shape):
            return f"expected at most {len(shape)} entries"
        parts = zip(shape, map(self._parts, spec), strict=False)
        return next((f"{size} does not divide by {count}" for size, count in parts if size % count), None)

    def spec(self, name: str, shape: tuple[int, ...]) -> tuple[str | tuple[str, ...] | None, ...]:
        """Return the mesh axes of each leading dimension of an array; empty if they do not fit the shape."""
        rule = self._rule(name)
        spec = () if rule is None else self._spec(rule)
        return () if self._misfit(spec, shape) else spec

    def _parts(self, part: str | tuple[str, ...] | None) -> int:
        return prod(self.mesh[axis] for axis in (() if part is None else (part,) if isinstance(part, str) else part))

    def shard(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an array's shards."""
        spec = self.spec(name, shape)
        parts = [self._parts(part) for part in spec] + [1] * (len(shape) - len(spec))
        return tuple(size // count for size, count in zip(shape, parts, strict=True))

    def sharding(self, name: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array; its mesh is abstract."""
        return _sharding_over(tuple(self.mesh.items()), self.spec(name, shape))

    def boxes(self, name: str, shape: tuple[int, ...]) -> list[Box]:
        """Return the box of every device, in the order of the mesh."""
        return device_boxes(self.sharding(name, shape), shape)


@lru_cache(maxsize=2**10)  # few partitions are distinct, and arrays that share one sharding are cheap to plan
def _sharding_over(mesh: tuple[tuple[str, int], ...], spec: tuple[str | tuple[str, ...] | None, ...]) -> NamedSharding:
    names, sizes = zip(*mesh, strict=True)
    return NamedSharding(AbstractMesh(sizes, names), PartitionSpec(*spec))


def partition(mesh: MeshLike, patterns: Mapping[str, Spec] | None, like: Any = None) -> Partition:
    """Return the checked partition; without a mesh, it shards nothing. `like` is a tree whose shardings say both."""
    if like is not None:
        if mesh is not None or patterns:
            raise TensorMismatchError("like says the mesh and all specs: pass like alone, or mesh and spec")
        return _of_target(like)
    if mesh is None:
        if patterns:
            raise TensorMismatchError("spec names the axes of a mesh: also pass mesh")
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
    """Return the shardings of a restore's target, by the names of its leaves.

    Only for sharded leaves: others, such as scalars, may not be arrays of the checkpoint.
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
        axes = dict(sharding.mesh.shape)
        mesh = axes if mesh is None else mesh
        if list(axes.items()) != list(mesh.items()):
            raise TensorMismatchError(f"like: {name!r}: is over the mesh {axes}, others are over {dict(mesh)}")
        if any(sharding.spec):
            specs[name] = tuple(sharding.spec)
    if mesh is None:
        raise TensorMismatchError("like: expected a tree with shardings, found none in it")
    return Partition(mesh, names=specs)


def _sharding(leaf: Any) -> Any:
    """Return the sharding of a target's leaf; `ArrayRestoreArgs` may have a mesh and axes instead."""
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
