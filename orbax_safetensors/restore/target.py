"""One leaf of a restore: the caller's request and the stored tensors, made into a `Target` or refused.

A wrong request for a leaf is refused here, before memory is allocated or a tensor is read.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices.arrays import check_holdable
from orbax_safetensors.devices.bits import is_float
from orbax_safetensors.devices.sharding import local_boxes, plain
from orbax_safetensors.devices.trees import is_random
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import DType, from_numpy, nearest_dtype
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.view import View
from orbax_safetensors.restore.leaf_request import SCALARS, leaf_request
from orbax_safetensors.transfer.plan import Block


@dataclass(slots=True)  # frozen, it would take five times as long to make, and a model has 45,000
class Target:
    """One leaf to fill. Nothing changes a target.

    Attributes:
      name: the leaf's key path, joined by dots.
      view: of the stored tensors that fill it.
      shape: global shape of the leaf; if it differs from the view's, the view is cut or padded with zeros at the end
        of each dimension.
      dtype: of the leaf.
      kind: `jax.Array`, `np.ndarray`, or the scalar type of NumPy or Python that is returned.
      sharding: of a `jax.Array`; None until `match.assign_devices` if the caller gave none.
      lossless: the caller did not request this dtype, so values must survive the cast.
      broadcast: one replica of the mesh reads, the others receive from it.
      lacks_sharding: the caller described an array without a sharding, so it is a NumPy array.
    """

    name: str
    view: View
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: type
    sharding: jax.sharding.Sharding | Format | None
    lossless: bool
    broadcast: bool = False
    lacks_sharding: bool = False

    def of(self, name: str, view: View) -> Target:
        """Return the target for another leaf that is requested alike, and whose view has the same shape and dtype."""
        return Target(
            name,
            view,
            self.shape,
            self.dtype,
            self.kind,
            self.sharding,
            self.lossless,
            self.broadcast,
            self.lacks_sharding,
        )

    def cast(self, dtype: np.dtype) -> Target:
        """Return the target for the leaf in another dtype, as a caller requests it."""
        held, lossless = _held_dtype(dtype, self.kind)
        check_holdable(self.shape, held)
        return replace(self, dtype=held, lossless=lossless)

    def local_boxes(self) -> tuple[Box, ...]:
        """Return the distinct boxes that this process fills."""
        if self.sharding is None:
            return (Box.whole(self.shape),)
        try:
            return local_boxes(plain(self.sharding), self.shape)
        except TensorMismatchError as error:
            raise TensorMismatchError(f"{self.name!r}: {error}") from error

    def block(self, box: Box) -> Block:
        """Return the block for one box of the leaf."""
        clipped = box if self.shape == self.view.shape else self.view.clipped(box)
        return Block(self.view, clipped, box.shape, self.dtype, self.lossless)

    def described(self) -> Any:
        """Return a leaf of a tree that requests this one: see `abstract`."""
        if self.kind is jax.Array:
            return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)
        if self.kind is np.ndarray:
            return np.broadcast_to(np.zeros((), self.dtype), self.shape)
        return self.kind(0)

    @property
    def local_nbytes(self) -> int:
        """Return the bytes of the distinct boxes that this process fills."""
        return sum(prod(box.shape) for box in self.local_boxes()) * self.dtype.itemsize


class Targets:
    """Makes the targets of one request. Leaves that are requested alike, as most of a model are, are checked once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._packed = {
            name: tensor.stored_dtype
            for name, tensor in checkpoint.tensors.items()
            if tensor.stored_dtype.numpy is None and name not in checkpoint.quantized
        }
        self._alike: dict[Hashable, Target] = {}
        self._last_args: tuple[ocp.RestoreArgs | None, Hashable] = None, ()  # and their key

    def target(self, name: str, leaf: Any, args: ocp.RestoreArgs) -> Target:
        """Return the target for the leaf `name` of the checkpoint.

        `leaf` is an array, a description of one, a Python scalar, or None; `args` has precedence over `leaf`. Raises
        `TensorMismatchError` if the request does not fit the stored tensors.
        """
        view = self._checkpoint.leaves[name]
        packed = None
        if self._packed:
            stored = map(self._checkpoint.whole, view.tensors)
            packed = next((self._packed[tensor] for tensor in stored if tensor in self._packed), None)
        if args is not self._last_args[0]:
            # 4.0 would be equal to 4, but is not a size.
            sizes = repr(getattr(args, "global_shape", None))
            self._last_args = args, (sizes, type(args), *vars(args).values())
        key: Hashable = (view.shape, view.dtype, packed, type(leaf), leaf, self._last_args[1])
        try:
            alike = self._alike.get(key)
        except TypeError:  # an array, or a list as the shape, has no hash: no other leaf is requested alike
            key, alike = name, None
        if alike is not None:
            return alike.of(name, view)
        try:
            target = self._alike[key] = _target(name, view, packed, leaf, args)
        except TensorMismatchError as error:
            checkpoint, tensors = self._checkpoint, view.tensors
            in_one_file = len(tensors) == 1 or (tensors and checkpoint.mapped is None)
            path = checkpoint.files[checkpoint.location(tensors[0]).file].path if in_one_file else checkpoint.path
            raise type(error)(f"{path}: {name!r}: {error}") from error.__cause__
        return target


def _target(name: str, view: View, packed: DType | None, leaf: Any, args: ocp.RestoreArgs) -> Target:
    """Return the target for a leaf; `packed` is the dtype of a tensor that is held packed, if there is one."""
    kind, sharding, broadcast = leaf_request(leaf, args, len(view.shape))
    if lacks_sharding := kind is jax.Array and sharding is None and args.restore_type is None:
        kind = np.ndarray
    dtype, lossless = _dtype(packed, view.dtype, kind, leaf, args)
    shape = _shape(view, kind, leaf, args)
    for held in ((view.shape, view.dtype), (shape, dtype)):
        check_holdable(*held)
    return Target(name, view, shape, dtype, kind, sharding, lossless, broadcast, lacks_sharding)


def _shape(view: View, kind: type, leaf: Any, args: ocp.RestoreArgs) -> tuple[int, ...]:
    """Return the leaf's global shape, checked against the view's."""
    requested = getattr(args, "global_shape", None)
    if requested is None:
        requested = getattr(leaf, "shape", None)
    if kind not in (jax.Array, np.ndarray):
        requested = ()
    if requested is None:
        return view.shape
    if not isinstance(requested, tuple | list) or not all(
        isinstance(size, int | np.integer) and size >= 0 for size in requested
    ):
        raise TensorMismatchError(f"expected a shape, found {requested!r}")
    shape = tuple(int(size) for size in requested)
    if len(shape) != len(view.shape) or (shape != view.shape and getattr(args, "strict", True)):
        raise TensorMismatchError(f"expected shape {shape}, found {view.shape}")
    return shape


def _dtype(packed: DType | None, held: np.dtype, kind: type, leaf: Any, args: ocp.RestoreArgs) -> tuple[np.dtype, bool]:
    """Return the leaf's dtype, and whether values must survive the cast to it."""
    requested = args.dtype
    if kind in SCALARS:
        requested = kind
    elif requested is None and kind in (jax.Array, np.ndarray):
        requested = getattr(leaf, "dtype", None)
    dtype = held if requested is None else _checked_dtype(requested, held)
    if dtype != held and packed is not None:
        raise TensorMismatchError(
            f"{packed.name} is restored as packed bytes of {held}, which cannot be cast to {dtype}"
        )
    if dtype.kind in "iub" and args.dtype is None and kind in (jax.Array, np.ndarray) and is_float(held):
        raise TensorMismatchError(
            f"expected {dtype}, found {held}, whose values would be lost; describe the leaf as {held}, or request the "
            "cast with ocp.ArrayRestoreArgs(dtype=...)"
        )
    if held.kind == "c" and (dtype.kind != "c" or kind in (int, float, bool)):
        requested = dtype if kind in (jax.Array, np.ndarray) else kind.__name__
        raise TensorMismatchError(f"complex {held} cannot be cast to {requested}")
    try:
        if dtype != held:
            np.zeros(1, held).astype(dtype)
    except TypeError as error:
        raise TensorMismatchError(f"{held} cannot be cast to {dtype}") from error
    return _held_dtype(dtype, kind)


def _held_dtype(dtype: np.dtype, kind: type) -> tuple[np.dtype, bool]:
    """Return the dtype in which a `kind` holds `dtype`, and whether values must survive the cast to it."""
    if kind is not jax.Array:
        return dtype, False
    # Without x64, JAX holds 64-bit types in 32 bits.
    canonical = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return canonical, canonical != dtype


def _checked_dtype(requested: Any, held: np.dtype) -> np.dtype:
    """Return a requested dtype as NumPy's; raises `TensorMismatchError` if it is not `held`, nor a file can have it."""
    if is_random(requested):
        raise TensorMismatchError(
            f"{requested} is not a dtype of stored tensors; restore the key data as uint32 and pass it to "
            "jax.random.wrap_key_data"
        )
    try:
        dtype: np.dtype = np.dtype(requested).newbyteorder("=")
        if dtype not in (held, np.dtype(np.complex128)):
            from_numpy(dtype)
    except (TypeError, TensorMismatchError) as error:
        raise TensorMismatchError(
            f"expected a dtype that tensors can have, found {requested!r}{nearest_dtype(requested)}"
        ) from error
    return dtype
