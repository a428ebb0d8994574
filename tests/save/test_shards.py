"""The shards of a save: which of them are copied, and what an asynchronous save keeps instead."""

import errno
import gc
import itertools
import os
import threading
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.save.job import prepare
from orbax_safetensors.save.request import SaveRequest
from orbax_safetensors.storage.memory import allocate
from tests.support.files import random_bits, stored_arrays
from tests.support.saves import RNG, save

BUDGET = 6 * 4096


def prepared(leaves):
    return prepare(SaveRequest("x", leaves))


def numbered(count, size=1024):
    return {f"w{number}": jax.numpy.full((size,), float(number)) for number in range(count)}


class Copies:
    """Copies in pinned memory, each with a weak reference: NumPy's view of a copy keeps it alive."""

    def __init__(self):
        self.begun, self.most_bytes = [], 0

    @property
    def nbytes(self):
        return sum(copy.nbytes for reference in self.begun if (copy := reference()) is not None)

    def add(self, copy):
        self.begun.append(weakref.ref(copy))
        self.most_bytes = max(self.most_bytes, self.nbytes)
        return copy


@pytest.fixture
def copies(monkeypatch, accelerators):
    made, real = Copies(), jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda array, sharding: made.add(real(array, sharding)))
    return made


def test_arrays_on_cpu_devices_are_one_batch():
    assert [len(batch) for batch in prepared(numbered(10)).shards.batches(1)] == [10]


@pytest.mark.parametrize(("budget", "expected"), [(BUDGET, [3, 3, 3, 1]), (BUDGET + 1, [3, 3, 3, 1]), (1, [1] * 10)])
def test_copies_of_device_memory_come_in_batches(accelerators, budget, expected):
    batches = list(prepared(numbered(10)).shards.batches(budget))
    assert [len(batch) for batch in batches] == expected
    assert [memory.view(np.float32)[0] for batch in batches for _, memory in batch] == list(range(10))


@pytest.mark.parametrize(
    ("sizes", "begun"),
    [
        ([1024] * 10, [6, 9, 10, 10]),
        ([4096, 2048, 2048, 1024], [2, 4, 4]),  # the first is more than half of the budget
        ([4096, 2048, 1024, 1024], [1, 4, 4]),  # and leaves no room
        ([1024, 6144, 1024], [1, 2, 3]),  # the second is all of it
        ([8192, 8192], [1, 2]),  # each is more
    ],
)
def test_the_next_batch_is_on_its_way_if_there_is_room(copies, sizes, begun):
    leaves = {f"w{number}": jax.numpy.full((size,), float(number)) for number, size in enumerate(sizes)}
    seen, written = [], []
    for batch in prepared(leaves).shards.batches(BUDGET):
        seen.append(len(copies.begun))
        written += [int(memory.view(np.float32)[0]) for _, memory in batch]
        del batch
    assert seen == begun
    assert written == list(range(len(sizes)))
    assert copies.most_bytes <= max(BUDGET, 4 * max(sizes))
    assert copies.nbytes == 0


def test_a_save_that_stops_gives_the_memory_of_the_next_batch_back(copies):
    batches = prepared(numbered(10)).shards.batches(BUDGET)
    batch = next(batches)
    assert copies.nbytes == BUDGET
    del batch
    assert copies.nbytes == BUDGET // 2
    batches.close()
    assert copies.nbytes == 0


def test_each_batch_is_on_its_way_before_the_one_before_is_written(tmp_path, copies, monkeypatch):
    real, begun = os.pwritev, {}

    def pwritev(descriptor, buffers, offset):
        for buffer in buffers:
            if buffer.nbytes >= 4096:
                begun[np.frombuffer(buffer, np.float32)[0]] = len(copies.begun)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    reports = []
    leaves = numbered(10)
    save(tmp_path / "x", leaves, in_flight_bytes=BUDGET, progress=lambda *report: reports.append(report))
    assert list(begun.values()) == [6] * 3 + [9] * 3 + [10] * 4
    assert copies.most_bytes == BUDGET
    assert copies.nbytes == 0
    assert (reports[0], reports[-1]) == ((0, 40960), (40960, 40960))
    assert {name: array.tolist() for name, array in stored_arrays(tmp_path / "x").items()} == {
        name: array.tolist() for name, array in leaves.items()
    }


@pytest.mark.parametrize(
    ("number", "error"),
    [(1, OSError(errno.ENOSPC, "full")), (4, KeyboardInterrupt()), (10, OSError(errno.ENOSPC, "full"))],
    ids=repr,
)
def test_a_save_that_fails_holds_no_copies(tmp_path, copies, monkeypatch, young, number, error):
    real, writes = os.pwritev, itertools.count(1)

    def pwritev(descriptor, buffers, offset):
        if next(writes) == number:
            raise error
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises((ost.StorageError, KeyboardInterrupt)):
        save(tmp_path / "x", numbered(10), in_flight_bytes=BUDGET, threads=1)
    error.__traceback__ = None
    gc.collect(0)
    assert copies.begun
    assert copies.nbytes == 0


def kept(leaf):
    """The shards of a leaf in an asynchronous save."""
    (batch,) = prepared({"w": leaf}).kept().shards.batches(1)
    return [memory.view(block.dtype).reshape(block.shape) for block, memory in batch]


def test_a_numpy_leaf_is_copied():
    host = np.ones(100)
    (shard,) = kept(host)
    host[...] = 2
    assert (shard == 1).all()


def test_an_asynchronous_save_does_not_keep_what_it_has_copied():
    host = np.ones(100)
    job, leaf = prepared({"w": host}).kept(), weakref.ref(host)
    del host
    assert leaf() is None
    assert job.shards.nbytes == 800


@pytest.mark.parametrize(
    ("spec", "how"), [(P("x", "y"), "donated"), (P(None, "x"), "deleted"), (P(), "donated")], ids=str
)
def test_shards_on_cpu_devices_are_not_copied_and_outlive_their_array(spec, how):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    sharding = NamedSharding(mesh, spec)
    host = random_bits(RNG, (512, 512), np.dtype("f4"))
    array = jax.jit(lambda x: x, out_shardings=sharding)(host)
    before = {shard.data.unsafe_buffer_pointer(): np.array(shard.data).tobytes() for shard in array.addressable_shards}
    held = kept(array)
    assert {shard.ctypes.data for shard in held} <= before.keys()
    zeros = jax.jit(lambda x: x * 0, donate_argnums=0, out_shardings=sharding)
    if how == "deleted":
        array.delete()
        array = jax.device_put(host, sharding)
    for _ in range(3):  # memory that was free would be reused
        array = zeros(array)
    jax.block_until_ready(array)
    assert [shard.tobytes() for shard in held] == [before[shard.ctypes.data] for shard in held]


def test_shards_keep_the_numpy_memory_that_an_array_shares():
    (memory,) = allocate([4096])
    freed = threading.Event()
    weakref.finalize(memory.base, freed.set)
    memory[...] = 7
    array = jax.device_put(memory)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data
    held = kept(array)
    del memory
    array.delete()
    gc.collect(0)  # JAX frees memory of NumPy when the collector runs, whatever it collects
    assert not freed.is_set()
    assert (held[0] == 7).all()
    held.clear()
    gc.collect(0)
    assert freed.is_set()


@pytest.mark.parametrize(
    ("kind", "how"),
    [("device", "donated"), ("device", "deleted"), ("pinned_host", "deleted"), ("unpinned_host", "donated")],
)
def test_arrays_of_accelerators_are_copied_wherever_they_are(mesh, accelerators, kind, how):
    host = random_bits(RNG, (8, 8), np.dtype("f4"))
    sharding = NamedSharding(mesh, P("x", "y"), memory_kind=kind)
    array = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    addresses = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    held = kept(array)
    assert addresses.isdisjoint(shard.ctypes.data for shard in held)
    if how == "donated":
        array = jax.device_put(array, sharding, donate=True)
    array.delete()
    assert [shard.tobytes() for shard in held] == [
        host[i : i + 4, j : j + 2].tobytes() for i in (0, 4) for j in range(0, 8, 2)
    ]
