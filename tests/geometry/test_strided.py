"""Copies and runs against enumeration."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.geometry.strided import (
    Copy,
    every,
    extent,
    keeps_order,
    merged,
    packed,
    runs_of,
    source_runs,
    split,
    subrange,
)
from tests.support.strategies import examples
from tests.support.views import boxes, compositions

modes_lists = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40)), max_size=4).map(tuple)


def positions(modes):
    """Offsets of all positions of a dimension, in order."""
    return [sum(index) for index in itertools.product(*([at * stride for at in range(size)] for size, stride in modes))]


def elements(copy):
    """`(source, destination)` of every element."""
    return sorted(
        (copy.source + sum(a for a, _ in index), copy.destination + sum(b for _, b in index))
        for index in itertools.product(*([(at * s, at * d) for at in range(size)] for size, s, d in copy.modes))
    )


@given(modes_lists)
def test_merging_keeps_the_positions(modes):
    assert positions(merged(modes)) == positions(modes)
    assert merged(merged(modes)) == merged(modes)


@given(modes_lists, st.data())
def test_splitting_keeps_the_positions(modes, data):
    count = extent(modes)
    inner = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    parts = split(modes, [count // inner, inner])
    if parts is not None:
        assert [extent(part) for part in parts] == [count // inner, inner]
        assert [a + b for a in positions(parts[0]) for b in positions(parts[1])] == positions(modes)


def test_splitting_across_a_digit_is_impossible():
    assert split(((4, 1), (3, 4)), [2, 6]) is not None
    assert split(((3, 10), (4, 1)), [2, 6]) is None


@given(modes_lists, st.data())
def test_a_subrange_has_its_positions_in_few_pieces(modes, data):
    start, stop = sorted(data.draw(st.tuples(st.integers(0, extent(modes)), st.integers(0, extent(modes)))))
    pieces = list(subrange(modes, start, stop))
    found = [offset + position for _, offset, part in pieces for position in positions(part)]
    assert found == positions(modes)[start:stop]
    assert len(pieces) <= max(2 * len(modes) - 1, 1)
    ends = itertools.accumulate((extent(part) for _, _, part in pieces), initial=start)
    assert [at for at, _, _ in pieces] == list(ends)[:-1]


@given(modes_lists, st.integers(1, 5), st.data())
def test_every_takes_every_nth(modes, step, data):
    start = data.draw(st.integers(0, extent(modes)))
    wanted = positions(modes)[start::step]
    found = [
        offset + position for _, offset, part in every(modes, start, step, len(wanted)) for position in positions(part)
    ]
    assert found == wanted


@examples(200)
@given(st.data())
def test_parts_of_a_copy_make_the_copy(data):
    made = data.draw(compositions())
    box = data.draw(boxes(made.array.shape))
    for name, copy, _ in made.view.copies(box, [stop - start for start, stop in box]):
        size = made.stored[name].size
        cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
        found = []
        for low, high in itertools.pairwise(cuts):
            parts = list(copy.within(low, high))
            assert len(parts) <= max(2 * len(copy.modes) - 1, 1)
            found += [pair for part in parts for pair in elements(part)]
        assert sorted(found) == elements(copy)


@examples(200)
@given(st.data())
def test_runs_are_the_bytes_a_copy_reads(data):
    made = data.draw(compositions())
    box = data.draw(boxes(made.array.shape))
    for _, copy, _ in made.view.copies(box, [stop - start for start, stop in box]):
        runs = source_runs(copy, 4)
        read = sorted(4 * source + byte for source, _ in elements(copy) for byte in range(4))
        pieces = list(runs.pieces(0, runs.nbytes))
        assert [begin + at for begin, length in pieces for at in range(length)] == read
        assert len(pieces) == runs.count
        assert runs.end == read[-1] + 1
        # Packed bytes: what the runs hold, without gaps.
        from_packed = [read[4 * source] // 4 for source, _ in elements(packed(copy, runs, 4))]
        assert from_packed == [source for source, _ in elements(copy)]
        assert keeps_order(copy) == (np.diff([d for _, d in elements(copy)]) == 1).all()


@given(st.data())
def test_pieces_of_packed_bytes_can_be_asked_for_in_part(data):
    runs = runs_of(3, 5, ((2, 100), (3, 20)))
    low, high = sorted(data.draw(st.tuples(st.integers(0, runs.nbytes), st.integers(0, runs.nbytes))))
    everything = [begin + at for begin, length in runs.pieces(0, runs.nbytes) for at in range(length)]
    assert [begin + at for begin, length in runs.pieces(low, high) for at in range(length)] == everything[low:high]


def test_runs_do_not_interleave():
    assert runs_of(0, 4, ((3, 2),)) is None
    assert runs_of(0, 4, ((3, 4), (2, 12))).modes == ()
    assert runs_of(0, 4, ((2, 8), (3, 100))).modes == ((3, 100), (2, 8))


def test_a_shifted_copy():
    assert Copy(3, 1, ((2, 5, 1),)).shifted(-2) == Copy(1, 1, ((2, 5, 1),))
