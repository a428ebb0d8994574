"""Host memory becomes `jax.Array`s here, and arrays host memory: the only place that hands a tensor's bytes to JAX.

Nothing here compiles, runs a collective or sends data between hosts; `growing`, `cooperative` and `replicas` do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format

from orbax_safetensors.devices.sharding import box_of, plain
from orbax_safetensors.geometry.box import Box


def on_host(sharding: jax.sharding.Sharding) -> bool:
    """Return whether this process's shards are in host memory, so that NumPy buffers can become shards."""
    devices: set[Any] = sharding.addressable_devices
    return all(is_cpu(device) for device in devices)


def is_cpu(device: Any) -> bool:
    """Return whether the memory of a device is the host's."""
    return bool(device.platform == "cpu")


def assemble(
    sharding: jax.sharding.Sharding | Format, shape: tuple[int, ...], dtype: np.dtype, shards: Mapping[Box, np.ndarray]
) -> jax.Array:
    """Return the global array of `shape` from the boxes that this process holds, if any.

    Devices with the same box get the same memory. CPU devices share it, so the caller must not write to it again.
    """
    if not shards:  # make_array_from_callback would still ask for the box of a replicated array
        return jax.make_array_from_single_device_arrays(shape, plain(sharding), [], dtype=dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: shards[box_of(index, shape)], dtype=dtype)


def wait(arrays: Sequence[jax.Array]) -> None:
    """Wait until devices have `arrays`, and nobody reads the host memory that they were made of."""
    jax.block_until_ready(arrays)


def are_ready(arrays: Sequence[Any]) -> bool:
    """Return whether `wait` would return at once."""
    return all(array.is_ready() for array in arrays)


def local_shards(array: jax.Array, boxes: Collection[Box]) -> dict[Box, np.ndarray]:
    """Return the elements of boxes that this process holds, row-major: a view of host memory, or else a copy."""
    shards: dict[Box, Any] = {}
    for shard in array.addressable_shards:
        box = box_of(shard.index, array.shape)
        if box in boxes and box not in shards:
            # Another array of the same buffer: JAX keeps an array's NumPy copy as long as the array lives.
            shards[box] = jax.make_array_from_single_device_arrays(shard.data.shape, shard.data.sharding, [shard.data])
    if not on_host(array.sharding):
        for data in shards.values():
            data.copy_to_host_async()
    return {box: np.ascontiguousarray(data).reshape(data.shape) for box, data in shards.items()}
