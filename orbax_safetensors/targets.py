"""What a caller asks a restore for: trees of leaves and Orbax's restore arguments, checked against the checkpoint.

Everything that can be wrong with a request is found here, before memory is allocated or a tensor is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format

from orbax_safetensors import arrays
from orbax_safetensors.checkpoint import Checkpoint
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import DType
from orbax_safetensors.plan.view import Box, View
from orbax_safetensors.trees import flatten

# What `restore_type` may be.
_KINDS: tuple[type, ...] = (jax.Array, np.ndarray, int, float, bool)
# Names that an error lists before it says how many more there are.
_LISTED = 8


@dataclass(frozen=True)
class Target:
    """One leaf to fill.

    Attributes:
      name: the leaf's key path, joined by dots.
      view: what is stored for it.
      shape: global shape of the leaf; where it differs from the view's, the view is cut or padded with zeros at the
        end of each dimension.
      dtype: of the leaf.
      kind: `jax.Array`, `np.ndarray`, or the Python scalar type that is returned.
      sharding: of a `jax.Array`; None until `placed` where the caller gave none.
      lossless: the caller did not ask for this dtype, so values must survive the cast.
      broadcast: one replica of the mesh reads, the others receive from it.
    """

    name: str
    view: View
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: type
    sharding: jax.sharding.Sharding | Format | None
    lossless: bool
    broadcast: bool = False

    def local_boxes(self) -> tuple[Box, ...]:
        """The distinct boxes that this process fills."""
        if self.sharding is None:
            return (tuple((0, size) for size in self.shape),)
        try:
            return arrays.local_boxes(arrays.plain(self.sharding), self.shape)
        except TensorMismatchError as error:
            raise TensorMismatchError(f"{self.name!r}: {error}") from error


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
    """The request with JAX's default device for arrays that have no sharding.

    Raises `TensorMismatchError` where there are several processes, which have no device in common.
    """

    def place(target: Target) -> Target:
        if target.kind is not jax.Array or target.sharding is not None:
            return target
        if jax.process_count() > 1:
            raise TensorMismatchError(
                f"{checkpoint.path}: {target.name!r} has no sharding, and there are {jax.process_count()} processes; "
                "give it one in restore_args or in the item"
            )
        return replace(target, sharding=arrays.default_sharding())

    leaves = tuple(place(leaf) if isinstance(leaf, Target) else leaf for leaf in request.leaves)
    return replace(request, leaves=leaves)


def everything(checkpoint: Checkpoint) -> Request:
    """All tensors as a flat dict of NumPy arrays."""
    names = list(checkpoint.tensors)
    leaves = [_target(checkpoint, name, None, ocp.RestoreArgs()) for name in sorted(names)]
    return Request(tuple(leaves), jax.tree_util.tree_structure(dict.fromkeys(names, 0)))


def resolve(checkpoint: Checkpoint, item: Any, restore_args: Any, *, partial: bool) -> Request:
    """Checks a request and completes what it leaves open from the checkpoint.

    `item` is a tree of arrays, `jax.ShapeDtypeStruct`s, Orbax metadata or scalars; `restore_args` a tree of
    `ocp.RestoreArgs` of the same structure; either may be None, not both. What `restore_args` says of a leaf comes
    first. Unless `partial`, every tensor of the checkpoint must be asked for or have a placeholder.

    Raises:
      TensorMismatchError: names, shapes, dtypes or shardings do not fit the checkpoint.
    """
    structure, leaves = flatten(item if item is not None else restore_args)
    args = flatten(restore_args)[1] if restore_args is not None else {}
    if unknown := sorted(set(args) - set(leaves)):
        raise TensorMismatchError(f"restore_args has leaves that item does not have: {_some(unknown)}")
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not ocp.PLACEHOLDER}
    wanted = {name: leaf for name, leaf in wanted.items() if args.get(name) is not ocp.PLACEHOLDER}
    _check_names(checkpoint, wanted, None if partial else leaves)
    out: list[Target | Any] = []
    for name, leaf in leaves.items():
        if name not in wanted:
            out.append(ocp.PLACEHOLDER)
            continue
        args_of_leaf = args.get(name, ocp.RestoreArgs())
        if not isinstance(args_of_leaf, ocp.RestoreArgs):
            raise TensorMismatchError(f"{name!r}: expected ocp.RestoreArgs in restore_args, found {args_of_leaf!r}")
        out.append(_target(checkpoint, name, leaf if item is not None else None, args_of_leaf))
    return Request(tuple(out), structure)


def are_restore_args(tree: Any) -> bool:
    """Whether a tree is one of restore arguments rather than of arrays."""
    return any(isinstance(leaf, ocp.RestoreArgs) for leaf in jax.tree_util.tree_leaves(tree))


def _check_names(checkpoint: Checkpoint, wanted: Mapping[str, Any], known: Mapping[str, Any] | None) -> None:
    """Every wanted name is stored, and every stored name is known; None knows all."""
    stored = checkpoint.tensors
    problems = []
    if missing := [name for name in wanted if name not in stored]:
        nearest = []
        for name in missing[:_LISTED]:
            close = difflib.get_close_matches(name, stored, n=1)
            nearest.append(f"{name!r}" + (f" (nearest stored: {close[0]!r})" if close else ""))
        problems.append("not in the checkpoint: " + _some(nearest, len(missing)))
    if known is not None and (unexpected := [name for name in stored if name not in known]):
        listed = _some([repr(name) for name in unexpected[:_LISTED]], len(unexpected))
        problems.append(
            f"in the checkpoint but not in the tree (pass partial_restore=True to leave them out): {listed}"
        )
    if problems:
        raise TensorMismatchError(f"{checkpoint.path}: " + "; ".join(problems))


def _some(names: list[str], total: int | None = None) -> str:
    total = len(names) if total is None else total
    more = total - len(names[:_LISTED])
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more else "")


def _target(checkpoint: Checkpoint, name: str, leaf: Any, args: ocp.RestoreArgs) -> Target:
    view = checkpoint.view(name)
    where = f"{checkpoint.files[checkpoint[name].file].path}: {name!r}"
    kind = _kind(leaf, args, where)
    dtype, lossless = _dtype(checkpoint[name].stored_dtype, view.dtype, kind, leaf, args, where)
    shape = _shape(view, kind, leaf, args, where)
    return Target(
        name=name,
        view=view,
        shape=shape,
        dtype=dtype,
        kind=kind,
        sharding=_sharding(leaf, args, where) if kind is jax.Array else None,
        lossless=lossless,
        broadcast=isinstance(args, ocp.type_handlers.SingleReplicaArrayRestoreArgs),
    )


def _kind(leaf: Any, args: ocp.RestoreArgs, where: str) -> type:
    """What the leaf is returned as."""
    asked: Any = args.restore_type
    if asked is None:
        if isinstance(leaf, bool | int | float):
            asked = type(leaf)
        elif leaf is None or isinstance(leaf, np.ndarray | np.generic):
            asked = np.ndarray
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            asked = jax.Array
        else:
            raise TensorMismatchError(f"{where}: a leaf of type {type(leaf).__name__} cannot be restored: {leaf!r}")
    if asked in _KINDS:
        return _KINDS[_KINDS.index(asked)]
    raise TensorMismatchError(f"{where}: restore_type is {asked!r}, can be jax.Array, np.ndarray, int, float or bool")


def _shape(view: View, kind: type, leaf: Any, args: ocp.RestoreArgs, where: str) -> tuple[int, ...]:
    """The leaf's global shape, checked against what is stored."""
    asked = getattr(args, "global_shape", None)
    if asked is None:
        asked = getattr(leaf, "shape", None)
    if kind not in (jax.Array, np.ndarray):
        asked = ()
    shape = view.shape if asked is None else tuple(asked)
    if len(shape) != len(view.shape) or (shape != view.shape and getattr(args, "strict", True)):
        raise TensorMismatchError(f"{where}: expected shape {shape}, found {view.shape}")
    return shape


def _dtype(
    stored: DType, held: np.dtype, kind: type, leaf: Any, args: ocp.RestoreArgs, where: str
) -> tuple[np.dtype, bool]:
    """The leaf's dtype, and whether values have to survive the way to it."""
    asked = args.dtype
    if asked is None and kind in (jax.Array, np.ndarray):
        asked = getattr(leaf, "dtype", None)
    if asked is not None and jax.numpy.issubdtype(asked, jax.dtypes.extended):
        raise TensorMismatchError(
            f"{where}: {asked} is not a dtype of stored tensors; restore the key data as uint32 and pass it to "
            "jax.random.wrap_key_data"
        )
    dtype = held if asked is None else np.dtype(asked)
    if dtype != held and stored.numpy is None:
        raise TensorMismatchError(f"{where}: {stored.name} is held packed as {held} and cannot be cast to {dtype}")
    if held.kind == "c" and dtype.kind != "c":
        raise TensorMismatchError(f"{where}: complex {held} cannot be cast to {dtype}")
    if kind is not jax.Array:
        return dtype, False
    # Without x64, JAX holds 64-bit types in 32 bits.
    canonical = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return canonical, canonical != dtype


def _sharding(leaf: Any, args: ocp.RestoreArgs, where: str) -> jax.sharding.Sharding | Format | None:
    """The sharding that the caller gave the leaf, if any."""
    for given in (getattr(args, "sharding", None), _sharding_of_mesh(args, where), getattr(leaf, "sharding", None)):
        sharding = given.to_jax_sharding() if isinstance(given, ocp.metadata.ShardingMetadata) else given
        if isinstance(sharding, jax.sharding.Sharding | Format):
            return sharding
        if sharding is not None:
            raise TensorMismatchError(f"{where}: expected a sharding, found {sharding!r}")
    return None


def _sharding_of_mesh(args: ocp.RestoreArgs, where: str) -> jax.sharding.Sharding | None:
    mesh, axes = getattr(args, "mesh", None), getattr(args, "mesh_axes", None)
    if (mesh is None) != (axes is None):
        raise TensorMismatchError(f"{where}: mesh and mesh_axes are given together or not at all")
    return None if mesh is None or axes is None else jax.sharding.NamedSharding(mesh, axes)
