"""Tiles from a source to a sink: all of them once, in batches that fit, several at a time, whatever fails."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from math import prod

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.geometry.box import Box
from orbax_safetensors.streaming import tile_job
from orbax_safetensors.streaming.cutting import batch_bytes, bundle_bytes, bundles, check_fits, step_bytes
from orbax_safetensors.streaming.tile_job import TileJob, share
from orbax_safetensors.streaming.tiles import Tile, nbytes
from orbax_safetensors.transfer.engine import Counters
from tests.support import hang

I4 = np.dtype(np.int32)


class Memory:
    """A source and a sink of arrays in memory, which counts what passes through it."""

    decoded = True
    path = identity = "memory"
    last = None
    moved_bytes = property(lambda self: self.counters.nbytes)

    def __init__(self, arrays, atomic_tiles=None, fail_at=None):
        self.tensors, self.atomic_tiles, self.fail_at = arrays, atomic_tiles or {}, fail_at
        self.leaves = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
        self.out = {name: np.zeros_like(array) for name, array in arrays.items()}
        self.times = {name: np.zeros(array.shape, int) for name, array in arrays.items()}
        self.lock = threading.Lock()
        self.held = self.most = self.writes = 0
        self.counters = Counters()

    def cut(self, cuts, batch_bytes, writers):
        """Return the job that moves these bundles, each a unit."""
        self.units, self.batch_bytes, self.writers = [(bundle,) for bundle in cuts], batch_bytes, writers
        return TileJob(self, self)

    def begin(self, *, resume):
        return contextlib.nullcontext(self)

    def has(self, unit):
        return False

    def expect(self, units):
        pass

    def commit(self, last):
        last()

    def check(self):
        pass

    def order(self, name):
        return tuple(range(len(self.leaves[name].shape)))[::-1]

    def atomic_tile(self, name):
        return self.atomic_tiles.get(name, (1,) * len(self.leaves[name].shape))

    def read(self, tiles, report=None):
        with self.lock:
            self.held += nbytes(tiles, self.leaves)
            self.most = max(self.most, self.held)
        return [self.tensors[tile.name][index(tile.box)].copy() for tile in tiles]

    def write(self, tiles, arrays):
        with self.lock:
            self.writes += 1
            fails = self.writes == self.fail_at
        if fails:
            raise OSError("full")
        for tile, array in zip(tiles, arrays, strict=True):
            self.out[tile.name][index(tile.box)] = array
            self.times[tile.name][index(tile.box)] += 1
        with self.lock:
            self.held -= nbytes(tiles, self.leaves)


def index(box):
    return (*(slice(*ends) for ends in box), ...)


@st.composite
def memories(draw):
    arrays, atomic_tiles, sinks = {}, {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
        arrays[f"a{number}"] = np.arange(prod(shape), dtype=I4).reshape(shape) + 1
        atomic_tiles[f"a{number}"] = tuple(draw(st.integers(1, max(size, 1))) for size in shape)
        sinks[f"a{number}"] = tuple(draw(st.integers(1, max(size, 1))) for size in shape)
    source = Memory(arrays, atomic_tiles)
    return source, sinks, draw(st.integers(1, 800)), draw(st.integers(1, 3)), draw(st.integers(1, 4))


@given(memories())
def test_every_element_passes_once(drawn):
    memory, sinks, limit, writers, processes = drawn
    cuts = bundles(memory, sinks, {}, [(name,) for name in memory.tensors], 8 * limit)
    for bundle in cuts:
        for tile in bundle:
            for (start, stop), step, size in zip(
                tile.box, sinks[tile.name], memory.leaves[tile.name].shape, strict=True
            ):
                assert start % step == 0
                assert stop % step == 0 or stop == size
    total = 0
    for process in range(processes):
        told = []
        bundles_here = share(cuts, lambda bundle: nbytes(bundle, memory.leaves), process, processes)
        memory.cut(bundles_here, limit, writers).run(resume=False, progress=lambda *now, told=told: told.append(now))
        done = sum(nbytes(bundle, memory.leaves) for bundle in bundles_here)
        assert told[0] == (0, done)
        assert told[-1] == (done, done)
        assert told == sorted(told)
        total += done
    assert total == sum(array.nbytes for array in memory.tensors.values())
    for name, array in memory.tensors.items():
        np.testing.assert_array_equal(memory.out[name], array)
        assert (memory.times[name] == 1).all()
    largest = max([prod(atomic_tile) * 4 for atomic_tile in sinks.values()], default=0)
    assert memory.most <= max((writers + 1) * limit, 2 * max(bundle_bytes(8 * limit), largest))


class Slow(Memory):
    """A sink whose writes end when they may, and a source that notes how many have ended when a read begins."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.reads, self.may_end, self.written = threading.Semaphore(0), threading.Semaphore(0), []

    def read(self, tiles, report=None):
        self.written.append(self.writes)
        self.reads.release()
        return super().read(tiles)

    def write(self, tiles, arrays):
        assert self.may_end.acquire(timeout=hang.SECONDS)
        super().write(tiles, arrays)


@pytest.mark.parametrize(("sizes", "overlap"), [((10, 10, 10, 10), 2), ((10, 25, 10, 10), 1), ((25, 25, 25, 25), 1)])
def test_two_batches_are_written_while_one_is_read(sizes, overlap):
    """And only one if the other would take more memory than another batch."""
    memory = Slow({f"a{number}": np.zeros((size,), I4) for number, size in enumerate(sizes)})
    cuts = [(Tile(name, Box.whole(leaf.shape)),) for name, leaf in memory.leaves.items()]
    conversion = memory.cut(cuts, 40, 2)
    overlaps = [overlap for _, _, overlap in conversion._batches(range(len(cuts)))]
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(conversion.run, resume=False, progress=None)
        assert all(memory.reads.acquire(timeout=hang.SECONDS) for _ in range(overlap + 1))
        memory.may_end.release(len(sizes))
        moving.result()
    assert overlaps[overlap] == overlap
    assert all(number - ended <= overlaps[number] for number, ended in enumerate(memory.written))


def test_a_long_batch_is_told_of_on_its_way():
    """Half when it is read, and half when it is written; a short one only once it is written."""
    told, size = [], 4 * 2**20
    memory = Memory({name: np.zeros((nbytes // 4,), I4) for name, nbytes in {"long": size, "short": 4000}.items()})
    seen, lock = threading.Event(), threading.Lock()

    def read(tiles, report):
        with lock:
            report(0.1)
            report(0.5)
        return Memory.read(memory, tiles)

    def write(tiles, arrays):
        memory.counters.nbytes += size // 2
        assert seen.wait(hang.SECONDS)
        Memory.write(memory, tiles, arrays)
        memory.counters.nbytes += sum(array.nbytes for array in arrays) - size // 2

    def progress(done, total):
        told.append(done)
        if done == size * 3 // 4:
            seen.set()

    memory.read, memory.write = read, write
    cuts = [(Tile(name, Box.whole(leaf.shape)),) for name, leaf in memory.leaves.items()]
    memory.cut(cuts[:1], size, 1).run(resume=False, progress=progress)
    assert told == [0, size // 4, size // 2, size * 3 // 4, size]
    told.clear()
    memory.cut(cuts[1:], size, 1).run(resume=False, progress=progress)
    assert told == [0, 4000]


@pytest.mark.parametrize(
    ("total", "most", "step"), [(2**33, 2**28, 2**28), (2**30, 2**28, 2**26), (2**29, 2**28, 2**25), (2**29, 40, 40)]
)
def test_little_moves_in_several_steps_as_well(total, most, step):
    assert step_bytes(total, most) == step


def test_shares_are_even():
    memory = Memory({f"a{number}": np.zeros((10, 10), I4) for number in range(10)})
    cuts = bundles(memory, dict.fromkeys(memory.tensors, (1, 10)), {}, [(name,) for name in memory.tensors], 320)

    def size(bundle):
        return nbytes(bundle, memory.leaves)

    sizes = [sum(map(size, share(cuts, size, process, 7))) for process in range(7)]
    assert sum(sizes) == 4000
    assert max(sizes) - min(sizes) <= 40


def test_tiles_of_leaves_that_interleave_stay_together():
    memory = Memory({"a": np.zeros((8, 4), I4), "b": np.zeros((8, 4), I4), "c": np.zeros((3,), I4)})
    cuts = bundles(memory, dict.fromkeys("ab", (1, 1)) | {"c": (1,)}, {}, [("a", "b"), ("c",)], 8 * 128)
    assert [[tile.name for tile in bundle] for bundle in cuts] == [["a", "b"], ["a", "b"], ["c"]]
    assert all(len({tile.box for tile in bundle}) == 1 for bundle in cuts)
    # Cut for sinks in which they differ, they are moved alone.
    cuts = bundles(memory, {"a": (1, 1), "b": (8, 1)}, {}, [("a", "b")], 8 * 64)
    assert {len(bundle) for bundle in cuts} == {1}


def test_what_is_stored_together_is_read_at_once_where_memory_suffices():
    memory = Memory({"a": np.zeros((50,), I4)}, atomic_tiles={"a": (5,)})
    # A batch has 12 bytes and an atomic tile 20, which are less than a quarter.
    assert {tile.box for (tile,) in bundles(memory, {"a": (1,)}, {}, [("a",)], 100)} == {
        ((start, start + 5),) for start in range(0, 50, 5)
    }


@pytest.mark.parametrize("writers", [1, 2])
def test_a_write_that_fails_ends_all(writers):
    memory = Memory({"a": np.zeros((100,), I4)}, fail_at=3)
    cuts = bundles(memory, {"a": (1,)}, {}, [("a",)], 320)
    with pytest.raises(OSError, match="full"):
        memory.cut(cuts, 40, writers).run(resume=False, progress=None)
    assert 3 <= memory.writes <= 3 + 2 * (writers - 1)  # those that were under way, and those that did not know yet


def test_freed_memory_is_given_back_when_there_is_too_much(monkeypatch):
    # What the process holds at first, and then after each batch: 240 bytes more are allowed, six times a batch.
    held = iter([1000, 1010, 1240, 1241, 1000, 1300])
    trims = []
    monkeypatch.setattr(tile_job, "resident", lambda: next(held))
    monkeypatch.setattr(tile_job, "trim", lambda: trims.append(memory.writes))
    memory = Memory({"a": np.zeros((50,), I4)})
    memory.cut(bundles(memory, {"a": (1,)}, {}, [("a",)], 320), 40, 1).run(resume=False, progress=None)
    assert trims == [2, 4]
    assert next(held, None) is None


def test_chunks_that_are_too_large():
    check_fits("a", 100, 400)
    with pytest.raises(ValueError, match="memory_bytes is 399: 'a' is moved in chunks of 100 bytes, .* 400 are needed"):
        check_fits("a", 100, 399)
    assert batch_bytes(1) == 1
