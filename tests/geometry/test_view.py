"""Views against NumPy: the same words give the same array."""

import re

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from orbax_safetensors.errors import MappingError
from orbax_safetensors.geometry.strided import row_major
from orbax_safetensors.geometry.view import VIEW_OPERATIONS, View
from tests.support.strategies import examples
from tests.support.views import boxes, compositions, run, run_backwards

F4 = np.dtype("f4")


@examples(300)
@given(st.data())
def test_any_composition_is_numpys_array(data):
    made = data.draw(compositions())
    event("a reshape was refused" if made.refused else "no reshape was refused")
    assert made.view.shape == made.array.shape
    box = data.draw(boxes(made.array.shape))
    shape = [stop - start for start, stop in box]
    out = np.full(shape, -1, np.int32)
    copies = made.view.copies(box, shape)
    run(copies, made.stored, out)
    assert sum(copy.elements for _, copy, _ in copies) == out.size
    np.testing.assert_array_equal(out, made.array[tuple(slice(*ends) for ends in box)])


@examples(200)
@given(st.data())
def test_a_box_fills_only_the_corner_of_a_larger_destination(data):
    made = data.draw(compositions())
    box = data.draw(boxes(made.array.shape))
    own = [stop - start for start, stop in box]
    shape = [size + data.draw(st.integers(0, 3)) for size in own]
    out = np.full(shape, -1, np.int32)
    run(made.view.copies(box, shape), made.stored, out)
    expected = np.full(shape, -1, np.int32)
    expected[tuple(slice(size) for size in own)] = made.array[tuple(slice(*ends) for ends in box)]
    np.testing.assert_array_equal(out, expected)


@examples(200)
@given(compositions())
def test_reversed_copies_give_the_sources_back(made):
    whole = tuple((0, size) for size in made.array.shape)
    emptied = {name: np.full_like(array, -1) for name, array in made.stored.items()}
    run_backwards(made.view.copies(whole, made.array.shape), emptied, np.ascontiguousarray(made.array))
    for name, array in made.stored.items():
        used = np.isin(array, made.array)
        np.testing.assert_array_equal(emptied[name], np.where(used, array, -1))


def test_copies_are_few():
    """The query kernel of an 80-layer model, RoPE-permuted, split into heads and stacked: one copy for each layer."""
    layers, heads, head, width = 80, 64, 128, 8192
    query = [
        View.tensor(f"layers.{at}.q", (heads * head, width), F4)
        .transpose()
        .reshape((width, heads, 2, head // 2))
        .transpose((0, 1, 3, 2))
        .reshape((width, heads, head))
        for at in range(layers)
    ]
    stacked = View.stack(query, axis=1)
    assert stacked.shape == (width, layers, heads, head)
    shard = ((0, width), (0, layers), (8, 16), (0, head))
    assert len(stacked.copies(shard, (width, layers, 8, head))) == layers


def test_a_merge_across_an_inner_seam_has_a_piece_for_each_row():
    parts = [View.tensor(name, (3, 2), F4) for name in "ab"]
    flat = View.concatenate(parts, axis=1).reshape((12,))
    assert [(piece.tensor, piece.start) for piece in sorted(flat.pieces, key=lambda piece: piece.start)] == [
        ("a", (0,)), ("b", (2,)), ("a", (4,)), ("b", (6,)), ("a", (8,)), ("b", (10,)),
    ]  # fmt: skip


def test_reshape_that_is_not_affine_names_view_and_step():
    view = View.tensor("model.w", (4, 6), F4).transpose()
    with pytest.raises(
        MappingError, match=r"view \(6, 4\) of \['model.w'\]: reshape to \(8, 3\) is not affine in 'mod"
    ):
        view.reshape((8, 3))


def test_reshape_infers_one_size():
    assert View.tensor("w", (4, 6), F4).reshape((3, -1)).shape == (3, 8)
    assert View.tensor("w", (4, 0), F4).reshape((2, -1)).shape == (2, 0)


@pytest.mark.parametrize("shape", [(5, 5), (-1, -1), (-1, 7), (24, 0), (-2, -12), (0, -1)])
def test_reshape_that_does_not_fit(shape):
    with pytest.raises(MappingError, match="24 elements cannot be reshaped"):
        View.tensor("w", (4, 6), F4).reshape(shape)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda w: w.transpose((0, 0)), "not a permutation"),
        (lambda w: w.transpose((0,)), "not a permutation"),
        (lambda w: w.slice(slice(None, None, -1)), "must be positive"),
        (lambda w: w.slice(*[slice(None)] * 3), "3 slices for 2 dimensions"),
        (lambda w: View.stack([]), "stack: expected one view or more, found none"),
        (lambda w: View.concatenate([]), "concatenate: expected one view or more, found none"),
        (lambda w: View.stack([w, w.transpose()]), "stack: view"),
        (lambda w: View.stack([w], axis=3), "axis 3 is out of range"),
        (lambda w: View.concatenate([w], axis=-3), "axis -3 is out of range"),
        (lambda w: View.concatenate([w, w.transpose()]), "concatenate: view"),
        (lambda w: View.concatenate([w, View.tensor("v", (4, 6), np.dtype("i4"))]), "concatenate: view"),
        (lambda w: View.concatenate([View.tensor("s", (), F4)]), "axis 0 is out of range"),
    ],
)
def test_what_numpy_cannot_do_is_refused(build, message):
    with pytest.raises(MappingError, match=message):
        build(View.tensor("w", (4, 6), F4))


def test_row_major_strides():
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major(()) == ()


def arrays():
    """A view and the array that it stands for."""
    return View.tensor("a", (4, 1, 6), F4), np.arange(24, dtype=np.int32).reshape(4, 1, 6)


@pytest.mark.parametrize(
    "function",
    [
        np.transpose,
        lambda x: np.transpose(x, axes=(0, 2, 1)),
        lambda x: np.reshape(np.transpose(x), [6, 2, -1]),
        np.squeeze,
        lambda x: np.squeeze(x, axis=1),
        lambda x: np.squeeze(x[:1, :, :1], axis=(0, -1)),
        lambda x: np.stack([x[0], x[3]], axis=1),
        lambda x: np.concatenate([x[2:], x[:2]], axis=-1),
        lambda x: x[:, 0],
        lambda x: x[-1],
        lambda x: x[-2, :, 1::2],
        lambda x: x[1:3][1, 0, 5],
    ],
)
def test_functions_of_numpy_take_views(function):
    view, array = arrays()
    expected = function(array)
    result = function(view)
    assert isinstance(result, View)
    assert result.shape == expected.shape
    out = np.full(result.shape, -1, np.int32)
    run(result.copies(tuple((0, size) for size in result.shape), result.shape), {"a": array}, out)
    np.testing.assert_array_equal(out, expected)


def test_functions_and_indexes_that_views_lack_are_errors():
    view, array = arrays()
    for function in (np.flip, np.sum, lambda x: np.reshape(x, (24,), order="F")):
        with pytest.raises(TypeError):
            function(view)
    for index in (4, (0, 1), (-5,)):
        for either in (view, array):
            with pytest.raises(IndexError):
                either[index]
    for index in (None, ..., [0, 1], np.array([True] * 4)):
        with pytest.raises(MappingError, match="expected slices and integers"):
            view[index]
    with pytest.raises(MappingError, match="not all of size 1"):
        np.squeeze(view, axis=0)
    assert [row.shape for row in view] == [row.shape for row in array]


def test_a_view_has_what_an_error_says_that_views_have():
    names = re.findall(r"\.(\w+)", VIEW_OPERATIONS.partition(", and ")[0])
    assert len(names) > 5
    assert all(hasattr(View, name) for name in names)
