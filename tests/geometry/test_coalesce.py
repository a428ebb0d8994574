"""Requests against enumeration: what is read holds what is needed, once, and is counted right."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orbax_safetensors.geometry import coalesce
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.coalesce import Direct, Staged, distinct_bytes, plan_reads, touching
from orbax_safetensors.geometry.strided import Copy, Runs, source_runs
from orbax_safetensors.geometry.view import View
from tests.support.strategies import examples
from tests.support.views import boxes, compositions

F4 = np.dtype("f4")


def copies_of(view, *wanted):
    """All copies that fill the boxes, with unchanged bits."""
    return tuple(
        (copy, True) for box in wanted for _, copy, _ in view.copies(box, [stop - start for start, stop in box])
    )


def bytes_of(runs):
    return [begin + at for begin, length in runs.pieces(0, runs.nbytes) for at in range(length)]


def needed(copies, itemsize):
    return {byte for copy, _ in copies for byte in bytes_of(source_runs(copy, itemsize))}


@examples(200)
@given(st.data(), st.sampled_from([0, 4, 16, 1000]), st.booleans())
def test_what_is_read_holds_what_is_needed(data, max_gap_bytes, same_bits):
    made = data.draw(compositions())
    wanted = [data.draw(boxes(made.array.shape)) for _ in range(data.draw(st.integers(1, 4)))]
    by_tensor = {}
    for box in wanted:
        for name, copy, _ in made.view.copies(box, [stop - start for start, stop in box]):
            by_tensor.setdefault(name, []).append((copy, same_bits))
    for copies in by_tensor.values():
        plan = plan_reads(tuple(copies), 4, max_gap_bytes)
        parts = (*plan.ranges, *plan.windowed)
        read = [byte for part in parts for byte in bytes_of(part.runs)]
        assert len(read) == len(set(read)) == plan.read_bytes
        assert needed(copies, 4) <= set(read)
        assert plan.needed_bytes == len(needed(copies, 4))
        for part in parts:
            if isinstance(part, Direct):
                copy = copies[part.buffer][0]
                order = sorted(elements(copy), key=lambda pair: pair[1])
                held = [4 * source + byte for source, _ in order for byte in range(4)]
                first = part.offset - 4 * copy.destination
                assert same_bits
                assert held[first : first + part.runs.nbytes] == bytes_of(part.runs)
            else:
                packed = bytes_of(part.runs)
                for use in part.uses:
                    assert [(packed[4 * a] // 4, b) for a, b in elements(use.copy)] == elements(copies[use.buffer][0])


def elements(copy):
    """`(source, destination)` of every element, in the order of the modes."""
    index = np.array(list(np.ndindex(*(size for size, _, _ in copy.modes)))).T
    source = copy.source + sum((at * src for at, (_, src, _) in zip(index, copy.modes, strict=True)), np.int64(0))
    into = copy.destination + sum((at * dst for at, (_, _, dst) in zip(index, copy.modes, strict=True)), np.int64(0))
    count = copy.elements
    return list(zip(np.broadcast_to(source, count).tolist(), np.broadcast_to(into, count).tolist(), strict=True))


@examples(300)
@given(st.data(), st.sampled_from([0, 8, 1000]))
def test_shards_of_a_grid_are_read_once(data, max_gap_bytes):
    """Any subset of the blocks of a sharded tensor, as the devices of one process hold them."""
    grid = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    block = [data.draw(st.integers(1, 3)) for _ in grid]
    view = View.tensor("w", [a * b for a, b in zip(grid, block, strict=True)], F4)
    cells = [tuple((at * b, (at + 1) * b) for at, b in zip(cell, block, strict=True)) for cell in np.ndindex(*grid)]
    held = data.draw(st.lists(st.sampled_from(cells), min_size=1, unique=True))
    copies = copies_of(view, *held)
    plan = plan_reads(copies, 4, max_gap_bytes)
    assert plan.needed_bytes == len(needed(copies, 4))
    read = [byte for part in (*plan.ranges, *plan.windowed) for byte in bytes_of(part.runs)]
    assert len(read) == len(set(read))
    if max_gap_bytes == 0:
        assert set(read) == needed(copies, 4)


def every(step, first, rows, columns):
    """Every `step`th column of a matrix of the elements from the `first` of a tensor on."""
    matrix = View.tensor("w", (200,), F4).slice(slice(first, first + rows * columns)).reshape((rows, columns))
    return matrix.slice(slice(None), slice(None, None, step))


# The last column that is taken lies less than 15 elements before the next row, where the second view has elements.
SHORT_ROWS = [every(15, 0, 3, 25), every(15, 10, 3, 25)]


@examples(300)
@example(SHORT_ROWS)
@given(
    st.lists(
        st.builds(every, st.integers(1, 6), st.integers(0, 12), st.integers(1, 4), st.integers(1, 12)),
        min_size=1,
        max_size=3,
    )
)
def test_distinct_bytes_are_those_that_some_set_holds(views):
    copies = [copy for view in views for copy, _ in copies_of(view, Box.whole(view.shape))]
    sets = [source_runs(copy, 4) for copy in copies]
    assert distinct_bytes(sets, 2**20) == len({byte for runs in sets for byte in bytes_of(runs)})


def test_leading_shards_are_read_in_one_piece_and_nothing_else():
    view = View.tensor("w", (8, 16), F4)
    plan = plan_reads(copies_of(view, ((2, 4), (0, 16))), 4, 10**6)
    assert plan.ranges == (Direct(Runs(128, 128, ()), 0, 0),)
    assert not plan.windowed
    apart = plan_reads(copies_of(view, ((0, 2), (0, 16)), ((4, 6), (0, 16))), 4, 10**6)
    assert [part.runs for part in apart.ranges] == [Runs(0, 128, ()), Runs(256, 128, ())]


def test_all_inner_shards_are_one_range_that_is_copied_from():
    view = View.tensor("w", (8, 16), F4)
    shards = [((0, 8), (at, at + 4)) for at in range(0, 16, 4)]
    plan = plan_reads(copies_of(view, *shards), 4, 0)
    (staged,) = plan.windowed
    assert isinstance(staged, Staged)
    assert staged.runs == Runs(0, 512, ())
    assert len(staged.uses) == 4


def test_an_inner_shard_is_read_run_by_run_unless_gaps_are_short():
    view = View.tensor("w", (8, 16), F4)
    shard = ((0, 8), (4, 8))
    (far,) = plan_reads(copies_of(view, shard), 4, 47).windowed
    assert far == Direct(Runs(16, 16, ((8, 64),)), 0, 0)
    (near,) = plan_reads(copies_of(view, shard), 4, 48).windowed
    assert near.runs == Runs(16, 7 * 64 + 16, ())
    assert isinstance(near, Staged)


def test_one_box_twice_is_read_once():
    """As for two leaves that are tied to one tensor."""
    view = View.tensor("w", (8, 16), F4)
    plan = plan_reads(copies_of(view, ((0, 8), (0, 16)), ((0, 8), (0, 16))), 4, 0)
    assert plan.read_bytes == plan.needed_bytes == 512


def test_a_cast_is_never_read_straight_into_place():
    copy = Copy(0, 0, ((8, 1, 1),))
    plan = plan_reads(((copy, False),), 4, 0)
    assert not plan.ranges
    assert plan.windowed == (Staged(Runs(0, 32, ()), coalesce.MAX_STAGED_BYTES, (coalesce.Use(0, copy),)),)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_requests_are_counted_as_windows_make_them(count):
    for length, row in itertools.product([4, 60, 64, 100, 130], [4, 12, 64, 128]):
        runs = Runs(0, length, ((count, 1000),) if count > 1 else ())
        pitch = coalesce._pitch(runs, [row], 64)
        assert 0 < pitch <= 64
        windows = [(low, min(low + pitch, runs.nbytes)) for low in range(0, runs.nbytes, pitch)]
        assert coalesce._requests(runs, pitch) == sum(len(list(runs.pieces(*window))) for window in windows)


def test_ranges_touch_within_a_file_only():
    files, begin, end = np.array([[0, 0, 0, 1, 1], [0, 8, 20, 24, 30], [8, 16, 24, 30, 31]])
    assert touching(files, begin, end).tolist() == [0, 2, 3]
    assert touching(*np.zeros((3, 0), np.int64)).tolist() == []
