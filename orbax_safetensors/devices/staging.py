"""Host memory that a restore reads bytes into, and that devices fetch them from.

A GPU fetches by itself only from memory that is pinned: from ours, once its client has registered it, or from XLA's.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
from collections.abc import Collection, Iterator
from typing import Any

import jax
import numpy as np

from orbax_safetensors.devices.arrays import PINNED, has_pinned_memory
from orbax_safetensors.storage.interrupts import plain_interrupts
from orbax_safetensors.storage.memory import PAGE_BYTES, arena_of, memory_at
from orbax_safetensors.storage.threads import Threads

logger = logging.getLogger(__name__)

# A thread touches so much at once: some huge pages, few enough that all threads end together.
_TOUCHED_BYTES = 16 * 2**20


class Kind(enum.Enum):
    """What memory devices fetch from, which decides how much of it a restore may take.

    `REGISTERED` is ours: 1 GiB takes some hundredths of a second. `PINNED` is XLA's, which takes powers of two, and a
    third of a second for 512 MiB. The runtime copies `ORDINARY` memory before a device fetches it.
    """

    REGISTERED = enum.auto()
    PINNED = enum.auto()
    ORDINARY = enum.auto()

    @property
    def most_bytes(self) -> float:
        """The most bytes that a restore should have of it, and send at once."""
        return _MOST_BYTES[self]


# XLA gets its pinned memory in powers of two, with a few pages around it. From 1 GiB on, it does not copy ordinary
# memory in turns, but leaves it to the driver, which is slow.
_MOST_BYTES = {Kind.REGISTERED: math.inf, Kind.PINNED: 512 * 2**20 - 32 * PAGE_BYTES, Kind.ORDINARY: 2**30 - 1}


def kind_for(devices: Collection[Any]) -> Kind:
    """Return what memory all of `devices` fetch from without another copy on the host, or else `ORDINARY`."""
    clients = {id(device.client): device.client for device in devices}
    are_gpus = all(device.platform == "gpu" for device in devices)
    if are_gpus and len(clients) == 1 and all(hasattr(client, "dma_map") for client in clients.values()):
        return Kind.REGISTERED  # with jaxlib 0.10.2 and later
    return Kind.PINNED if devices and all(map(fetches_pinned, devices)) else Kind.ORDINARY


@contextlib.contextmanager
def staging_memory(kind: Kind, devices: Collection[Any], nbytes: int, threads: int) -> Iterator[np.ndarray]:
    """Yield memory of a kind that `kind_for` returned for `devices`, as uint8 from a page on, which holds anything.

    Has at least `nbytes`. If there is no memory of this kind, it is ordinary. Nobody may read or write it after the
    block; if the block ends well, no transfer from it may be under way. `threads` threads touch its pages.

    Raises `StorageError` if the system has no such memory or starts no thread.
    """
    if kind is Kind.PINNED:
        yield pinned_arena(min(devices, key=lambda device: device.id), nbytes)
        return
    memory = arena_of(nbytes)
    if kind is Kind.ORDINARY:
        yield memory
        return
    _touch(memory, threads)
    with _registered(memory, devices):
        yield memory


def _touch(memory: np.ndarray, threads: int) -> None:
    """Make the pages of memory exist: one thread does it when memory is registered, several are faster."""

    def touch(begin: int) -> None:
        memory[begin : begin + _TOUCHED_BYTES : PAGE_BYTES] = 0  # NumPy lets other threads run

    with plain_interrupts(), Threads(threads, "touch") as pool:
        list(pool.map(touch, range(0, memory.nbytes, _TOUCHED_BYTES)))


@contextlib.contextmanager
def _registered(memory: np.ndarray, devices: Collection[Any]) -> Iterator[None]:
    """Let devices of one client fetch from memory in a block, or log why they cannot."""
    client, address = next(iter(devices)).client, memory.ctypes.data
    is_registered = True  # before it is: an interrupt can come between the call and its return
    has_failed = True

    def unregister() -> None:
        nonlocal is_registered
        if not is_registered:
            return
        if has_failed:  # the caller may have no array of a transfer, if an interrupt came before it had one
            _wait_for_transfers(devices)
        try:
            client.dma_unmap(address)
        except jax.errors.JaxRuntimeError as error:
            logger.warning("%d bytes of host memory cannot be unregistered: %s", memory.nbytes, str(error))
        is_registered = False

    try:
        try:
            client.dma_map(address, memory.nbytes)
        except jax.errors.JaxRuntimeError as error:
            is_registered = False
            reason = str(error)  # a handler that keeps the error would keep the memory
            logger.warning("%d bytes of host memory cannot be registered, loads take longer: %s", memory.nbytes, reason)
        yield
        has_failed = False
    finally:
        try:
            unregister()
        finally:  # an interrupt can end the first call, even before it begins
            unregister()


def _wait_for_transfers(devices: Collection[Any]) -> None:
    """Wait until devices have fetched what they are to fetch.

    JAX cannot be asked for that. It holds host memory until its transfer has ended, but does not say so. Transfers to a
    device run in turn: one that begins now ends after the others.
    """
    for device in devices:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.device_put(np.zeros(1, np.uint8), device).block_until_ready()


def fetches_pinned(device: Any) -> bool:
    """Return whether a device fetches bytes from pinned memory of the host itself, without another copy on the host."""
    return bool(device.platform == "gpu") and has_pinned_memory(device)


def pinned_arena(device: Any, nbytes: int) -> np.ndarray:
    """Return XLA's pinned memory for a device, as uint8 from a page on, which holds anything; if none is left, usual.

    The system took 0.4 s to pin 1 GiB. JAX keeps memory that is freed, and gives it out again. If there is none left,
    XLA waits ten seconds for some.
    """
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
    try:
        array = jax.device_put(np.empty(nbytes + PAGE_BYTES, np.uint8), sharding).block_until_ready()
    except (jax.errors.JaxRuntimeError, MemoryError):
        return arena_of(nbytes)
    address = array.unsafe_buffer_pointer()
    return memory_at(address + -address % PAGE_BYTES, nbytes, array)
