"""Windows that are read straight into place, against the bytes that a staging buffer would pass on."""

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.geometry.view import View
from orbax_safetensors.storage.local import LocalFile
from orbax_safetensors.transfer import scatter
from orbax_safetensors.transfer.plan import Block, Location, transfer_plan
from orbax_safetensors.transfer.reader import Reader
from orbax_safetensors.transfer.scatter import destination_runs

U2 = np.dtype(np.uint16)


def shards(rows, columns, devices):
    view = View.tensor("t", (rows, columns), U2)
    width = columns // devices
    return [Block(view, ((0, rows), (at, at + width)), (rows, width), U2) for at in range(0, columns, width)]


def restored(path, blocks, max_gap_bytes=4096):
    memory = [np.zeros(block.nbytes, np.uint8) for block in blocks]
    plan = transfer_plan(blocks, lambda name: Location(0, 8, U2), max_gap_bytes=max_gap_bytes, max_request_bytes=2**24)
    with Reader(lambda number: LocalFile(path), 2) as reader:
        reader.run(plan, blocks, memory)
    assert (reader.counters.num_requests, reader.counters.nbytes) == (plan.num_requests, plan.moved_bytes)
    return [buffer.view(block.dtype).reshape(block.shape) for buffer, block in zip(memory, blocks, strict=True)]


@pytest.fixture
def array(tmp_path):
    array = np.random.default_rng(0).integers(0, 2**16, (3001, 2048), U2)
    (tmp_path / "file").write_bytes(bytes(8) + array.tobytes())
    return array


@pytest.mark.parametrize("devices", [2, 4])
def test_inner_shards_are_read_into_place_in_one_copy(array, tmp_path, devices):
    with mock.patch.object(Reader, "_staging", side_effect=AssertionError):
        arrays = restored(tmp_path / "file", shards(*array.shape, devices))
    assert np.array_equal(np.concatenate(arrays, axis=1), array)


def test_short_runs_and_shards_with_gaps_between_them_are_staged(array, tmp_path):
    assert np.array_equal(np.concatenate(restored(tmp_path / "file", shards(*array.shape, 16)), axis=1), array)
    some = restored(tmp_path / "file", shards(*array.shape, 8)[::2])
    assert np.array_equal(np.concatenate(some, axis=1), array.reshape(-1, 4, 2, 256)[:, :, 0].reshape(-1, 1024))


def test_windows_that_lie_in_a_gap_are_read_and_dropped(tmp_path):
    shape = (3, 3 * 2**20)
    array = np.arange(np.prod(shape)).astype(U2).reshape(shape)
    (tmp_path / "file").write_bytes(bytes(8) + array.tobytes())
    view = View.tensor("t", shape, U2)
    (found,) = restored(tmp_path / "file", [Block(view, ((0, 3), (0, 1024)), (3, 1024), U2)], max_gap_bytes=2**25)
    assert np.array_equal(found, array[:, :1024])


def test_one_shard_twice_and_a_cast_are_staged(array, tmp_path):
    blocks = shards(*array.shape, 2)
    wide = blocks[0]._replace(dtype=np.dtype(np.uint32))
    first, second, again, cast = restored(tmp_path / "file", [*blocks, blocks[0], wide])
    assert np.array_equal(np.hstack([first, second]), array)
    assert np.array_equal(again, first)
    assert np.array_equal(cast, first)


@given(st.data())
def test_places_are_where_the_copies_put_the_bytes(data):
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4)) * 12
    view = View.tensor("t", (rows, columns), U2)
    cuts = sorted(data.draw(st.sets(st.sampled_from(range(2, columns, 2)), max_size=4)) | {0, columns})
    boxes = [((0, rows), cut) for cut in pairwise(cuts)]
    source = np.arange(rows * columns, dtype=U2)
    memory, copies = [], []
    for box in boxes:
        shape = [stop - start for start, stop in box]
        memory.append(np.zeros(np.prod(shape) * 2, np.uint8))
        copies += [(copy, memory[-1]) for _, copy, _ in view.copies(box, shape)]
    scatter._runs.cache_clear()
    with mock.patch.object(scatter, "_SHORTEST", 1):
        runs = destination_runs(copies, 2, source.nbytes)
    assert runs[:, 1].sum() == source.nbytes
    at = 0
    for address, nbytes in runs.tolist():
        ((number, begin),) = [
            (number, address - buffer.ctypes.data)
            for number, buffer in enumerate(memory)
            if 0 <= address - buffer.ctypes.data < buffer.nbytes
        ]
        memory[number][begin : begin + nbytes] = source.view(np.uint8)[at : at + nbytes]
        at += nbytes
    for (_, (start, stop)), buffer in zip(boxes, memory, strict=True):
        assert np.array_equal(buffer.view(U2).reshape(rows, -1), source.reshape(rows, columns)[:, start:stop])
    scatter._runs.cache_clear()
