"""Host memory becomes `jax.Array`s here, and arrays host memory: the only place that hands a tensor's bytes to JAX.

Nothing here compiles, runs a collective or sends data between hosts; `assembly` and `replicas` do.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format

from orbax_safetensors.devices.sharding import box_of, plain
from orbax_safetensors.errors import SafetensorsError, TensorMismatchError
from orbax_safetensors.geometry.box import Box

# The kind of an accelerator's memory that is the host's, and that the device reads and writes by itself.
PINNED = "pinned_host"
# The most dimensions of a NumPy array, and its most bytes.
_MAX_RANK = 64
_MAX_BYTES = 2**63 - 1


@contextlib.contextmanager
def explicit_transfers() -> Iterator[None]:
    """Let JAX count transfers between host and devices as explicit: a caller asks for them by a restore or a save.

    JAX counts arrays that are made by callbacks, and what programs take from NumPy, as implicit, which its transfer
    guard "disallow" refuses. Raises `SafetensorsError` if the guard also refuses explicit transfers.
    """
    guards = {
        "host_to_device": jax.transfer_guard_host_to_device,
        "device_to_device": jax.transfer_guard_device_to_device,
        "device_to_host": jax.transfer_guard_device_to_host,
    }
    with contextlib.ExitStack() as stack:
        for direction, guard in guards.items():
            if getattr(jax.config, f"jax_transfer_guard_{direction}") in ("log", "disallow"):
                stack.enter_context(guard("allow"))
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "Disallowed" not in str(error):
                raise
            raise SafetensorsError(f"jax_transfer_guard forbids explicit transfers as well: {error}") from error


def check_holdable(shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise `TensorMismatchError` if NumPy cannot have such an array."""
    # NumPy counts the bytes of an empty array as if its dimensions of size 0 were not there.
    if len(shape) > _MAX_RANK or prod(size for size in shape if size) * dtype.itemsize > _MAX_BYTES:
        raise TensorMismatchError(f"NumPy cannot have an array of shape {shape}")


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


def side_by_side(sharding: jax.sharding.Sharding, parts: Sequence[np.ndarray]) -> jax.Array:
    """Return an array of one part for each device of a sharding of its first dimension, which has size 1 in each part.

    Parts are in the order of the devices, and all on this process's. CPU devices share their memory.
    """
    shape = (len(parts), *parts[0].shape[1:])

    def part_of(index: Any) -> np.ndarray:
        return parts[index[0].start or 0]

    return jax.make_array_from_callback(shape, sharding, part_of, dtype=parts[0].dtype)


def wait(arrays: Sequence[jax.Array]) -> None:
    """Wait until devices have `arrays`, and nobody reads the host memory that they were made of."""
    jax.block_until_ready(arrays)


def are_ready(arrays: Sequence[Any]) -> bool:
    """Return whether `wait` would return at once."""
    return all(array.is_ready() for array in arrays)


def on_accelerator(array: jax.Array) -> bool:
    """Return whether this process's shards are in an accelerator's own memory, so that only copies reach the host."""
    if on_host(array.sharding):
        return False
    device: Any = next(iter(array.sharding.addressable_devices))
    return array.sharding.memory_kind in (None, device.default_memory().kind)


def local_shards(array: jax.Array, boxes: Collection[Box]) -> dict[Box, jax.Array]:
    """Return the shards of boxes that this process holds, as arrays of one device each."""
    # Another array of the same buffers: JAX keeps an array's NumPy copy as long as the array lives.
    held = [shard.data for shard in array.addressable_shards]
    again = jax.make_array_from_single_device_arrays(array.shape, array.sharding, held, dtype=array.dtype)
    shards: dict[Box, jax.Array] = {}
    for shard in again.addressable_shards:
        box = box_of(shard.index, array.shape)
        if box in boxes and box not in shards:
            shards[box] = shard.data
    return shards


def to_host(shards: Sequence[Any]) -> Iterator[np.ndarray]:
    """Begin to copy arrays of one device each to the host, and return an iterator that waits for them one by one.

    It yields them row-major: views of memory that is the host's, such as that of NumPy arrays, and otherwise copies.
    """
    # To ordinary memory, the GPU runtime copies in turns, first into a pinned buffer and then out of it.
    moving: deque[tuple[Any, Any]] = deque()
    is_pinnable = True
    for shard in shards:
        copy = shard
        if isinstance(shard, jax.Array) and on_accelerator(shard):
            if is_pinnable and has_pinned_memory(shard.device):
                try:
                    copy = jax.device_put(shard, jax.sharding.SingleDeviceSharding(shard.device, memory_kind=PINNED))
                except jax.errors.JaxRuntimeError:  # no such memory is left, and XLA waits ten seconds for some
                    is_pinnable = False
            if copy is shard:
                shard.copy_to_host_async()
        moving.append((shard, copy))
    return (_as_numpy(*moving.popleft()) for _ in range(len(moving)))


def has_pinned_memory(device: Any) -> bool:
    """Return whether a device reads and writes memory of the host by itself that NumPy sees as it is."""
    # TPUs lay arrays out in their own way there, so that NumPy needs another copy.
    return device.platform != "tpu" and any(memory.kind == PINNED for memory in device.addressable_memories())


def _as_numpy(shard: Any, copy: Any) -> np.ndarray:
    try:
        memory = np.asarray(copy)
    except jax.errors.JaxRuntimeError:  # perhaps only the copy has failed
        memory = np.asarray(shard)
    return np.ascontiguousarray(memory).reshape(memory.shape)
