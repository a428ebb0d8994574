"""Tiles and chunks: whole, disjoint, aligned, within their limits, and cut where it costs least."""

import itertools
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.plan.tiling import chunk_shape, row_major_order, storage_order, tile_shape, tiles
from orbax_safetensors.plan.view import View

F4 = np.dtype(np.float32)
SHAPES = st.lists(st.integers(0, 12), max_size=4).map(tuple)


@st.composite
def cut(draw):
    shape = draw(SHAPES)
    grain = tuple(draw(st.integers(1, max(size, 1))) for size in shape)
    return shape, grain, draw(st.permutations(range(len(shape)))), draw(st.integers(1, 200))


@given(cut())
def test_tiles_make_up_the_whole(drawn):
    shape, grain, order, limit = drawn
    tile = tile_shape(shape, grain, order, limit)
    covered = np.zeros(shape, int)
    for box in tiles(shape, tile, order):
        covered[tuple(slice(*ends) for ends in box)] += 1
        own = [stop - start for start, stop in box]
        assert prod(own) <= max(limit, prod(grain))
        assert all(start % step == 0 for (start, _), step in zip(box, grain, strict=True))
        assert all(stop % step == 0 or stop == size for (_, stop), step, size in zip(box, grain, shape, strict=True))
    assert (covered == 1).all()


@given(cut())
def test_chunks_are_even(drawn):
    shape, _, order, limit = drawn
    chunk = chunk_shape(shape, order, limit)
    assert prod(chunk) <= limit or prod(shape) == 0
    assert all(size % own == 0 if size else own == 0 for size, own in zip(shape, chunk, strict=True))
    if 0 < prod(shape) <= limit:
        assert chunk == shape


def test_what_lies_together_in_storage_stays_together():
    layers = [View.tensor(f"{n}", (64, 128), F4).T for n in range(6)]
    stacked = View.stack(layers, axis=1)  # [128, 6, 64], of which 128 is innermost in storage
    assert storage_order(stacked) == (0, 2, 1)
    assert chunk_shape(stacked.shape, storage_order(stacked), 128 * 64 * 2) == (128, 2, 64)
    assert chunk_shape(stacked.shape, storage_order(stacked), 128 * 16) == (128, 1, 16)
    assert tile_shape(stacked.shape, (16, 1, 64), storage_order(stacked), 128 * 64) == (128, 1, 64)
    assert storage_order(View.full((2, 3), 1)) == row_major_order((2, 3)) == (1, 0)


def test_neighbours_follow_one_another():
    boxes = list(tiles((4, 4), (2, 2), (0, 1)))
    assert [box[0] for box in boxes[:2]] == [(0, 2), (2, 4)]
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(boxes))
