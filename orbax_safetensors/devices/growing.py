"""Arrays that accelerators put together from parts of their shards, so that no host memory holds a whole shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_safetensors.devices.arrays import assemble
from orbax_safetensors.devices.bits import from_bits, to_bits
from orbax_safetensors.devices.sharding import box_of
from orbax_safetensors.geometry.box import Box

_MAX_SIZE = 2**31 - 1  # of a dimension: programs of JAX count in 32 bits


def can_grow(sharding: jax.sharding.Sharding | Format | None, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Return whether devices can put an array together: in their usual memory and layout, of whole bytes."""
    if not isinstance(sharding, jax.sharding.Sharding) or not sharding.addressable_devices:
        return False
    if max(shape, default=0) > _MAX_SIZE or dtype.kind == "c" or (dtype.kind != "b" and _bits(dtype) < 8):
        return False
    devices: set[Any] = sharding.addressable_devices
    return all(sharding.memory_kind in (None, device.default_memory().kind) for device in devices)


def _bits(dtype: np.dtype) -> int:
    return int((jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits)


class Growing:
    """An array whose shards take parts, one after the other.

    Devices hold one part, or a few on their way, on top of their shards. A program writes each part in place; it runs
    on the devices of this process alone.
    """

    def __init__(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Begin with shards of zeros."""
        self._sharding, self._shape, self._dtype = sharding, shape, dtype
        indices: Mapping[Any, Any] = sharding.addressable_devices_indices_map(shape)
        self._boxes = [box_of(index, shape) for index in indices.values()]
        self._mesh = Mesh(np.array([*indices], object), ("device",))
        # One below the other, because a program runs on one array.
        self._shards = jnp.zeros(self._stacked(self._boxes[0].shape), dtype, device=self._by_device)

    @property
    def _by_device(self) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec("device"))

    def _stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self._boxes) * shape[0], *shape[1:])

    def put(self, start: tuple[int, ...], parts: Mapping[Box, np.ndarray]) -> jax.Array:
        """Write a part of every shard, by the shard's box, from `start` on. Return what is on its way."""
        shape = next(iter(parts.values())).shape
        stacked = self._stacked(shape)
        length, *rest = shape
        rows = {
            Box([(at * length, (at + 1) * length), *((0, size) for size in rest)]): parts[box]
            for at, box in enumerate(self._boxes)
        }
        sent = assemble(self._by_device, stacked, self._dtype, rows)
        self._shards = _program(self._mesh)(self._shards, sent, np.array(start, np.int32))
        return sent

    def array(self) -> jax.Array:
        """Return the array, once the parts make up every shard."""
        shards = [shard.data for shard in self._shards.addressable_shards]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards, dtype=self._dtype)


@lru_cache
def _program(mesh: Mesh) -> Callable[[jax.Array, jax.Array, np.ndarray], jax.Array]:
    def write(shard: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
        bits = jax.lax.dynamic_update_slice(to_bits(shard), to_bits(part), [start[axis] for axis in range(part.ndim)])
        return from_bits(bits, shard.dtype)

    by_device = PartitionSpec("device")
    program: Callable[[jax.Array, jax.Array, np.ndarray], jax.Array] = jax.jit(
        jax.shard_map(
            write, mesh=mesh, in_specs=(by_device, by_device, PartitionSpec()), out_specs=by_device, check_vma=False
        ),
        donate_argnums=0,
    )
    return program
