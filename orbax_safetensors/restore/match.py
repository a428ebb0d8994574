"""The caller's tree matched with the checkpoint: each leaf finds its view, and becomes a `Target`.

A wrong request is refused here, before memory is allocated or a tensor is read.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices.casts import Casts
from orbax_safetensors.devices.rules import none_of
from orbax_safetensors.devices.sharding import default_sharding, is_abstract, plain
from orbax_safetensors.devices.trees import empty_nodes, flatten, is_random
from orbax_safetensors.errors import TargetTypeError, TensorMismatchError
from orbax_safetensors.format.header import shown
from orbax_safetensors.format.names import LISTED, by_path, by_same, hint, some
from orbax_safetensors.mapping.coverage import codes_hint
from orbax_safetensors.restore.leaf_request import MESH
from orbax_safetensors.restore.request import ShardingOf
from orbax_safetensors.restore.target import Target, Targets

_T = TypeVar("_T")

_NO_ARGS = ocp.RestoreArgs()
_NUMPY_ARGS = ocp.RestoreArgs(restore_type=np.ndarray)


@dataclass(frozen=True)
class Matched:
    """A tree to return: `leaves` are targets, or placeholders, which stay as they are."""

    leaves: tuple[Target | Any, ...]
    structure: jax.tree_util.PyTreeDef

    @property
    def targets(self) -> list[Target]:
        """Return the leaves to fill, in the order of the tree."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Target)]

    def only(self, patterns: Sequence[str]) -> Matched:
        """Return the tree of dicts and lists with the targets of these names, or of names that a pattern matches.

        A list keeps its length, with None in the place of what is left out. Raises `TensorMismatchError` if a pattern
        matches no name.
        """
        names = [target.name for target in self.targets]
        kept: set[str] = set()
        for pattern in patterns:
            matching = fnmatch.filter(names, pattern)
            if not matching:
                raise TensorMismatchError(
                    f"partial: {pattern!r} matches {none_of(names, 'leaves')}{hint(pattern, names)}"
                )
            kept.update(matching)
        leaves, structure = jax.tree_util.tree_flatten(_only(self.tree(self.targets), kept))
        return Matched(tuple(leaves), structure)

    def cast(self, casts: Casts) -> Matched:
        """Return the tree with its arrays of floating point in other dtypes."""
        arrays = {target.name: target.dtype for target in self.targets if target.kind in (jax.Array, np.ndarray)}
        chosen = casts.chosen(arrays)
        leaves = (
            leaf.cast(chosen[leaf.name]) if isinstance(leaf, Target) and leaf.name in chosen else leaf
            for leaf in self.leaves
        )
        return replace(self, leaves=tuple(leaves)) if chosen else self

    def tree(self, values: Iterable[Any]) -> Any:
        """Return the tree with `values` in place of the targets."""
        remaining = iter(values)
        leaves = [next(remaining) if isinstance(leaf, Target) else leaf for leaf in self.leaves]
        return jax.tree_util.tree_unflatten(self.structure, leaves)


def match(
    checkpoint: Checkpoint, item: Any, restore_args: Any, *, partial: bool, paths: Mapping[str, str] | None = None
) -> Matched:
    """Check a request, and complete it from the checkpoint.

    `item` is a tree of arrays, `jax.ShapeDtypeStruct`s, Orbax metadata or scalars; `restore_args` is a tree of
    `ocp.RestoreArgs` of the same structure; either may be None, not both. For each leaf, `restore_args` has precedence
    over `item`, except for fields that are None. Functions among the leaves, which modules of Equinox have, stay as
    they are. Unless `partial`, the request must have a leaf, a placeholder or an empty node such as None for every
    tensor of the checkpoint. If `partial`, `restore_args` may have leaves that `item` does not have. `paths` are the
    names in the checkpoint of all leaves; by default, a leaf has its own name there, or another spelling of it.

    Raises:
      TensorMismatchError: names, shapes, dtypes or shardings do not fit the checkpoint.
    """
    stored = checkpoint.leaves
    structure, leaves = flatten(item if item is not None else restore_args)
    args = flatten(restore_args)[1] if item is not None and restore_args is not None else {}
    if paths is None:
        leaves, args = spelled(checkpoint, leaves), spelled(checkpoint, args)
    else:
        leaves, args = ({paths[name]: leaf for name, leaf in named.items()} for named in (leaves, args))
    if item is None:
        args = leaves
    requested = {
        name: leaf
        for name, leaf in leaves.items()
        if leaf is not ocp.PLACEHOLDER
        and args.get(name) is not ocp.PLACEHOLDER
        and (name in stored or not callable(leaf))
    }
    if restore_args is not None:
        beyond: Set[str] = set() if partial else args.keys() - leaves.keys()
        lacking = requested.keys() - args.keys()
        for argument, tree, differing in (("item", item, beyond), ("restore_args", restore_args, lacking)):
            if differing and (names := differing - empty_nodes(tree)):
                raise TensorMismatchError(
                    f"item and restore_args differ: {argument} does not have {some(sorted(names), shown)}"
                )
    unexpected: Set[str] = set() if partial else stored.keys() - leaves.keys()
    if unexpected:
        unexpected = unexpected - empty_nodes(restore_args if item is None else item)
    if unexpected or not requested.keys() <= stored.keys():
        problems = _wrong_names(checkpoint, requested, unexpected, may_pass_family=paths is None)
        # Orbax's handlers, which pass names, do not say whether they were to transform the tree.
        advice = "" if paths is None else "; transforms do not rename tensors: use stored names, or register a family"
        raise TensorMismatchError(f"{checkpoint.path}: {problems}{advice}")
    out: list[Target | Any] = []
    targets = Targets(checkpoint)
    for name, leaf in leaves.items():
        if name not in requested:
            out.append(leaf if callable(leaf) else ocp.PLACEHOLDER)
            continue
        leaf_args = args.get(name, _NO_ARGS)
        if not isinstance(leaf_args, ocp.RestoreArgs):
            raise TargetTypeError(f"{name!r}: expected ocp.RestoreArgs in restore_args, found {leaf_args!r}")
        out.append(targets.target(name, leaf if item is not None else None, leaf_args))
    return Matched(tuple(out), structure)


def spelled(checkpoint: Checkpoint, leaves: Mapping[str, _T]) -> dict[str, _T]:
    """Return leaves under the names that the checkpoint has for them."""
    return (by_same if checkpoint.mapped is None else by_path)(leaves, checkpoint.leaves)


def args_of(sharding_of: ShardingOf | None, name: str, shape: tuple[int, ...]) -> ocp.RestoreArgs:
    """Return the restore arguments of an array that goes where `sharding_of` says; of a NumPy array without it."""
    sharding = None if sharding_of is None else sharding_of(name, shape)
    return _NUMPY_ARGS if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding)


def assign_devices(matched: Matched, path: str, *, abstract: bool = False) -> Matched:
    """Return a tree with devices for all `jax.Array`s: JAX's default device for those without a sharding.

    Abstract meshes, as `jax.eval_shape` leaves them under `jax.set_mesh`, become the mesh that is set, or stay if
    `abstract`. Raises `TensorMismatchError` if the set mesh is another, or if an array has no sharding and there are
    several processes: these have no device in common, and each would read the whole array. `path` is for messages.
    """
    default: jax.sharding.Sharding | None = None
    leaves = list(matched.leaves)
    for number, target in enumerate(leaves):
        if not isinstance(target, Target) or not (target.kind is jax.Array or target.lacks_sharding):
            continue
        where, sharding = f"{path}: {target.name!r}", target.sharding
        if sharding is None and jax.process_count() > 1:
            raise TensorMismatchError(
                f"{where} has no sharding, and there are {jax.process_count()} processes; give it one in restore_args "
                "or in the item"
            )
        if target.lacks_sharding:
            continue
        if sharding is None:
            default = default or default_sharding()
            leaves[number] = replace(target, sharding=default)
        elif not abstract and isinstance(named := plain(sharding), jax.sharding.NamedSharding) and is_abstract(named):
            mesh = jax.sharding.get_mesh()
            if mesh.empty or mesh.abstract_mesh != named.mesh:
                raise TensorMismatchError(f"{where} has a sharding without devices: set its mesh with jax.set_mesh")
            concrete = jax.sharding.NamedSharding(mesh, named.spec)
            in_layout = Format(sharding.layout, concrete) if isinstance(sharding, Format) else concrete
            leaves[number] = replace(target, sharding=in_layout)
    return replace(matched, leaves=tuple(leaves))


def _wrong_names(
    checkpoint: Checkpoint, requested: Mapping[str, Any], unexpected: Set[str], *, may_pass_family: bool
) -> str:
    """Return which requested names are not stored, and which stored names are unexpected."""
    stored = checkpoint.leaves
    problems = []
    if missing := [name for name in requested if name not in stored]:
        keys = any(is_random(getattr(requested[name], "dtype", None)) for name in missing)
        stored_of_model = "nnx.state(model, (nnx.Param, nnx.BatchStat))"
        advice = f" (random keys are not stored; leave them out, as {stored_of_model} does)" if keys else ""
        is_mesh = all(type(leaf) is int and not hint(name, stored) for name, leaf in requested.items())
        if is_mesh:
            advice += f" (for a mesh, pass {MESH} rather than sizes)"
        elif all(type(requested[name]) in (bool, int, float) for name in missing):
            advice += " (leave out numbers of a module, as eqx.partition(model, eqx.is_array) does)"
        if checkpoint.mapped is not None and any(name in checkpoint.tensors for name in missing):
            advice += " (some are names of stored tensors, and a family is in use: family='identity' restores these)"
        if checkpoint.quantized:
            advice += codes_hint(missing, stored, loads=True)
        is_other = may_pass_family and checkpoint.mapped is None and len(missing) == len(requested) and not is_mesh
        names = some(missing, lambda name: shown(name) + hint(name, stored), most=3 if is_other else LISTED)
        problems.append(f"not in the checkpoint: {names}{advice}")
        if is_other:
            known = "rename its leaves, or pass family=, as 'maxtext'"
            return f"the tree has none of the stored names: {known}; {problems[0]}"
    if unexpected:
        problems.append(
            "in the checkpoint but not in the tree (partial=True leaves them out; for Orbax, partial_restore=True): "
            + some([name for name in stored if name in unexpected], shown)
        )
    return "; ".join(problems)


def _only(node: Any, names: Set[str]) -> Any:
    """Return a tree of dicts and lists with the targets of these names; None without one."""
    if isinstance(node, dict):
        children = {key: _only(child, names) for key, child in node.items()}
        return {key: child for key, child in children.items() if child is not None} or None
    if isinstance(node, list):
        below = [_only(child, names) for child in node]
        return below if any(child is not None for child in below) else None
    return node if isinstance(node, Target) and node.name in names else None
