"""What a caller asks a restore for: trees of leaves and Orbax's restore arguments, checked against the checkpoint.

Everything that can be wrong with a request is found here, before memory is allocated or a tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices.sharding import default_sharding, is_abstract
from orbax_safetensors.devices.trees import empty_nodes, flatten
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.header import shown
from orbax_safetensors.format.names import by_same, nearest, some
from orbax_safetensors.restore.target import LeafRequest, Target, as_stored, leaf_request, target


@dataclass(frozen=True)
class Request:
    """A tree to return: `leaves` are targets, or the placeholders that stay as they are."""

    leaves: tuple[Target | Any, ...]
    structure: jax.tree_util.PyTreeDef

    @property
    def targets(self) -> list[Target]:
        """The leaves that are to be filled, in the order of the tree."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Target)]

    def tree(self, filled: Iterable[Any]) -> Any:
        """The tree with `filled` in place of the targets."""
        values = iter(filled)
        leaves = [next(values) if isinstance(leaf, Target) else leaf for leaf in self.leaves]
        return jax.tree_util.tree_unflatten(self.structure, leaves)


def placed(request: Request, checkpoint: Checkpoint) -> Request:
    """The request with devices for all `jax.Array`s: JAX's default device for those that have no sharding.

    Abstract meshes, as `jax.eval_shape` leaves them under `jax.set_mesh`, become the mesh that is set. Raises
    `TensorMismatchError` if that is another, and if nobody said where an array goes and there are several processes,
    which have no device in common and would each read all of it.
    """
    default: list[jax.sharding.Sharding] = []

    def place(target: Target) -> Target:
        where = f"{checkpoint.path}: {target.name!r}"
        is_array = target.kind is jax.Array
        if target.sharding is None and (is_array or target.unplaced) and jax.process_count() > 1:
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
    """Return the distinct requests of leaves in a request, as `resolve` has it, except those that are wrong."""
    _, leaves, args = _flattened(item, restore_args)
    found = {
        leaf_request(leaf if item is not None else None, args.get(name))
        for name, leaf in _without_placeholders(leaves, args)
    }
    return {one for one in found if one is not None}


def everything(checkpoint: Checkpoint) -> Request:
    """All that the checkpoint has, as NumPy arrays: in a flat dict, or in the tree of its family."""
    tree = checkpoint.tree(partial(as_stored, checkpoint))
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return Request(tuple(leaves), structure)


def resolve(checkpoint: Checkpoint, item: Any, restore_args: Any, *, partial: bool) -> Request:
    """Checks a request and completes what it leaves open from the checkpoint.

    `item` is a tree of arrays, `jax.ShapeDtypeStruct`s, Orbax metadata or scalars; `restore_args` a tree of
    `ocp.RestoreArgs` of the same structure; either may be None, not both. What `restore_args` says of a leaf comes
    first; None says nothing. Unless `partial`, every tensor of the checkpoint must be asked for or have a placeholder
    or an empty node, as None, in its place. If `partial`, `restore_args` may have leaves that `item` does not have.

    Raises:
      TensorMismatchError: names, shapes, dtypes or shardings do not fit the checkpoint.
    """
    structure, leaves, args = _flattened(item, restore_args)
    leaves, args = by_same(leaves, checkpoint.leaves), by_same(args, checkpoint.leaves)
    wanted = dict(_without_placeholders(leaves, args))
    if restore_args is not None:
        beyond: Set[str] = set() if partial else args.keys() - leaves.keys()
        lacking = wanted.keys() - args.keys()
        for one, tree, differing in (("item", item, beyond), ("restore_args", restore_args, lacking)):
            if names := _not_empty(differing, tree):
                raise TensorMismatchError(
                    f"item and restore_args differ: {one} does not have {some(sorted(names), shown)}"
                )
    unexpected = set() if partial else checkpoint.leaves.keys() - leaves.keys()
    _check_names(checkpoint, wanted, _not_empty(unexpected, restore_args if item is None else item))
    out: list[Target | Any] = []
    for name, leaf in leaves.items():
        if name not in wanted:
            out.append(ocp.PLACEHOLDER)
            continue
        args_of_leaf = args.get(name, ocp.RestoreArgs())
        if not isinstance(args_of_leaf, ocp.RestoreArgs):
            raise TensorMismatchError(f"{name!r}: expected ocp.RestoreArgs in restore_args, found {args_of_leaf!r}")
        out.append(target(checkpoint, name, leaf if item is not None else None, args_of_leaf))
    return Request(tuple(out), structure)


def _flattened(item: Any, restore_args: Any) -> tuple[jax.tree_util.PyTreeDef, dict[str, Any], dict[str, Any]]:
    """The structure to return, its leaves, and what `restore_args` has for them, both by name."""
    structure, leaves = flatten(item if item is not None else restore_args)
    return structure, leaves, flatten(restore_args)[1] if restore_args is not None else {}


def _without_placeholders(leaves: Mapping[str, Any], args: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The leaves that are to be filled, with their names."""
    for name, leaf in leaves.items():
        if leaf is not ocp.PLACEHOLDER and args.get(name) is not ocp.PLACEHOLDER:
            yield name, leaf


def exact_shape(args: ocp.RestoreArgs) -> tuple[int, ...] | None:
    """The shape that a leaf has to have; None if `args` do not say it, or allow others."""
    shape = getattr(args, "global_shape", None)
    return tuple(shape) if isinstance(shape, tuple | list) and getattr(args, "strict", True) else None


def are_restore_args(tree: Any) -> bool:
    """Whether a tree is one of restore arguments rather than of arrays."""
    return any(isinstance(leaf, ocp.RestoreArgs) for leaf in jax.tree_util.tree_leaves(tree))


def _not_empty(names: Set[str], tree: Any) -> Set[str]:
    """The names that are not of empty nodes, which nobody looks for unless there is a reason to."""
    return names - empty_nodes(tree) if names else names


def _check_names(checkpoint: Checkpoint, wanted: Mapping[str, Any], unexpected: Set[str]) -> None:
    """Raises `TensorMismatchError` if a wanted name is not stored, or if a stored name is unexpected."""
    stored = checkpoint.leaves
    problems = []
    if missing := [name for name in wanted if name not in stored]:

        def with_nearest(name: str) -> str:
            found = nearest(name, stored)
            return shown(name) + (f" (nearest stored: {shown(found)})" if found else "")

        problems.append(f"not in the checkpoint: {some(missing, with_nearest)}")
    if unexpected:
        problems.append(
            "in the checkpoint but not in the tree (pass partial_restore=True to leave them out): "
            + some([name for name in stored if name in unexpected], shown)
        )
    if problems:
        raise TensorMismatchError(f"{checkpoint.path}: " + "; ".join(problems))
