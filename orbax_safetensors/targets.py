"""What a caller asks a restore for: trees of leaves and Orbax's restore arguments, checked against the checkpoint.

Everything that can be wrong with a request is found here, before memory is allocated or a tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import orbax.checkpoint as ocp

from orbax_safetensors import arrays
from orbax_safetensors.checkpoint import Checkpoint
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.header import shown
from orbax_safetensors.format.names import nearest, some
from orbax_safetensors.leaves import Asked, Target, as_stored, asked, target
from orbax_safetensors.trees import flatten


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
    """The request with devices for all arrays: JAX's default device for those that have no sharding.

    Abstract meshes, as `jax.eval_shape` leaves them under `jax.set_mesh`, become the mesh that is set. Raises
    `TensorMismatchError` where that is another, and where an array has no sharding and there are several processes,
    which have no device in common.
    """
    default: list[jax.sharding.Sharding] = []

    def place(target: Target) -> Target:
        if target.kind is not jax.Array:
            return target
        where = f"{checkpoint.path}: {target.name!r}"
        if target.sharding is None:
            if jax.process_count() > 1:
                raise TensorMismatchError(
                    f"{where} has no sharding, and there are {jax.process_count()} processes; give it one in "
                    "restore_args or in the item"
                )
            if not default:
                default.append(arrays.default_sharding())
            return replace(target, sharding=default[0])
        sharding = target.sharding
        if not isinstance(sharding, jax.sharding.NamedSharding) or not arrays.is_abstract(sharding):
            return target
        mesh = jax.sharding.get_mesh()
        if mesh.empty or mesh.abstract_mesh != sharding.mesh:
            raise TensorMismatchError(f"{where} has a sharding without devices: set its mesh with jax.set_mesh")
        return replace(target, sharding=jax.sharding.NamedSharding(mesh, sharding.spec))

    leaves = tuple(place(leaf) if isinstance(leaf, Target) else leaf for leaf in request.leaves)
    return replace(request, leaves=leaves)


def all_asked(item: Any, restore_args: Any) -> set[Asked]:
    """The different things that a request, as `resolve` has it, asks for, but for what is wrong with it."""
    _, leaves, args = _flattened(item, restore_args)
    found = {
        asked(leaf if item is not None else None, args.get(name)) for name, leaf in _without_placeholders(leaves, args)
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
    first. Unless `partial`, every tensor of the checkpoint must be asked for or have a placeholder.

    Raises:
      TensorMismatchError: names, shapes, dtypes or shardings do not fit the checkpoint.
    """
    structure, leaves, args = _flattened(item, restore_args)
    wanted = dict(_without_placeholders(leaves, args))
    if restore_args is not None:
        for one, names in (("item", set(args) - set(leaves)), ("restore_args", set(wanted) - set(args))):
            if names:
                raise TensorMismatchError(
                    f"item and restore_args differ: {one} does not have {some(sorted(names), shown)}"
                )
    _check_names(checkpoint, wanted, None if partial else leaves)
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


def are_restore_args(tree: Any) -> bool:
    """Whether a tree is one of restore arguments rather than of arrays."""
    return any(isinstance(leaf, ocp.RestoreArgs) for leaf in jax.tree_util.tree_leaves(tree))


def _check_names(checkpoint: Checkpoint, wanted: Mapping[str, Any], known: Mapping[str, Any] | None) -> None:
    """Every wanted name is stored, and every stored name is known; None knows all."""
    stored = checkpoint.leaves
    problems = []
    if missing := [name for name in wanted if name not in stored]:

        def with_nearest(name: str) -> str:
            found = nearest(name, stored)
            return shown(name) + (f" (nearest stored: {shown(found)})" if found else "")

        problems.append(f"not in the checkpoint: {some(missing, with_nearest)}")
    if known is not None and (unexpected := [name for name in stored if name not in known]):
        problems.append(
            "in the checkpoint but not in the tree (pass partial_restore=True to leave them out): "
            + some(unexpected, shown)
        )
    if problems:
        raise TensorMismatchError(f"{checkpoint.path}: " + "; ".join(problems))
