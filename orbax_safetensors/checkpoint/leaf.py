"""What a caller asks a save for: a tree of arrays and scalars, checked before any file is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.devices.casts import Casts
from orbax_safetensors.devices.trees import empty_nodes, flatten, is_random
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import from_numpy, nearest_dtype
from orbax_safetensors.geometry.view import View

# Leaves that have a dtype of their own; a scalar has that of its type, and a restore returns it as one.
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


@dataclass(frozen=True)
class Leaf:
    """One leaf to store.

    Attributes:
      name: the leaf's key path, joined by dots.
      value: a `jax.Array` with any sharding, or a NumPy array of which every process has the same. In a plan, a
        `jax.ShapeDtypeStruct` may stand for the former. In a save, it may also be a `StoredArray`.
      dtype: to store; other than the value's where a cast was asked for.
      view: the tensors that the leaf is made of: one of its own name, or those of a family.
      dtype_is_chosen: whether the caller names `dtype`.
      is_double: whether other leaves have all elements of its tensors, and a save writes those.
    """

    name: str
    value: Any
    dtype: np.dtype
    view: View
    dtype_is_chosen: bool = False
    is_double: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the leaf."""
        return tuple(self.value.shape)


def leaves_of(item: Any, save_args: Any, casts: Casts | None = None, *, abstract: bool = False) -> list[Leaf]:
    """Return the leaves of a tree in its order, without those that are `ocp.PLACEHOLDER`.

    `save_args` is None or a tree of `ocp.SaveArgs` of the same structure, of which only `dtype` counts. It may have
    entries at empty nodes. `casts` are for arrays, not for scalars, and take precedence. NumPy arrays of the other byte
    order are swapped. If `abstract`, leaves may be `jax.ShapeDtypeStruct`s in place of arrays of JAX, whose 64-bit
    dtypes count as 32 bits unless x64 is enabled.

    Raises:
      TensorMismatchError: a leaf that cannot be stored, two of one name, or an empty tree, which Orbax does not record.
    """
    leaves = flatten(item)[1]
    args = flatten(save_args)[1] if save_args is not None else {}
    if not leaves and not item:
        raise TensorMismatchError(f"the tree to save has no leaves: it is {item!r:.80}")
    unknown = args.keys() - leaves.keys()
    if unknown and (unknown := unknown - empty_nodes(item)):
        raise TensorMismatchError(f"save_args has leaves that item does not have: {', '.join(sorted(unknown)[:8])}")
    stored = {
        name: _leaf(name, leaf, args.get(name, ocp.SaveArgs()), abstract)
        for name, leaf in leaves.items()
        if leaf is not ocp.PLACEHOLDER
    }
    if casts is not None:
        arrays = {name: leaf.dtype for name, leaf in stored.items() if isinstance(leaves[name], _ARRAYS)}
        for name, dtype in casts.chosen(arrays).items():
            stored[name] = replace(stored[name], dtype=dtype, dtype_is_chosen=True)
    return list(stored.values())


def _leaf(name: str, leaf: Any, args: ocp.SaveArgs, abstract: bool) -> Leaf:
    if not isinstance(args, ocp.SaveArgs):
        raise TensorMismatchError(f"{name!r}: expected ocp.SaveArgs in save_args, found {args!r:.80}")
    if name == "__metadata__":
        raise TensorMismatchError("a tensor cannot be called '__metadata__': the format keeps that name for itself")
    described = abstract and isinstance(leaf, jax.ShapeDtypeStruct)
    if isinstance(leaf, jax.Array) or described:
        value: Any = leaf
        if is_random(leaf.dtype):
            raise TensorMismatchError(
                f"{name!r}: an array of {leaf.dtype} cannot be stored; leave it out, as nnx.state(model, (nnx.Param, "
                "nnx.BatchStat)) does, or save jax.random.key_data of it and restore it with jax.random.wrap_key_data"
            )
        if described:
            canonical = jax.dtypes.canonicalize_dtype(leaf.dtype)
            value = jax.ShapeDtypeStruct(leaf.shape, canonical, sharding=leaf.sharding)
        elif isinstance(leaf, jax.core.Tracer):
            raise TensorMismatchError(f"{name!r}: is an array that JAX traces: save outside of jax.jit")
        elif leaf.is_deleted():
            raise TensorMismatchError(f"{name!r}: the array has been deleted or donated")
    elif isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex) and not np.ma.isMaskedArray(leaf):
        array = np.asarray(leaf)
        value = array.astype(array.dtype.newbyteorder("="), copy=False)
    else:
        advice = "; leave functions out, as eqx.filter(model, eqx.is_array) does" if callable(leaf) else ""
        raise TensorMismatchError(
            f"{name!r}: a leaf of type {type(leaf).__name__} cannot be stored: {leaf!r:.80}{advice}"
        )
    try:
        dtype: np.dtype = np.dtype(value.dtype if args.dtype is None else args.dtype).newbyteorder("=")
        from_numpy(dtype)
    except (TypeError, TensorMismatchError) as error:
        raise TensorMismatchError(f"{name!r}: {error}{nearest_dtype(args.dtype)}") from error
    if value.dtype.kind in "OSUMmT" or value.dtype.names is not None:  # a cast would make numbers of what are none
        raise TensorMismatchError(f"{name!r}: {value.dtype} cannot be cast to {dtype}")
    if np.dtype(value.dtype).kind == "c" and dtype.kind != "c":
        raise TensorMismatchError(f"{name!r}: complex {value.dtype} cannot be cast to {dtype}")
    return Leaf(name, value, dtype, View.tensor(name, value.shape, value.dtype), args.dtype is not None)
