"""One leaf of a restore: the caller's request and the stored tensors, made into a `Target` or refused.

A wrong request for a leaf is refused here, before memory is allocated or a tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format, Layout

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices.sharding import is_abstract, local_boxes, plain
from orbax_safetensors.devices.trees import is_random
from orbax_safetensors.errors import TargetTypeError, TensorMismatchError
from orbax_safetensors.format.dtypes import DTYPES, DType, from_numpy
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.view import View
from orbax_safetensors.storage.memory import check_holdable

# NumPy's scalar types that tensors can have; not `np.number` and the like, which do not have one dtype.
_SCALARS = frozenset(dtype.numpy.type for dtype in DTYPES.values() if dtype.numpy is not None)


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
      sharding: of a `jax.Array`; None until `request.placed` if the caller gave none.
      lossless: the caller did not request this dtype, so values must survive the cast.
      broadcast: one replica of the mesh reads, the others receive from it.
      unplaced: the caller described an array without a sharding, so it is a NumPy array.
    """

    name: str
    view: View
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: type
    sharding: jax.sharding.Sharding | Format | None
    lossless: bool
    broadcast: bool = False
    unplaced: bool = False

    def local_boxes(self) -> tuple[Box, ...]:
        """Return the distinct boxes that this process fills."""
        if self.sharding is None:
            return (Box.whole(self.shape),)
        try:
            return local_boxes(plain(self.sharding), self.shape)
        except TensorMismatchError as error:
            raise TensorMismatchError(f"{self.name!r}: {error}") from error

    @property
    def local_nbytes(self) -> int:
        """Return the bytes of the distinct boxes that this process fills."""
        return sum(prod(box.shape) for box in self.local_boxes()) * self.dtype.itemsize


def as_stored(checkpoint: Checkpoint, name: str, view: View) -> Target:
    """Return the target for a leaf of the checkpoint as a NumPy array of the stored shape and dtype.

    Raises `TensorMismatchError` if NumPy cannot hold it.
    """
    check_holdable(view.shape, view.dtype, f"{checkpoint.path}: {name!r}")
    return Target(name, view, view.shape, view.dtype, np.ndarray, None, lossless=False)


class _Form(NamedTuple):
    """What targets have in common that are requested alike; the fields are those of `Target`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    kind: type
    sharding: jax.sharding.Sharding | Format | None
    lossless: bool
    broadcast: bool
    unplaced: bool


class Resolver:
    """Makes the targets of one request. Leaves that are requested alike, as most of a model are, are checked once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._packed = {
            name: tensor.stored_dtype
            for name, tensor in checkpoint.tensors.items()
            if tensor.stored_dtype.numpy is None and name not in checkpoint.quantized
        }
        self._forms: dict[Hashable, _Form] = {}
        self._last_args: tuple[ocp.RestoreArgs | None, Hashable] = None, ()  # and their key

    def target(self, name: str, leaf: Any, args: ocp.RestoreArgs) -> Target:
        """Return the target for the leaf `name` of the checkpoint.

        `leaf` is an array, a description of one, a Python scalar, or None; `args` goes before `leaf`. Raises
        `TensorMismatchError` if the request does not fit the stored tensors.
        """
        view = self._checkpoint.leaves[name]
        packed = self._packed_in(view)
        if args is not self._last_args[0]:
            # 4.0 would be equal to 4, but is not a size.
            sizes = repr(getattr(args, "global_shape", None))
            self._last_args = args, (sizes, type(args), *vars(args).values())
        key = (view.shape, view.dtype, packed, type(leaf), leaf, self._last_args[1])
        try:
            form = self._forms.get(key)
        except TypeError:  # an array, or a list as the shape, has no hash
            return Target(name, view, *_form(view, packed, leaf, args, self._where(name, view)))
        if form is None:
            form = self._forms[key] = _form(view, packed, leaf, args, self._where(name, view))
        return Target(name, view, *form)

    def _packed_in(self, view: View) -> DType | None:
        """Return the dtype of a tensor of `view` that is held packed, if there is one."""
        if not self._packed:
            return None
        names = map(self._checkpoint.whole, view.tensors)
        return next((self._packed[name] for name in names if name in self._packed), None)

    def _where(self, name: str, view: View) -> str:
        """Return the beginning of messages about a leaf: the file of its tensor if there is one, and its name."""
        checkpoint, tensors = self._checkpoint, view.tensors
        of_one_file = len(tensors) == 1 or (tensors and checkpoint.mapped is None)
        path = checkpoint.files[checkpoint.begin(tensors[0])[0]].path if of_one_file else checkpoint.path
        return f"{path}: {name!r}"


def _form(view: View, packed: DType | None, leaf: Any, args: ocp.RestoreArgs, where: str) -> _Form:
    """Check a request for a leaf that is filled from `view`."""
    check_holdable(view.shape, view.dtype, where)
    kind = _kind(leaf, args, where)
    sharding = _sharding(len(view.shape), leaf, args, where) if kind is jax.Array else None
    if unplaced := kind is jax.Array and sharding is None and args.restore_type is None:
        kind = np.ndarray
    dtype, lossless = _dtype(packed, view.dtype, kind, leaf, args, where)
    shape = _shape(view, kind, leaf, args, where)
    check_holdable(shape, dtype, where)
    return _Form(
        shape=shape,
        dtype=dtype,
        kind=kind,
        sharding=sharding,
        lossless=lossless,
        broadcast=_is_broadcast(args),
        unplaced=unplaced,
    )


class LeafRequest(NamedTuple):
    """What a caller requests of a leaf, regardless of the checkpoint; the fields are those of `Target`."""

    kind: type
    sharding: jax.sharding.Sharding | Format | None
    broadcast: bool

    @property
    def processes(self) -> frozenset[int]:
        """Return the processes of the array's devices; empty if there is no array or the devices are not known."""
        if self.sharding is None:
            return frozenset()
        sharding = plain(self.sharding)
        devices: Iterable[Any] = ()
        if not is_abstract(sharding):
            devices = sharding.device_set
        elif not (mesh := jax.sharding.get_mesh()).empty:
            devices = mesh.devices.flat
        return frozenset(device.process_index for device in devices)


def leaf_request(leaf: Any, args: Any) -> LeafRequest | None:
    """Return the part of a `target` that does not depend on the checkpoint; None if the request is wrong."""
    args = args if isinstance(args, ocp.RestoreArgs) else ocp.RestoreArgs()
    try:
        kind = _kind(leaf, args, "")
        return LeafRequest(kind, _sharding(None, leaf, args, "") if kind is jax.Array else None, _is_broadcast(args))
    except TensorMismatchError:
        return None


def _is_broadcast(args: ocp.RestoreArgs) -> bool:
    return isinstance(args, ocp.type_handlers.SingleReplicaArrayRestoreArgs)


def _kind(leaf: Any, args: ocp.RestoreArgs, where: str) -> type:
    """Return the type that the leaf is restored as."""
    requested: Any = args.restore_type
    if requested is not None:
        if isinstance(requested, type):
            if requested in _SCALARS:
                return requested
            for kind in (jax.Array, np.ndarray, bool, int, float):
                if issubclass(requested, kind):
                    return kind
        raise TargetTypeError(
            f"{where}: restore_type is {requested!r}, can be jax.Array, np.ndarray, a scalar type of NumPy, int, float "
            "or bool"
        )
    # NumPy's float64 is a float, and a bool is an int.
    if leaf is None or isinstance(leaf, np.ndarray | np.generic):
        return np.ndarray
    if isinstance(leaf, jax.sharding.Sharding | Format):
        return jax.Array
    for kind in (bool, int, float):
        if isinstance(leaf, kind):
            return kind
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.Array
    raise TargetTypeError(f"{where}: a leaf of type {type(leaf).__name__} cannot be restored: {leaf!r:.80}")


def _shape(view: View, kind: type, leaf: Any, args: ocp.RestoreArgs, where: str) -> tuple[int, ...]:
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
        raise TensorMismatchError(f"{where}: expected a shape, found {requested!r}")
    shape = tuple(int(size) for size in requested)
    if len(shape) != len(view.shape) or (shape != view.shape and getattr(args, "strict", True)):
        raise TensorMismatchError(f"{where}: expected shape {shape}, found {view.shape}")
    return shape


def _dtype(
    packed: DType | None, held: np.dtype, kind: type, leaf: Any, args: ocp.RestoreArgs, where: str
) -> tuple[np.dtype, bool]:
    """Return the leaf's dtype, and whether values must survive the cast to it."""
    requested = args.dtype
    if kind in _SCALARS:
        requested = kind
    elif requested is None and kind in (jax.Array, np.ndarray):
        requested = getattr(leaf, "dtype", None)
    dtype = held if requested is None else _checked_dtype(requested, where)
    if dtype != held and packed is not None:
        raise TensorMismatchError(
            f"{where}: {packed.name} is restored as packed bytes of {held}, which cannot be cast to {dtype}"
        )
    if held.kind == "c" and (dtype.kind != "c" or kind in (int, float, bool)):
        requested = dtype if kind in (jax.Array, np.ndarray) else kind.__name__
        raise TensorMismatchError(f"{where}: complex {held} cannot be cast to {requested}")
    try:
        if dtype != held:
            np.zeros(1, held).astype(dtype)
    except TypeError as error:
        raise TensorMismatchError(f"{where}: {held} cannot be cast to {dtype}") from error
    if kind is not jax.Array:
        return dtype, False
    # Without x64, JAX holds 64-bit types in 32 bits.
    canonical = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return canonical, canonical != dtype


def _checked_dtype(requested: Any, where: str) -> np.dtype:
    """Return a requested dtype as NumPy's; raises `TensorMismatchError` if a file cannot have it."""
    if is_random(requested):
        raise TensorMismatchError(
            f"{where}: {requested} is not a dtype of stored tensors; restore the key data as uint32 and pass it to "
            "jax.random.wrap_key_data"
        )
    try:
        dtype: np.dtype = np.dtype(requested).newbyteorder("=")
        if dtype != np.dtype(np.complex128):
            from_numpy(dtype)
    except (TypeError, TensorMismatchError) as error:
        raise TensorMismatchError(f"{where}: expected a dtype that tensors can have, found {requested!r}") from error
    return dtype


def _sharding(rank: int | None, leaf: Any, args: ocp.RestoreArgs, where: str) -> jax.sharding.Sharding | Format | None:
    """Return the sharding that the caller gave the leaf, if any, with its layout, if it has one.

    The layout must be of `rank` dimensions, unless `rank` is None.
    """
    for make in (
        lambda: getattr(args, "sharding", None),
        lambda: _sharding_of_mesh(args, where),
        lambda: _sharding_of_leaf(leaf),
    ):
        sharding = _made(make, where)
        if isinstance(sharding, ocp.metadata.ShardingMetadata):
            sharding = _made(sharding.to_jax_sharding, where)
        if isinstance(sharding, Format):
            layout = sharding.layout
            order = layout.major_to_minor if isinstance(layout, Layout) else None
            if sharding.sharding is None or (layout is not None and (order is None or rank not in (None, len(order)))):
                raise TensorMismatchError(
                    f"{where}: expected a sharding and a layout of {rank} dimensions, found {sharding}"
                )
            return sharding
        if isinstance(sharding, jax.sharding.Sharding):
            return sharding
        if sharding is not None:
            raise TargetTypeError(f"{where}: expected a sharding, found {sharding!r}")
    return None


def _sharding_of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, jax.sharding.Sharding | Format):
        return leaf
    # A description with a layout requests this layout; an array merely has one.
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None and leaf.format.layout is not None:
        return leaf.format
    return getattr(leaf, "sharding", None)


def _sharding_of_mesh(args: ocp.RestoreArgs, where: str) -> jax.sharding.Sharding | None:
    mesh, axes = getattr(args, "mesh", None), getattr(args, "mesh_axes", None)
    if (mesh is None) != (axes is None):
        raise TensorMismatchError(f"{where}: expected both mesh and mesh_axes, found one of them")
    return None if mesh is None or axes is None else jax.sharding.NamedSharding(mesh, axes)


def _made(make: Callable[[], Any], where: str) -> Any:
    """Return what `make` returns; errors of JAX and Orbax become a `TensorMismatchError` about the sharding."""
    try:
        return make()
    except TensorMismatchError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise TensorMismatchError(f"{where}: the sharding cannot be made: {error}") from error
