"""An accelerator for machines that have none: what leaves host memory costs what XLA's clients make it cost.

    with emulation.accelerator():
        arrays = load()  # whatever hands NumPy arrays to JAX
        jax.block_until_ready(arrays)

XLA's client of a GPU copies a NumPy buffer that is not pinned once, with one thread, into pinned memory that it uses
again and again; the card fetches it from there. The host does no more, and the card's part is not its time. So here a
transfer is one copy of the host buffer into a ring of memory that was touched before. Two threads make the copies, in
the order in which they were asked for, while the program goes on. A strided buffer is laid out densely by that copy, as
XLA does it. The buffer is referenced until its copy is made, and not longer.

Devices are those of the CPU that JAX has. Within `accelerator`, JAX's functions that take host memory return
`EmulatedArray`s to every caller, and `orbax_safetensors` takes no device for a CPU. With `digests=True`, which takes
longer, each copy is hashed as it lies in the ring: see `digest_of`.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from queue import SimpleQueue
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

THREADS = 2
# Of each thread: a larger one costs the host a write to memory, which a card that reads from the cache saves it.
RING_BYTES = 2**24
LINE_BYTES = 64
PAGE_BYTES = 4096
# Elements on a side of the tiles in which a transposed buffer is laid out.
TILE = 128


class Transfer:
    """One host buffer on its way to one device."""

    def __init__(self, source: np.ndarray) -> None:
        self.source: np.ndarray | None = source
        self.digest = b""
        self.error: Exception | None = None
        self.done = threading.Event()

    def make(self, ring: _Ring, digests: bool) -> None:
        assert self.source is not None
        try:
            self.digest = ring.take(self.source, digests)
        except Exception as error:
            self.error = error
        self.source = None  # before anybody is told, because its owner may then use the memory again
        self.done.set()


@dataclass(frozen=True)
class EmulatedShard:
    """What one device holds of an array."""

    device: Any
    index: tuple[slice, ...]
    data: EmulatedArray
    transfer: Transfer


class EmulatedArray:
    """As much of a `jax.Array` as one can have without its values."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, transfers: dict[Any, Transfer]
    ) -> None:
        self.shape, self.dtype, self.sharding = shape, dtype, sharding
        self._transfers = transfers

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def addressable_shards(self) -> list[EmulatedShard]:
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        held = self.sharding.shard_shape(self.shape)
        return [
            EmulatedShard(
                device,
                indices[device],
                EmulatedArray(held, self.dtype, SingleDeviceSharding(device), {device: transfer}),
                transfer,
            )
            for device, transfer in self._transfers.items()
        ]

    def is_ready(self) -> bool:
        return all(transfer.done.is_set() for transfer in self._transfers.values())

    def block_until_ready(self) -> EmulatedArray:
        for transfer in self._transfers.values():
            transfer.done.wait()
            if transfer.error is not None:
                raise transfer.error
        return self


@contextlib.contextmanager
def accelerator(*, digests: bool = False) -> Iterator[None]:
    """JAX's devices are accelerators to all that runs within."""
    queue: SimpleQueue[Transfer | None] = SimpleQueue()
    rings = [_Ring() for _ in range(THREADS)]
    threads = [threading.Thread(target=_make_all, args=(queue, ring, digests), daemon=True) for ring in rings]
    for thread in threads:
        thread.start()

    def send(source: np.ndarray) -> Transfer:
        transfer = Transfer(source)
        queue.put(transfer)
        return transfer

    with contextlib.ExitStack() as stack:
        for name, function in _functions(send).items():
            stack.enter_context(mock.patch.object(jax, name, function))
        stack.enter_context(mock.patch("orbax_safetensors.devices.arrays.is_cpu", return_value=False))
        try:
            yield
        finally:
            for _ in threads:
                queue.put(None)
            for thread in threads:
                thread.join()


def digest_of(values: np.ndarray) -> bytes:
    """The digest that a transfer of these values has."""
    return hashlib.blake2b(np.ascontiguousarray(values).reshape(-1).view(np.uint8), digest_size=16).digest()


def _functions(send: Callable[[np.ndarray], Transfer]) -> dict[str, Callable[..., Any]]:
    """What takes the place of JAX's functions of these names."""
    device_put, combine = jax.device_put, jax.make_array_from_single_device_arrays

    def make_array_from_callback(
        shape: Sequence[int], sharding: Any, data_callback: Callable[[Any], Any], dtype: Any = None
    ) -> EmulatedArray:
        shape, sharding = tuple(shape), getattr(sharding, "sharding", sharding)  # of a Format
        if sharding.is_fully_replicated:  # JAX asks once
            values = dict.fromkeys(sharding.addressable_devices, np.asarray(data_callback((slice(None),) * len(shape))))
        else:
            indices = sharding.addressable_devices_indices_map(shape)
            values = {device: np.asarray(data_callback(index)) for device, index in indices.items()}
        dtype = np.dtype(dtype or next(iter(values.values())).dtype)
        for value in values.values():
            if (value.shape, value.dtype) != (sharding.shard_shape(shape), dtype):
                raise ValueError(f"{value.shape} of {value.dtype} is no shard of {shape} of {dtype} by {sharding}")
        return EmulatedArray(shape, dtype, sharding, {device: send(value) for device, value in values.items()})

    def put(x: Any, device: Any = None, **kwargs: Any) -> Any:
        if isinstance(device, jax.Device):
            device = SingleDeviceSharding(device)
        if not isinstance(x, np.ndarray | jax.Array) or not isinstance(device, Sharding):
            return device_put(x, device, **kwargs)
        return make_array_from_callback(x.shape, device, np.asarray(x).__getitem__)

    def make_array_from_single_device_arrays(
        shape: Sequence[int], sharding: Any, arrays: Sequence[Any], **kwargs: Any
    ) -> Any:
        if not any(isinstance(array, EmulatedArray) for array in arrays):
            return combine(shape, sharding, arrays, **kwargs)
        transfers = {device: transfer for array in arrays for device, transfer in array._transfers.items()}
        return EmulatedArray(tuple(shape), arrays[0].dtype, sharding, transfers)

    return {
        "make_array_from_callback": make_array_from_callback,
        "device_put": put,
        "make_array_from_single_device_arrays": make_array_from_single_device_arrays,
    }


def _make_all(queue: SimpleQueue[Transfer | None], ring: _Ring, digests: bool) -> None:
    while (transfer := queue.get()) is not None:
        transfer.make(ring, digests)


class _Ring:
    """Memory that is there, and filled from its beginning again once it is full."""

    def __init__(self) -> None:
        pages = mmap.mmap(-1, RING_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = np.frombuffer(pages, np.uint8)
        self._memory[::PAGE_BYTES] = 1
        self._at = 0

    def take(self, source: np.ndarray, digests: bool) -> bytes:
        """Copies all of `source`, and returns its digest if it is wanted."""
        digest = hashlib.blake2b(digest_size=16)
        for piece in _pieces(source.reshape(-1) if source.flags.c_contiguous else source):
            if self._at + piece.nbytes > RING_BYTES:
                self._at = 0
            taken = self._memory[self._at : self._at + piece.nbytes]
            _lay_out(piece, taken)
            self._at += -(-piece.nbytes // LINE_BYTES) * LINE_BYTES
            if digests:
                digest.update(taken)
        return digest.digest()


def _pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    """`values` in pieces that fit the ring, in row-major order."""
    if values.nbytes <= RING_BYTES:
        yield values
        return
    rows = RING_BYTES * len(values) // values.nbytes
    for begin in range(0, len(values), max(rows, 1)):
        if rows:
            yield values[begin : begin + rows]
        else:
            yield from _pieces(values[begin])


def _lay_out(piece: np.ndarray, taken: np.ndarray) -> None:
    """Copies `piece` to `taken`, row-major. NumPy holds no lock meanwhile; dense rows go by memcpy."""
    itemsize = piece.dtype.itemsize
    if not piece.ndim:
        piece = piece.reshape(1)
    rows_are_dense = piece.strides[-1] == itemsize
    row = piece.shape[-1] * itemsize if rows_are_dense else itemsize
    values = piece.view(next(f"u{width}" for width in (8, 4, 2, 1) if row % width == 0))
    target = taken.view(values.dtype).reshape(values.shape)
    if rows_are_dense:
        np.copyto(target, values)
        return
    dense = int(np.argmin(np.abs(values.strides)))
    for rows in range(0, values.shape[dense], TILE):
        for columns in range(0, values.shape[-1], TILE):
            tile = [slice(None)] * values.ndim
            tile[dense], tile[-1] = slice(rows, rows + TILE), slice(columns, columns + TILE)
            np.copyto(target[tuple(tile)], values[tuple(tile)])
