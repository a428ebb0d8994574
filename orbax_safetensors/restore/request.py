"""Restore requests: trees of leaves and Orbax's restore arguments, checked against the checkpoint.

A wrong request is refused here, before memory is allocated or a tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices.sharding import default_sharding, is_abstract
from orbax_safetensors.devices.trees import empty_nodes, flatten, is_random
from orbax_safetensors.errors import TargetTypeError, TensorMismatchError
from orbax_safetensors.format.header import shown
from orbax_safetensors.format.names import by_path, by_same, hint, some
from orbax_safetensors.restore.target import LeafRequest, Resolver, Target, as_stored, leaf_request

# The sharding of an array, of its name and shape; None for a NumPy array.
ShardingOf = Callable[[str, tuple[int, ...]], Any]


@dataclass(frozen=True)
class Request:
    """A tree to return: `leaves` are targets, or placeholders, which stay as they are."""

    leaves: tuple[Target | Any, ...]
    structure: jax.tree_util.PyTreeDef

    @property
    def targets(self) -> list[Target]:
        """Return the leaves to fill, in the order of the tree."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Target)]

    def tree(self, filled: Iterable[Any]) -> Any:
        """Return the tree with `filled` in place of the targets."""
        values = iter(filled)
        leaves = [next(values) if isinstance(leaf, Target) else leaf for leaf in self.leaves]
        return jax.tree_util.tree_unflatten(self.structure, leaves)


def placed(request: Request, checkpoint: Checkpoint) -> Request:
    """Return the request with devices for all `jax.Array`s: JAX's default device for those without a sharding.

    Abstract meshes, as `jax.eval_shape` leaves them under `jax.set_mesh`, become the mesh that is set. Raises
    `TensorMismatchError` if the set mesh is another, or if an array has no sharding and there are several processes:
    these have no device in common, and each would read the whole array.
    """
    default: list[jax.sharding.Sharding] = []

    def place(target: Target) -> Target:
        is_array = target.kind is jax.Array
        if not is_array and not target.unplaced:
            return target
        where = f"{checkpoint.path}: {target.name!r}"
        if target.sharding is None and jax.process_count() > 1:
            raise TensorMismatchError(
                f"{where} has no sharding, and there are {jax.process_count()} processes; give it one in restore_args "
                "or in the item"
            )
        if not is_array:
            return target
        if target.sharding is None:
            if not default:
                default.append(default_sharding())
            return replace(target, sharding=default[0])
        sharding = target.sharding
        if not isinstance(sharding, jax.sharding.NamedSharding) or not is_abstract(sharding):
            return target
        mesh = jax.sharding.get_mesh()
        if mesh.empty or mesh.abstract_mesh != sharding.mesh:
            raise TensorMismatchError(f"{where} has a sharding without devices: set its mesh with jax.set_mesh")
        return replace(target, sharding=jax.sharding.NamedSharding(mesh, sharding.spec))

    leaves = tuple(place(leaf) if isinstance(leaf, Target) else leaf for leaf in request.leaves)
    return replace(request, leaves=leaves)


def leaf_requests(item: Any, restore_args: Any) -> set[LeafRequest]:
    """Return the distinct leaf requests of `item` and `restore_args`, as for `resolve`, except wrong ones."""
    _, leaves, args = _flattened(item, restore_args)
    requests = {
        leaf_request(leaf if item is not None else None, args.get(name))
        for name, leaf in _without_placeholders(leaves, args)
    }
    return {request for request in requests if request is not None}


def everything(checkpoint: Checkpoint, sharding_of: ShardingOf | None = None) -> Request:
    """Return a request for the whole checkpoint, as NumPy arrays by default: a flat dict, or the tree of its family."""
    if sharding_of is not None:
        restore_args = checkpoint.tree(lambda name, view: args_of(sharding_of, name, view.shape))
        return resolve(checkpoint, None, restore_args, partial=False)
    tree = checkpoint.tree(partial(as_stored, checkpoint))
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return Request(tuple(leaves), structure)


def resolve(checkpoint: Checkpoint, item: Any, restore_args: Any, *, partial: bool) -> Request:
    """Check a request, and complete it from the checkpoint.

    `item` is a tree of arrays, `jax.ShapeDtypeStruct`s, Orbax metadata or scalars; `restore_args` is a tree of
    `ocp.RestoreArgs` of the same structure; either may be None, not both. For each leaf, `restore_args` goes before
    `item`, except for fields that are None. Functions among the leaves, which modules of Equinox have, stay as they
    are. Unless `partial`, the request must have a leaf, a placeholder or an empty node such as None for every tensor of
    the checkpoint. If `partial`, `restore_args` may have leaves that `item` does not have.

    Raises:
      TensorMismatchError: names, shapes, dtypes or shardings do not fit the checkpoint.
    """
    structure, leaves, args = _flattened(item, restore_args)
    spelled = by_same if checkpoint.mapped is None else by_path
    leaves, args = spelled(leaves, checkpoint.leaves), spelled(args, checkpoint.leaves)
    requested = {
        name: leaf
        for name, leaf in _without_placeholders(leaves, args)
        if name in checkpoint.leaves or not callable(leaf)
    }
    if restore_args is not None:
        beyond: Set[str] = set() if partial else args.keys() - leaves.keys()
        lacking = requested.keys() - args.keys()
        for argument, tree, differing in (("item", item, beyond), ("restore_args", restore_args, lacking)):
            if names := _not_empty(differing, tree):
                raise TensorMismatchError(
                    f"item and restore_args differ: {argument} does not have {some(sorted(names), shown)}"
                )
    unexpected = set() if partial else checkpoint.leaves.keys() - leaves.keys()
    _check_names(checkpoint, requested, _not_empty(unexpected, restore_args if item is None else item))
    out: list[Target | Any] = []
    resolver, no_args = Resolver(checkpoint), ocp.RestoreArgs()
    for name, leaf in leaves.items():
        if name not in requested:
            out.append(leaf if callable(leaf) else ocp.PLACEHOLDER)
            continue
        args_of_leaf = args.get(name, no_args)
        if not isinstance(args_of_leaf, ocp.RestoreArgs):
            raise TargetTypeError(f"{name!r}: expected ocp.RestoreArgs in restore_args, found {args_of_leaf!r}")
        out.append(resolver.target(name, leaf if item is not None else None, args_of_leaf))
    return Request(tuple(out), structure)


def _flattened(item: Any, restore_args: Any) -> tuple[jax.tree_util.PyTreeDef, dict[str, Any], dict[str, Any]]:
    """Return the structure of the request, its leaves, and their restore arguments, the latter two by name."""
    structure, leaves = flatten(item if item is not None else restore_args)
    return structure, leaves, flatten(restore_args)[1] if restore_args is not None else {}


def _without_placeholders(leaves: Mapping[str, Any], args: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves to fill, with their names."""
    for name, leaf in leaves.items():
        if leaf is not ocp.PLACEHOLDER and args.get(name) is not ocp.PLACEHOLDER:
            yield name, leaf


def args_of(sharding_of: ShardingOf, name: str, shape: tuple[int, ...]) -> ocp.RestoreArgs:
    """Return the restore arguments of an array that goes where `sharding_of` says."""
    sharding = sharding_of(name, shape)
    return ocp.RestoreArgs(restore_type=np.ndarray) if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding)


def leaf_shapes(item: Any, restore_args: Any) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes that the leaves of a request must have, by name; None if the request does not say."""
    _, leaves, args = _flattened(item, restore_args)
    shapes = {}
    for name, leaf in leaves.items():
        given = args.get(name)
        shape = exact_shape(given) if isinstance(given, ocp.RestoreArgs) else None
        if shape is None and getattr(given, "strict", True):
            shape = getattr(leaf, "shape", None)
        shapes[name] = shape if isinstance(shape, tuple) else None
    return shapes


def exact_shape(args: ocp.RestoreArgs) -> tuple[int, ...] | None:
    """Return the shape that a leaf must have; None if `args` have no shape, or allow other shapes."""
    shape = getattr(args, "global_shape", None)
    return tuple(shape) if isinstance(shape, tuple | list) and getattr(args, "strict", True) else None


def of_target(target: Any) -> tuple[Any, Any, ShardingOf | None]:
    """Return what a target is, and None for the others: an item, restore arguments, or a function to shardings.

    Raises `TargetTypeError` if it is something else, such as a mesh, which is no sharding yet, or a class.
    """
    if isinstance(target, jax.sharding.Sharding | Format):
        return None, None, lambda name, shape: target
    # A module may be a tree that can be called, and so can be a mesh.
    is_leaf, is_other = jax.tree_util.all_leaves([target]), isinstance(target, jax.sharding.Mesh | type)
    if is_leaf and callable(target) and not is_other:
        return None, None, target
    if is_leaf and (is_other or not (hasattr(target, "shape") or isinstance(target, ocp.RestoreArgs))):
        raise TargetTypeError(f"target: expected a tree, a sharding or a function that returns one, found {target!r}")
    return (None, target, None) if are_restore_args(target) else (target, None, None)


def are_restore_args(tree: Any) -> bool:
    """Return whether the leaves of a tree are restore arguments instead of arrays."""
    return any(isinstance(leaf, ocp.RestoreArgs) for leaf in jax.tree_util.tree_leaves(tree))


def _not_empty(names: Set[str], tree: Any) -> Set[str]:
    """Return the names that are not of empty nodes; searches the tree only if there are names."""
    return names - empty_nodes(tree) if names else names


def _check_names(checkpoint: Checkpoint, requested: Mapping[str, Any], unexpected: Set[str]) -> None:
    """Raise `TensorMismatchError` if a requested name is not stored, or if a stored name is unexpected."""
    stored = checkpoint.leaves
    problems = []
    if missing := [name for name in requested if name not in stored]:
        keys = any(is_random(getattr(requested[name], "dtype", None)) for name in missing)
        advice = " (random keys are not stored; leave them out, as nnx.state(model, nnx.Param) does)" if keys else ""
        if checkpoint.mapped is not None and any(name in checkpoint.tensors for name in missing):
            advice += " (some are names of stored tensors, and a family is in use: family='identity' restores these)"
        names = some(missing, lambda name: shown(name) + hint(name, stored))
        problems.append(f"not in the checkpoint: {names}{advice}")
    if unexpected:
        problems.append(
            "in the checkpoint but not in the tree (SafetensorsRestore with partial_restore=True leaves them out): "
            + some([name for name in stored if name in unexpected], shown)
        )
    if problems:
        raise TensorMismatchError(f"{checkpoint.path}: " + "; ".join(problems))
