"""Tiles and chunks: whole, disjoint, aligned, within their limits, and cut where it costs least."""

import itertools
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.geometry.tiling import chunk_shape, common, storage_order, tile_shape, tiles
from orbax_safetensors.geometry.view import View

F4 = np.dtype(np.float32)
SHAPES = st.lists(st.integers(0, 12), max_size=4).map(tuple)


@st.composite
def cut(draw):
    shape = draw(SHAPES)
    atomic_tile = tuple(draw(st.integers(1, max(size, 1))) for size in shape)
    return shape, atomic_tile, draw(st.permutations(range(len(shape)))), draw(st.integers(1, 200))


@given(cut())
def test_tiles_make_up_the_whole(drawn):
    shape, atomic_tile, order, limit = drawn
    tile = tile_shape(shape, atomic_tile, order, limit)
    covered = np.zeros(shape, int)
    for box in tiles(shape, tile, order):
        covered[tuple(slice(*ends) for ends in box)] += 1
        own = [stop - start for start, stop in box]
        assert prod(own) <= max(limit, prod(atomic_tile))
        assert all(start % step == 0 for (start, _), step in zip(box, atomic_tile, strict=True))
        assert all(
            stop % step == 0 or stop == size for (_, stop), step, size in zip(box, atomic_tile, shape, strict=True)
        )
    assert (covered == 1).all()


@st.composite
def sharded(draw):
    shape = draw(st.lists(st.integers(1, 24), max_size=4).map(tuple))
    shard = tuple(draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])) for size in shape)
    atomic_tile = tuple(draw(st.integers(1, size)) for size in shape)
    order = tuple(draw(st.permutations(range(len(shape)))))
    return shape, shard, atomic_tile, order, draw(st.integers(1, 500)), draw(st.integers(1, 500))


@given(sharded())
def test_shards_are_made_of_chunks(drawn):
    shape, shard, atomic_tile, _, limit, tile_limit = drawn
    chunk = chunk_shape(*drawn)
    assert prod(chunk) <= min(limit, tile_limit)
    for size, own, whole in zip(chunk, shard, shape, strict=True):
        assert own % size == 0 if own < whole else size <= own
    if prod(shard) <= limit and prod(common(shard, atomic_tile, shape)) <= tile_limit:
        assert chunk == shard
    if prod(atomic_tile) <= tile_limit and shard == shape:  # nothing keeps chunks from being atomic tiles
        tile = common(chunk, atomic_tile, shape)
        assert prod(tile) <= tile_limit or prod(atomic_tile) > limit
    assert all(
        tile % size == 0 or tile == whole
        for tile, size, whole in zip(common(chunk, atomic_tile, shape), chunk, shape, strict=True)
    )


def test_what_lies_together_in_storage_stays_together():
    layers = [View.tensor(f"{n}", (64, 128), F4).T for n in range(6)]
    stacked = View.stack(layers, axis=1)  # [128, 6, 64], of which 128 is innermost in storage
    order = storage_order(stacked)
    assert order == (0, 2, 1)
    rows = (128, 1, 1)
    assert chunk_shape((128, 6, 64), (128, 6, 64), rows, order, 128 * 64 * 2, 10**6) == (128, 2, 64)
    assert chunk_shape((128, 6, 64), (128, 6, 64), rows, order, 128 * 16, 10**6) == (128, 1, 16)
    # Sharded across the rows: chunks are cut so that a tile has whole rows.
    assert chunk_shape((128, 6, 64), (16, 6, 64), rows, order, 10**6, 128 * 64 * 3) == (16, 3, 64)
    assert tile_shape(stacked.shape, (16, 1, 64), order, 128 * 64) == (128, 1, 64)
    assert storage_order(View.full((2, 3), 1)) == (1, 0)


def test_chunks_of_another_cut():
    """From shards of the first axis to shards of the last: no chunk of either is touched by two tiles."""
    chunk = chunk_shape((64, 32, 128), (64, 32, 8), (4, 32, 128), (2, 1, 0), 10**9, 8 * 32 * 128)
    assert chunk == (8, 32, 8)
    assert common(chunk, (4, 32, 128), (64, 32, 128)) == (8, 32, 128)


def test_a_prime_is_cut_where_it_is_not_sharded():
    assert chunk_shape((151_643, 64), (151_643, 64), (1, 64), (1, 0), 1_000_000, 10**7) == (15_165, 64)


def test_chunks_are_no_crumbs_where_a_shard_has_no_small_divisor():
    # Shards of 3 x 5087 rows: of whole rows, three at a time would be left.
    shape, shard = (30_522, 384), (15_261, 384)
    assert chunk_shape(shape, shard, (1, 384), (1, 0), 1_700_000, 10**7) == (5087, 192)
    # Neither axis can be cut otherwise.
    assert chunk_shape((2 * 10_007, 4), (10_007, 2), (1, 1), (1, 0), 10_000, 10**7) == (1, 2)


def test_neighbours_follow_one_another():
    boxes = list(tiles((4, 4), (2, 2), (0, 1)))
    assert [box[0] for box in boxes[:2]] == [(0, 2), (2, 4)]
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(boxes))
