"""What a caller requests of a leaf, regardless of the checkpoint: as what it is restored, and where."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, PartitionSpec

from orbax_safetensors.devices.sharding import is_abstract, plain
from orbax_safetensors.errors import TargetTypeError, TensorMismatchError, reason
from orbax_safetensors.format.dtypes import DTYPES, from_numpy

# NumPy's scalar types that tensors can have; not `np.number` and the like, which do not have one dtype.
SCALARS = frozenset(dtype.numpy.type for dtype in DTYPES.values() if dtype.numpy is not None)

# How a message shows what is a mesh.
MESH = "jax.sharding.Mesh(jax.devices(), ('model',))"


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


def leaf_request(leaf: Any, args: ocp.RestoreArgs, rank: int | None = None) -> LeafRequest:
    """Return what `args`, which have precedence, and `leaf` request: an array, a description, a scalar, or None.

    Raises `TensorMismatchError` if the request is wrong: also for an array of `rank` dimensions, unless that is None.
    """
    kind = _kind(leaf, args)
    sharding = _sharding(rank, leaf, args) if kind is jax.Array else None
    return LeafRequest(kind, sharding, isinstance(args, ocp.type_handlers.SingleReplicaArrayRestoreArgs))


def _kind(leaf: Any, args: ocp.RestoreArgs) -> type:
    """Return the type that the leaf is restored as."""
    requested: Any = args.restore_type
    if requested is not None:
        if isinstance(requested, type):
            if requested in SCALARS:
                return requested
            for kind in (jax.Array, np.ndarray, bool, int, float):
                if issubclass(requested, kind):
                    return kind
        raise TargetTypeError(
            f"restore_type is {requested!r}, can be jax.Array, np.ndarray, a scalar type of NumPy, int, float or bool"
        )
    # NumPy's float64 is a float, and a bool is an int.
    if leaf is None or isinstance(leaf, np.ndarray | np.generic):
        return np.ndarray
    if isinstance(leaf, jax.sharding.Sharding | Format):
        return jax.Array
    if isinstance(leaf, ocp.metadata.ScalarMetadata):
        leaf = np.dtype(leaf.dtype).type(0).item()
    for kind in (bool, int, float):
        if isinstance(leaf, kind) or leaf is kind:
            return kind
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.Array
    raise TargetTypeError(f"a leaf of type {type(leaf).__name__} cannot be restored: {leaf!r:.80}{meant(leaf)}")


def _sharding(rank: int | None, leaf: Any, args: ocp.RestoreArgs) -> jax.sharding.Sharding | Format | None:
    """Return the sharding that the caller gave the leaf, if any, with its layout, if it has one.

    The layout must be of `rank` dimensions, unless `rank` is None.
    """
    try:
        sharding = getattr(args, "sharding", None)
        if sharding is None:
            sharding = _sharding_of_mesh(args)
        if sharding is None:
            sharding = _sharding_of_leaf(leaf)
        if isinstance(sharding, ocp.metadata.ShardingMetadata):
            sharding = sharding.to_jax_sharding()
    except TensorMismatchError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise TensorMismatchError(f"the sharding cannot be made: {reason(error)}") from error
    if isinstance(sharding, Format):
        layout = sharding.layout
        order = layout.major_to_minor if isinstance(layout, Layout) else None
        if sharding.sharding is None or (layout is not None and (order is None or rank not in (None, len(order)))):
            raise TensorMismatchError(f"expected a sharding and a layout of {rank} dimensions, found {sharding}")
    elif sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        raise TargetTypeError(f"expected a sharding, found {sharding!r}{meant(sharding)}")
    return sharding


def _sharding_of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, jax.sharding.Sharding | Format):
        return leaf
    # A description with a layout requests this layout; an array merely has one.
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None and leaf.format.layout is not None:
        return leaf.format
    return getattr(leaf, "sharding", None)


def _sharding_of_mesh(args: ocp.RestoreArgs) -> jax.sharding.Sharding | None:
    mesh, axes = getattr(args, "mesh", None), getattr(args, "mesh_axes", None)
    if (mesh is None) != (axes is None):
        raise TensorMismatchError("expected both mesh and mesh_axes, found one of them")
    return None if mesh is None or axes is None else jax.sharding.NamedSharding(mesh, axes)


def meant(target: Any) -> str:
    """Return what a message adds to a target, or a leaf of one, that is something else."""
    if isinstance(target, PartitionSpec | Mesh):
        return "; mesh and spec make a sharding: jax.sharding.NamedSharding(mesh, spec)"
    if isinstance(target, jax.Device):
        return f"; for a device pass jax.sharding.SingleDeviceSharding(device), for several {MESH}"
    if isinstance(target, str | int):
        return f"; a mesh is {MESH}, and names of leaves are for partial="
    with suppress(TypeError, TensorMismatchError):
        from_numpy(np.dtype(target))
        return "; pass dtype= to cast"
    return ""
