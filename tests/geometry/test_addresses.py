"""Chunks that are addresses, against NumPy: what lies at the addresses is the array."""

import math
import re

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from orbax_safetensors.geometry.addresses import MIN_CHUNK_BYTES, Chunks, chunks_in_place
from orbax_safetensors.geometry.view import View
from tests.support.strategies import examples
from tests.support.views import compositions

F4 = np.dtype("f4")
MiB = 2**20


def read(chunks, stored):
    """The array that a reader of the chunks finds, to whom those that are nowhere are zeros."""
    grid, shape = chunks.grid, chunks.shape
    whole = np.zeros([count * size for count, size in zip(grid, shape, strict=True)], chunks.view.dtype)
    seen = set()
    for addresses in chunks.addresses():
        flat = stored[addresses.tensor].reshape(-1)
        for index in np.ndindex(addresses.offsets.shape):
            at = tuple(map(int.__add__, addresses.first, index))
            assert at not in seen
            assert all(0 <= position < count for position, count in zip(at, grid, strict=True))
            seen.add(at)
            begin = int(addresses.offsets[index])
            assert 0 <= begin <= flat.size - math.prod(shape)
            chunk = flat[begin : begin + math.prod(shape)].reshape([shape[axis] for axis in chunks.order])
            box = tuple(slice(n * size, (n + 1) * size) for n, size in zip(at, shape, strict=True))
            whole[box] = chunk.transpose(np.argsort(chunks.order))
    return whole[tuple(map(slice, chunks.view.shape))]


@st.composite
def limits(draw, shape):
    shard = tuple(draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0] or [0])) for size in shape)
    return shard, draw(st.sampled_from([1, 16, 100, 4096, 16 * MiB]))


@examples(300)
@given(st.data())
def test_what_lies_at_the_addresses_is_numpys_array(data):
    made = data.draw(compositions())
    view, array = made.view, made.array
    if array.ndim and data.draw(st.booleans()):
        more = tuple(size + data.draw(st.sampled_from([0, 0, 1, size, 7])) for size in array.shape)
        view, array = view.pad(more), np.pad(array, [(0, b - a) for a, b in zip(array.shape, more, strict=True)])
    chunks = chunks_in_place(view, *data.draw(limits(array.shape)))
    if isinstance(chunks, str):
        event(chunks.partition(" in runs ")[0])
        return
    event("chunks" if math.prod(chunks.grid) > 1 else "one chunk")
    assert sorted(chunks.order) == list(range(array.ndim))
    np.testing.assert_array_equal(read(chunks, made.stored), array)


@examples(300)
@given(
    st.lists(st.integers(0, 10), min_size=1, max_size=3).map(lambda powers: tuple(2**power for power in powers)),
    st.permutations(range(3)),
    st.data(),
)
def test_limits_that_can_be_held_are(shape, order, data):
    """Powers of two can be cut well."""
    order = [axis for axis in order if axis < len(shape)]
    view = View.tensor("w", shape, F4).transpose(order)
    shard = tuple(data.draw(st.sampled_from([size >> by for by in range(4) if size >> by])) for size in view.shape)
    max_bytes = data.draw(st.sampled_from([MIN_CHUNK_BYTES, MiB, 16 * MiB]))
    chunks = chunks_in_place(view, shard, max_bytes)
    assert chunks.nbytes <= max_bytes
    assert all(size % step == 0 for size, step in zip(view.shape, chunks.shape, strict=True))
    slowest = next((axis for axis in chunks.order if view.shape[axis] > 1), 0)
    if math.prod(view.shape) // view.shape[slowest] * shard[slowest] * F4.itemsize >= MIN_CHUNK_BYTES and all(
        shard[axis] == size for axis, size in enumerate(view.shape) if axis != slowest
    ):
        assert shard[slowest] % chunks.shape[slowest] == 0


def tensor(*shape, name="w"):
    return View.tensor(name, shape, F4)


# For each view the shape and the order of its chunks, or why there are none.
CASES = {
    "as it is": (tensor(512, 256), (512, 256), (0, 1)),
    "cut along the slowest dimension": (tensor(8192, 8192), (512, 8192), (0, 1)),
    "a transpose": (tensor(512, 256).T, (256, 512), (1, 0)),
    "a transpose, cut": (tensor(8192, 8192).T, (8192, 512), (1, 0)),
    "any permutation": (tensor(4, 8, 16).transpose((1, 2, 0)), (8, 16, 4), (2, 0, 1)),
    "a split": (tensor(512, 256).reshape((8, 64, 256)), (8, 64, 256), (0, 1, 2)),
    "a transpose that is split": (tensor(512, 256).T.reshape((256, 8, 64)), (256, 8, 64), (1, 2, 0)),
    "a stack": (View.stack([tensor(512, 256), tensor(512, 256, name="v")], 1), (512, 1, 256), (1, 0, 2)),
    "a stack of transposes": (View.stack([tensor(64, 32).T, tensor(64, 32, name="v").T]), (1, 32, 64), (0, 2, 1)),
    "a concatenation": (View.concatenate([tensor(512, 64), tensor(256, 64, name="v")]), (256, 64), (0, 1)),
    "norms of layers": (View.stack([tensor(64, name=f"{n}") for n in range(80)], 1), (64, 1), (1, 0)),
    "a contiguous slice": (tensor(512, 256).slice(slice(128, 256)), (128, 256), (0, 1)),
    "a slice of experts": (tensor(4, 64, 512).slice(slice(None), slice(0, 32)), (1, 32, 512), (0, 1, 2)),
    "an index": (tensor(4, 64, 512).slice(slice(2, 3)).reshape((64, 512)), (64, 512), (0, 1)),
    "a pad at a boundary": (tensor(96, 1024).pad((128, 1024)), (32, 1024), (0, 1)),
    "a pad that divides nothing": (tensor(100, 1024).pad((128, 1024)), (100, 1024), (0, 1)),
    "a pad of the fastest dimension": (tensor(128, 1000).pad((128, 1024)), (128, 1000), (0, 1)),
    "a pad of two dimensions": (tensor(64, 48).pad((100, 64)), (64, 48), (0, 1)),
    "a prime dimension": (tensor(104_729, 1000), (104_729, 1000), (0, 1)),
    "a prime dimension between others": (tensor(16, 8191, 1024), (1, 8191, 1024), (0, 1, 2)),
    "a scalar": (tensor(), (), ()),
    "one element": (tensor(1, 1), (1, 1), (0, 1)),
    "no elements": (tensor(0, 3), (1, 3), (0, 1)),
    "zeros alone": (View.full((4, 4), 0, F4), (4, 4), (0, 1)),
    "ones": (View.concatenate([tensor(4), View.full((4,), 1)]), "constants that are stored nowhere", None),
    "a scale": (tensor(8).scale(2), r"computed \(scale\)", None),
    "an offset": (tensor(8).offset(1), r"computed \(offset\)", None),
    "a cast": (tensor(8).cast("f2"), r"computed \(cast\)", None),
    "all of them": (tensor(8).scale(2).offset(1).cast("f2"), r"computed \(scale, offset, cast\)", None),
    "a permutation inside of a dimension": (
        tensor(512, 256).T.reshape((256, 8, 2, 32)).transpose((0, 1, 3, 2)).reshape((256, 512)),
        "in runs of 1024 bytes only",
        None,
    ),
    "every second row": (tensor(1024, 1024).slice(slice(None, None, 2)), "in runs of 4096 bytes only", None),
    "every second element": (
        tensor(1024, 1024).slice(slice(None), slice(None, None, 2)),
        "in runs of 4 bytes only",
        None,
    ),
    "a part of every row": (tensor(1024, 1024).slice(slice(None), slice(512)), "in runs of 2048 bytes only", None),
    "an element before a large tensor": (
        View.concatenate([tensor(1, name="v"), tensor(1_000_000)]),
        "in runs of 4 bytes only",
        None,
    ),
    "a tensor and the transpose of another": (
        View.stack([tensor(256, 256), tensor(256, 256, name="v").T]),
        "in runs of 4 bytes only",
        None,
    ),
}


@pytest.mark.parametrize(("view", "shape", "order"), CASES.values(), ids=list(CASES))
def test_cases(view, shape, order):
    chunks = chunks_in_place(view, view.shape, 16 * MiB)
    if order is None:
        assert isinstance(chunks, str), chunks
        assert re.search(shape, chunks)
        return
    assert isinstance(chunks, Chunks), chunks
    assert chunks.count == sum(addresses.offsets.size for addresses in chunks.addresses())
    assert (chunks.shape, chunks.order) == (shape, order)


# For each view and shard the chunks that shards are made of; those of the view if an edge is inside of contiguous rows.
SHARDED = {
    "the slowest dimension": (tensor(512, 1024), (64, 1024), (64, 1024)),
    "the fastest dimension": (tensor(512, 1024), (512, 128), (512, 1024)),
    "a long fastest dimension": (tensor(16, 65_536), (16, 16_384), (1, 16_384)),
    "the slowest of a transpose": (tensor(512, 1024).T, (1024, 64), (1024, 64)),
    "a stacked dimension": (View.stack([tensor(512, 256, name=n) for n in "abcdefgh"]), (2, 512, 256), (1, 512, 256)),
    "a dimension in the middle": (tensor(8, 64, 1024), (8, 16, 1024), (1, 16, 1024)),
    "too little for a chunk": (tensor(64, 64), (8, 64), (64, 64)),
    "shards that are smaller than what divides": (tensor(96, 4096), (12, 4096), (12, 4096)),
    "an edge inside of stored rows": (
        View.concatenate([tensor(100, 4096), tensor(100, 4096, name="v")]), (50, 4096), (50, 4096),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("view", "shard", "shape"), SHARDED.values(), ids=list(SHARDED))
def test_chunks_are_cut_along_shards(view, shard, shape):
    assert chunks_in_place(view, shard, 16 * MiB).shape == shape
