"""Moves against NumPy, which makes them in its own words."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.move import Move, move_of
from orbax_safetensors.geometry.strided import Copy, packed, source_runs
from orbax_safetensors.geometry.view import View
from tests.support.strategies import examples
from tests.support.views import boxes, compositions

I4 = np.dtype("i4")


def packed_elements(copy, source):
    """The elements that a copy reads, in their stored order, as files give them."""
    runs = source_runs(copy, source.itemsize)
    taken = source.reshape(-1).view(np.uint8)
    return np.concatenate([taken[begin : begin + size] for begin, size in runs.pieces(0, runs.nbytes)]).view(
        source.dtype
    )


def make(move, first, elements, array):
    """The move in NumPy's words."""
    place = tuple(slice(at, at + size) for at, size in zip(move.start(first), move.box, strict=True))
    array.reshape(move.into)[place] = elements.reshape(move.sizes).transpose(move.order).reshape(move.box)


def moved(view, box, shape, stored):
    """An array of `shape` with `box` of a view in its corner, made by moves alone, and these moves."""
    array = np.full(shape, -1, view.dtype)
    moves = []
    for cut in view.cuts(box, shape):
        move = move_of(cut.copy, shape)
        assert move is not None, cut
        make(move, cut.begin + cut.copy.destination, packed_elements(cut.copy, stored[cut.tensor]), array)
        moves.append(move)
    return array, moves


@examples(1000)
@given(st.data())
def test_every_copy_of_a_view_is_a_move(data):
    made = data.draw(compositions())
    box = data.draw(boxes(made.array.shape))
    shape = tuple(size + data.draw(st.sampled_from([0, 0, 0, 1, 3])) for size in box.shape)
    array, moves = moved(made.view, box, shape, made.stored)
    expected = np.full(shape, -1, np.int32)
    expected[tuple(slice(size) for size in box.shape)] = made.array[box.slices]
    np.testing.assert_array_equal(array, expected)
    for move in moves:
        assert move.fills == (np.prod(move.box) == np.prod(shape))
        assert len(move.into) <= len(shape)  # views fill boxes, which need no dimension split


@examples(500)
@given(st.data())
def test_a_move_of_a_packed_copy_is_that_of_the_copy(data):
    """The gaps that a copy leaves out of a tensor make no difference: programs see packed elements."""
    made = data.draw(compositions())
    for cut in made.view.cuts(data.draw(boxes(made.array.shape)), made.array.shape):
        dense = packed(cut.copy, source_runs(cut.copy, 4), 4)
        assert move_of(dense, made.array.shape) == move_of(cut.copy, made.array.shape)


def test_most_parts_of_copies_are_moves():
    """Requests end anywhere in a tensor. The rest have steps that do not divide the destination, or do not fit."""
    counts = Counter()

    @examples(1000)
    @given(st.data())
    def parts(data):
        made = data.draw(compositions())
        shape = made.array.shape
        array = np.full(shape, -1, np.int32)
        for cut in made.view.cuts(Box.whole(shape), shape):
            stored = made.stored[cut.tensor]
            low, high = sorted(data.draw(st.tuples(st.integers(0, stored.size), st.integers(0, stored.size))))
            for part in cut.copy.within(low, high):
                first = cut.begin + part.destination
                move = move_of(part, shape)
                if move is None or move.start(first) is None:
                    counts["no move" if move is None else "no place"] += 1
                    continue
                counts["moves"] += 1
                make(move, first, packed_elements(part, stored), array)
        np.testing.assert_array_equal(array[array != -1], made.array[array != -1])

    parts()
    assert counts["no move"] + counts["no place"] < counts["moves"] / 10, counts


@pytest.mark.parametrize(
    ("modes", "shape", "move"),
    [
        # As it lies, whole and into the rows of one of two tensors.
        (((6, 1, 1),), (2, 3), Move((6,), (0,), (2, 3), (2, 3))),
        (((6, 1, 1),), (4, 3), Move((6,), (0,), (2, 3), (4, 3))),
        # Amid a row, dimensions are joined.
        (((4, 1, 1),), (4, 3), Move((4,), (0,), (4,), (12,))),
        ((), (), Move((), (), (), ())),
        ((), (1, 1), Move((), (), (), ())),
        ((), (2, 3), Move((), (), (1, 1), (2, 3))),
        # Transposed, and into the columns of a wider array.
        (((3, 1, 2), (2, 3, 1)), (3, 2), Move((2, 3), (1, 0), (3, 2), (3, 2))),
        (((3, 1, 4), (2, 3, 1)), (3, 4), Move((2, 3), (1, 0), (3, 2), (3, 4))),
        # A layer stacked at every axis.
        (((6, 1, 1),), (5, 2, 3), Move((6,), (0,), (1, 2, 3), (5, 2, 3))),
        (((2, 3, 15), (3, 1, 1)), (2, 5, 3), Move((2, 3), (0, 1), (2, 1, 3), (2, 5, 3))),
        (((6, 1, 5),), (2, 3, 5), Move((6,), (0,), (2, 3, 1), (2, 3, 5))),
        # Heads split and transposed.
        (((4, 1, 6), (2, 12, 3), (3, 4, 1)), (4, 2, 3), Move((6, 4), (1, 0), (4, 2, 3), (4, 2, 3))),
        # Halves of a dimension interleaved, as rotary embeddings want it.
        (((4, 1, 2), (2, 4, 1)), (8,), Move((2, 4), (1, 0), (8,), (8,))),
        # One of two interleaved tensors.
        (((4, 1, 2),), (8,), Move((4,), (0,), (4, 1), (4, 2))),
        (((3, 4, 16), (4, 1, 4)), (3, 16), Move((12,), (0,), (3, 4, 1), (3, 4, 4))),
        # Two modes in one dimension, with gaps in both.
        (((2, 1, 8), (2, 2, 2)), (16,), Move((2, 2), (1, 0), (2, 2, 1), (2, 4, 2))),
    ],
)
def test_moves(modes, shape, move):
    assert move_of(Copy(7, 5, modes), shape) == move


@pytest.mark.parametrize(
    ("modes", "shape"),
    [
        (((4, 0, 1),), (4,)),  # a constant
        (((3, 1, 2),), (5,)),  # every second of an odd number
        (((2, 5, 5), (3, 1, 2)), (2, 5)),
        (((2, 1, 6), (2, 2, 3)), (13,)),
    ],
)
def test_copies_that_are_no_moves(modes, shape):
    assert move_of(Copy(0, 0, modes), shape) is None


def test_a_box_that_runs_over_the_end_of_a_dimension_does_not_fit():
    move = Move((2, 2), (0, 1), (2, 2), (4, 3))
    assert move.start(7) == (2, 1)
    assert move.start(8) is None
    assert move.start(10) is None


def test_layers_and_experts_share_moves():
    """Only where they begin differs, so that one program makes them all."""
    names = [f"{layer}.{expert}.{part}" for layer in range(3) for expert in range(4) for part in "ab"]
    tensors = {name: number * 100 + np.arange(48, dtype=I4).reshape(8, 6) for number, name in enumerate(names)}
    layers = []
    for layer in range(3):
        experts = [
            View.concatenate([View.tensor(f"{layer}.{expert}.{part}", (8, 6), I4).T for part in "ab"], axis=1)
            for expert in range(4)
        ]
        layers.append(View.stack(experts))
    view = View.stack(layers, axis=1)
    array, moves = moved(view, Box.whole(view.shape), view.shape, tensors)
    assert set(moves) == {Move((8, 6), (1, 0), (1, 1, 6, 8), (4, 3, 6, 16))}
    assert array[2, 1, 3, 11] == tensors["1.2.b"].T[3, 3]


def test_padding_is_left_alone():
    tensor = np.arange(12, dtype=I4).reshape(3, 4)
    view = View.tensor("a", (3, 4), I4).T.pad((5, 8))
    cuts = view.cuts(Box.whole((5, 8)), (5, 8))
    (move,) = [move_of(cut.copy, (5, 8)) for cut in cuts if cut.tensor is not None]
    array = np.zeros((5, 8), I4)
    make(move, 0, tensor, array)
    np.testing.assert_array_equal(array, np.pad(tensor.T, [(0, 1), (0, 5)]))
