"""An emulated accelerator: its devices are no CPUs to the package, and bytes arrive after a transfer was handed over.

With it, `jax.device_put` and `jax.make_array_from_callback` give the package an array full of garbage at once. The
bytes follow as late as possible, when somebody waits for the array, or at a random moment before. Until then, the
source must keep its bytes, as a GPU's runtime may read it at any time.

JAX lets programs, and whatever else reads an array, wait for its transfer. Here, those in a restore wait when they take
an array apart or put it together in another module than `devices.arrays`, and so do the programs of `devices.assembly`;
another program would read garbage.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np
import pytest

from orbax_safetensors.devices import assembly, staging
from orbax_safetensors.restore import pipeline, ways
from orbax_safetensors.storage.memory import Pool, Taken, memory_at
from orbax_safetensors.transfer.reader import Reader

# From 1 GiB on, the GPU's runtime does not stage a transfer, which makes it slow.
MAX_TRANSFER_BYTES = 2**30
_GARBAGE = 0xA5
_POISON = 0xDB
_Make = Callable[[Callable[[Callable[[], np.ndarray]], np.ndarray]], Any]
_SEAM = "orbax_safetensors.devices.arrays"
_DELAYS = (0.0, 0.0, 0.001, 0.003)  # seconds

_Array = type(jax.numpy.zeros(()))
_block_until_ready, _is_ready, _as_numpy = _Array.block_until_ready, _Array.is_ready, _Array.__array__


class _Transfer:
    """Sources on their way into arrays. `make(buffer_of)` makes arrays of `buffer_of(get)` for each `get()`."""

    def __init__(self, make: _Make) -> None:
        self.sources: list[np.ndarray] = []
        self.arrived = self.polled = False
        self._make = make
        self._lock = threading.Lock()
        self.arrays = make(self._take)
        self._sums = list(map(_checksum, self.sources))

    def _take(self, get: Callable[[], np.ndarray]) -> np.ndarray:
        source = get()
        self.sources.append(source)
        return np.full(source.nbytes, _GARBAGE, np.uint8).view(source.dtype).reshape(source.shape)

    def arrive(self) -> list[str]:
        """Copy the sources into the arrays, if nobody has; return what is wrong with them."""
        with self._lock:
            if self.arrived:
                return []
            problems = [
                f"memory of {source.dtype}{source.shape} changed before its transfer was complete"
                for source, expected in zip(self.sources, self._sums, strict=True)
                if _checksum(source) != expected
            ]
            left = iter(self.sources)
            made = self._make(lambda get: next(left))
            for array, staged in zip(jax.tree.leaves(self.arrays), jax.tree.leaves(made), strict=True):
                if not array.is_deleted():
                    _copy(_block_until_ready(staged), _block_until_ready(array))
            self.arrived = True
            return problems


class Accelerator:
    """What the devices are doing: `problems` says what the package did wrong. It is its own client and its only device.

    `num_transfers` counts sources, `num_regions` memory that was registered and let go, `regions` is what is registered
    now, `num_runs` counts runs of programs, and `most_bytes` is the most that was under way at once.
    """

    def __init__(self, arrival: Literal["late", "random"], seed: int, max_bytes: int) -> None:
        self.num_transfers = self.most_bytes = self.num_regions = self.num_runs = 0
        self.problems: list[str] = []
        self._max_bytes = max_bytes
        self._pending: dict[int, _Transfer] = {}  # by the address of each shard
        self._lock = threading.RLock()
        self._restores = 0
        self._checked_early = False
        self._delays = random.Random(seed)
        self._threads = ThreadPoolExecutor(2, "device") if arrival == "random" else None
        self.regions: dict[int, int] = {}  # sizes by address

    def hand_over(self, make: _Make) -> Any:
        transfer = _Transfer(make)
        self.num_transfers += len(transfer.sources)
        for source in transfer.sources:
            if source.nbytes >= self._max_bytes:
                self.problems.append(f"one transfer of {source.nbytes} bytes, must be less than {self._max_bytes}")
        with self._lock:
            if transfer.sources:
                self._pending.update((address, transfer) for address in _addresses(transfer.arrays))
                under_way = sum(source.nbytes for each in self.under_way() for source in each.sources)
                self.most_bytes = max(self.most_bytes, under_way)
            if self._threads is not None:
                self._threads.submit(self._arrive_later, transfer, self._delays.choice(_DELAYS))
        return transfer.arrays

    def wait(self, tree: Any) -> None:
        """Let the transfers of all arrays in `tree` arrive."""
        for transfer in self._transfers(tree):
            self._arrive(transfer)

    def is_ready(self, array: jax.Array) -> bool:
        """Return whether an array has arrived. Who asks a second time has waited long enough."""
        transfers = self._transfers(array)
        for transfer in transfers:
            if transfer.polled:
                self._arrive(transfer)
            transfer.polled = True
        return all(transfer.arrived for transfer in transfers)

    def poison(self, buffers: Iterable[np.ndarray]) -> None:
        """Spoil memory that may be used again, which no transfer may read any more."""
        read = [source for transfer in self.under_way() for source in transfer.sources]
        for buffer in buffers:
            if any(np.may_share_memory(buffer, source) for source in read):
                self.problems.append(
                    f"{buffer.nbytes} bytes of memory were given back before their transfer was complete"
                )
            buffer[...] = _POISON

    @property
    def client(self) -> Accelerator:
        return self

    def dma_map(self, address: int, nbytes: int) -> None:
        """Let devices fetch from memory by themselves, until nothing reads it any more."""
        self.regions[address] = nbytes

    def dma_unmap(self, address: int) -> None:
        if address not in self.regions:
            raise jax.errors.JaxRuntimeError("INTERNAL: Failed to unregister host memory")
        self.num_regions += 1
        memory = memory_at(address, self.regions.pop(address))
        read = [source for transfer in self.under_way() for source in transfer.sources]
        if any(np.may_share_memory(memory, source) for source in read):
            self.problems.append("memory was let go while a device fetched from it")

    def block_until_ready(self) -> None:
        """Let everything arrive, as a transfer does that begins after all others."""
        for transfer in self.under_way():
            self._arrive(transfer)

    def begin_restore(self) -> None:
        with self._lock:
            self._restores += 1

    def check_files(self) -> None:
        self._checked_early = bool(self.under_way())

    def end_restore(self) -> None:
        """Let everything arrive. If no restore of another thread is under way, all of it should have arrived before.

        A restore that fails may have no array of a transfer: it cannot wait for that one, but its memory may not go.
        """
        with self._lock:
            self._restores -= 1
            alone = not self._restores
        if sys.exception() is not None:
            return
        self._expect_nothing_pending("the files were closed", alone)
        if alone and self._checked_early:
            self.problems.append("files were checked for changes before all transfers were complete")
        self._checked_early = False

    def close(self) -> None:
        self._expect_nothing_pending("the test ended", judge=True)
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _expect_nothing_pending(self, when: str, judge: bool) -> None:
        pending = self.under_way()
        if pending and judge:
            self.problems.append(f"{len(pending)} transfers were not complete when {when}")
        for transfer in pending:
            self._arrive(transfer)

    def under_way(self) -> set[_Transfer]:
        """Return the transfers whose bytes have not arrived."""
        with self._lock:
            return {transfer for transfer in self._pending.values() if not transfer.arrived}

    def _transfers(self, tree: Any) -> Sequence[_Transfer]:
        """Return the transfers that arrays wait for."""
        with self._lock:
            if not self._pending:
                return []
            found = map(self._pending.get, _addresses(tree))
            return list({id(transfer): transfer for transfer in found if transfer is not None}.values())

    def _arrive(self, transfer: _Transfer) -> None:
        self.problems += transfer.arrive()
        with self._lock:
            self._pending = {address: other for address, other in self._pending.items() if other is not transfer}

    def _arrive_later(self, transfer: _Transfer, seconds: float) -> None:
        time.sleep(seconds)
        self._arrive(transfer)


@contextlib.contextmanager
def accelerator(
    arrival: Literal["late", "random"] = "late",
    *,
    seed: int = 0,
    max_bytes: int = MAX_TRANSFER_BYTES,
    pinned: bool = False,
    programs: bool = True,
) -> Iterator[Accelerator]:
    """Make all devices accelerators, and fail if the package lets go of memory before they are done with it.

    It has to wait for all transfers before it checks files for changes and closes them. With `pinned`, they are GPUs,
    which fetch from memory that is registered. With `programs`, they make all leaves that they can make; without, none.
    """
    device = Accelerator(arrival, seed, max_bytes)
    device_put, from_callback, of_shards, wait = (
        jax.device_put,
        jax.make_array_from_callback,
        jax.make_array_from_single_device_arrays,
        jax.block_until_ready,
    )

    def put(tree: Any, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is device:
            return device
        in_memory = all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree))
        is_arena = any(getattr(arg, "memory_kind", None) == "pinned_host" for arg in args)
        if not in_memory or is_arena or not _hands_over(sys._getframe(1).f_globals):
            return device_put(tree, *args, **kwargs)
        return device.hand_over(
            lambda buffer_of: device_put(jax.tree.map(lambda leaf: buffer_of(lambda: leaf), tree), *args, **kwargs)
        )

    def callback(shape: Any, sharding: Any, data: Callable[[Any], Any], dtype: Any = None) -> jax.Array:
        if not _hands_over(sys._getframe(1).f_globals):
            return from_callback(shape, sharding, data, dtype)
        return device.hand_over(
            lambda buffer_of: from_callback(shape, sharding, lambda index: buffer_of(lambda: data(index)), dtype)
        )

    def put_together(shape: Any, sharding: Any, arrays: Any, **kwargs: Any) -> jax.Array:
        if _reads(sys._getframe(1).f_globals):
            device.wait(arrays)
        return of_shards(shape, sharding, arrays, **kwargs)

    def data(shard: jax.Shard) -> Any:
        array = shard_data(shard)
        if _reads(sys._getframe(1).f_globals):
            device.wait(array)
        return array

    def waiting(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(tree: Any, *args: Any, **kwargs: Any) -> Any:
            device.wait(tree)
            return function(tree, *args, **kwargs)

        return run

    def compiled(*key: Any) -> Callable[..., jax.Array]:
        program = compile_(*key)

        def run(*arrays: jax.Array) -> jax.Array:
            device.num_runs += 1
            device.wait(arrays)
            return program(*arrays)

        return run

    def given_back(pool: Pool, taken: Taken) -> None:
        device.poison(taken.buffers)
        give_back(pool, taken)

    def kind_for(devices: Any) -> staging.Kind:
        kind = staging.kind_for(devices)
        return staging.Kind.REGISTERED if kind is staging.Kind.PINNED else kind  # clients of CPUs register nothing

    compile_, give_back, shard_data = assembly._compiled, Pool.give_back, jax.Shard.data.fget
    register = staging._registered
    make, close, check = Reader.__init__, Reader.close, Reader.check

    def made(reader: Reader, *args: Any) -> None:
        device.begin_restore()
        make(reader, *args)

    def closed(reader: Reader) -> None:
        device.end_restore()
        close(reader)

    def checked(reader: Reader) -> None:
        device.check_files()
        check(reader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{_SEAM}.is_cpu", lambda device: False)
        patch.setattr(staging, "fetches_pinned", lambda device: pinned)
        patch.setattr(staging, "_registered", lambda memory, devices: register(memory, [device]))
        patch.setattr(pipeline, "kind_for", kind_for)
        patch.setattr(ways, "_LEAST_PROGRAM_BYTES", 0 if programs else math.inf)
        patch.setattr(jax, "device_put", put)
        patch.setattr(jax, "make_array_from_callback", callback)
        patch.setattr(jax, "make_array_from_single_device_arrays", put_together)
        patch.setattr(jax.Shard, "data", property(data))
        patch.setattr(jax, "block_until_ready", waiting(wait))
        patch.setattr(_Array, "block_until_ready", waiting(_block_until_ready))
        patch.setattr(_Array, "__array__", waiting(_as_numpy))
        patch.setattr(_Array, "is_ready", lambda array: device.is_ready(array) and _is_ready(array))
        patch.setattr(assembly, "_compiled", compiled)
        patch.setattr(Pool, "give_back", given_back)
        patch.setattr(Reader, "__init__", made)
        patch.setattr(Reader, "close", closed)
        patch.setattr(Reader, "check", checked)
        try:
            yield device
        finally:
            device.close()
    assert not device.problems, "\n".join(device.problems)


def _hands_over(caller: dict[str, Any]) -> bool:
    """Return whether a module hands over bytes of tensors."""
    return caller["__name__"] == _SEAM or _reads(caller)


def _reads(caller: dict[str, Any]) -> bool:
    """Return whether a module looks into arrays that a restore has made."""
    return caller["__name__"].startswith("orbax_safetensors.restore.")


def _addresses(tree: Any) -> list[int]:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, _Array) and not leaf.is_deleted()]
    shards = [shard.data for array in arrays for shard in array.addressable_shards]
    return [shard.unsafe_buffer_pointer() for shard in shards if shard.size]


def _copy(source: jax.Array, destination: jax.Array) -> None:
    """Copy the memory of all shards of an array to another one of the same sharding and layout."""
    for start, end in zip(_addresses(source), _addresses(destination), strict=True):
        ctypes.memmove(end, start, shard_nbytes(source))


def shard_nbytes(array: jax.Array) -> int:
    """Return the bytes of a shard as it lies in memory, where JAX packs elements of less than a byte."""
    return math.ceil(math.prod(array.sharding.shard_shape(array.shape)) * jax.dtypes.itemsize_bits(array.dtype) / 8)


def _checksum(source: np.ndarray) -> int:
    return zlib.crc32(source.tobytes())
