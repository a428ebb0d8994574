"""Strided copies and conversions against NumPy's own assignment, on whole buffers."""

import itertools
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.elementwise import Cast, Offset, Scale, apply, undo
from orbax_safetensors.transfer import strided_copy
from orbax_safetensors.transfer.strided_copy import assign, copy_applying, copy_undoing

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float32), BF16, np.dtype(np.float16), np.dtype(np.float64), np.dtype(">f4")]
NUMBERS = [*FLOATS, np.dtype(np.int8), np.dtype(np.uint16), np.dtype(np.bool_), np.dtype(ml_dtypes.float8_e5m2)]
WORDS = [np.dtype(name) for name in ("u1", "u2", "u4", "u8")]


@st.composite
def small_constants(draw):
    """With these, arrays of a hundred elements pass everything that large ones do."""
    lines = draw(st.integers(1, 8))
    return {
        "_SMALL": draw(st.integers(1, 20)),
        "_SHORT": draw(st.integers(2, 4)),
        "_LINES": lines,
        "_PIECE_BYTES": draw(st.integers(16 * lines, 64 * lines)),
        "_COMPUTED": draw(st.integers(1, 100)),
    }


shapes = st.one_of(
    st.lists(st.integers(0, 4), max_size=6),
    st.lists(st.integers(5, 40), min_size=2, max_size=2),
    st.lists(st.integers(2, 12), min_size=3, max_size=4).filter(lambda shape: np.prod(shape) <= 2000),
)
ops_lists = st.lists(
    st.builds(Scale, st.sampled_from([0.5, -3.0, 1 / 3, 1e30]))
    | st.builds(Offset, st.sampled_from([1.0, -0.1]))
    | st.builds(Cast, st.sampled_from(FLOATS[:3])),
    max_size=3,
).map(tuple)


@st.composite
def views(draw, shape, dtype):
    """An array of `shape` with its dimensions in any order in memory, and gaps; and the buffer that it is a view of."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    firsts = [draw(st.integers(0, 2)) for _ in shape]
    lengths = [first + size * step for first, size, step in zip(firsts, shape, steps, strict=True)]
    seed = draw(st.integers(0, 2**32 - 1))
    nbytes = int(np.prod(lengths)) * dtype.itemsize
    buffer = np.frombuffer(bytearray(np.random.default_rng(seed).bytes(nbytes)), np.uint8)
    if dtype == np.bool_:
        buffer &= 1
    array = np.ndarray([lengths[axis] for axis in order], dtype, buffer.data).transpose(np.argsort(order))
    for axis, (first, size, step) in enumerate(zip(firsts, shape, steps, strict=True)):
        array = array[(slice(None),) * axis + (slice(first, first + size * step, step), ...)]
    return array, buffer


@st.composite
def pairs(draw, dtypes):
    """Two views of one shape, each with its buffer, and their dtypes drawn from `dtypes`."""
    shape = draw(shapes)
    return draw(dtypes.flatmap(lambda both: st.tuples(*(views(shape, dtype) for dtype in both))))


two_dtypes = st.tuples(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS))


def like(view, buffer):
    """A copy of `buffer`, and the same view of it."""
    copied = buffer.copy()
    offset = view.__array_interface__["data"][0] - buffer.__array_interface__["data"][0] if view.size else 0
    return np.ndarray(view.shape, view.dtype, copied.data, offset, view.strides) if view.size else view, copied


@given(pairs(st.sampled_from(WORDS).map(lambda dtype: (dtype, dtype))), small_constants())
def test_assign(pair, constants):
    (source, _), (destination, buffer) = pair
    expected, whole = like(destination, buffer)
    expected[...] = source
    with mock.patch.multiple(strided_copy, **constants):
        assign(destination, source)
    assert buffer.tobytes() == whole.tobytes()


@given(pairs(two_dtypes), ops_lists, small_constants())
def test_copy_applying(pair, ops, constants):
    (source, _), (destination, buffer) = pair
    expected, whole = like(destination, buffer)
    with np.errstate(all="ignore"):
        np.copyto(expected, apply(ops, source) if ops else source, casting="unsafe")
    with mock.patch.multiple(strided_copy, **constants):
        copy_applying(source, destination, ops, lossless=False)
    assert buffer.tobytes() == whole.tobytes()


@given(pairs(two_dtypes), ops_lists, small_constants())
def test_revert(pair, ops, constants):
    (source, _), (destination, buffer) = pair
    expected, whole = like(destination, buffer)
    with np.errstate(all="ignore"):
        np.copyto(expected, undo(ops, source) if ops else source, casting="unsafe")
    with mock.patch.multiple(strided_copy, **constants):
        copy_undoing(source, destination, ops)
    assert buffer.tobytes() == whole.tobytes()


@given(st.sampled_from([*FLOATS, np.dtype(np.complex64), np.dtype(np.complex128)]), st.data())
def test_bits_without_ops(dtype, data):
    """A signalling NaN and -0.0 stay what they are where there is nothing to compute."""
    (source, _), (destination, _) = data.draw(pairs(st.just((dtype, dtype))))
    with mock.patch.multiple(strided_copy, **data.draw(small_constants())):
        copy_applying(source, destination, (), lossless=True)
    assert destination.tobytes() == source.tobytes()


@pytest.mark.parametrize(
    ("stored", "held", "fitting", "too_much"),
    [
        (np.float32, np.float16, [65519.0, -np.inf, np.nan], 65520.0),
        (np.float64, BF16, [3.3e38, np.inf], -3.4e38),
        (np.float64, ">f4", [3.4028235e38, -0.0], 3.5e38),
        (np.float32, ml_dtypes.float8_e4m3fn, [448.0], 1000.0),
        (np.float32, np.int8, [127.9, -128.5], 128.0),
        (np.int32, np.int8, [127, -128], -129),
        (np.int32, np.uint8, [0, 255], -1),
        (np.float32, np.int32, [0.5], np.nan),
    ],
    ids=str,
)
def test_lossless(stored, held, fitting, too_much):
    for order, ops in itertools.product("CF", [(), (Scale(1.0),)]):
        source = np.resize(np.array(fitting, stored), (150, 90))
        destination = np.zeros((150, 90), held, order)
        copy_applying(source, destination, ops, lossless=True)
        source[149, 89] = too_much
        copy_applying(source, destination, ops, lossless=False)
        with pytest.raises(TensorMismatchError, match=rf"of \w+ does not fit {np.dtype(held)}"):
            copy_applying(source, destination, ops, lossless=True)


@pytest.mark.parametrize(
    ("dtype", "shape", "order"),
    [
        *((dtype, (1000, 1999), (1, 0)) for dtype in WORDS),
        ("u1", (17, 3, 1000), (2, 0, 1)),
        ("u2", (5, 20, 300, 9), (3, 1, 2, 0)),
        ("u4", (300, 300, 2), (1, 0, 2)),
        ("u8", (2, 300, 300), (1, 2, 0)),
        ("u2", (40000, 3), (1, 0)),
    ],
    ids=str,
)
def test_large(dtype, shape, order):
    source = np.random.default_rng(0).integers(0, 2**8, shape).astype(dtype)
    stacked = np.zeros([*(shape[axis] for axis in order[:-1]), 3, shape[order[-1]]], dtype)
    assign(stacked[..., 1, :].transpose(np.argsort(order)), source)
    assert np.array_equal(stacked[..., 1, :], source.transpose(order))
    assert not stacked[..., ::2, :].any()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)], ids=str)
def test_innermost_axes_agree(order):
    """What the constants promise: no piece is large, and between its ends NumPy has nothing to transpose."""
    source = np.zeros((100, 200, 300), np.uint16)
    destination = np.zeros([source.shape[axis] for axis in order], np.uint16).transpose(np.argsort(order))
    pieces = list(strided_copy._pieces(source, destination))
    assert sum(piece.size for piece, _, _ in pieces) == source.size
    for piece, into, reorders in pieces:
        assert piece.shape == into.shape
        assert piece.nbytes <= strided_copy._PIECE_BYTES
        assert reorders == (np.argmin(piece.strides) != np.argmin(into.strides))
        if reorders:
            assert np.argmin(piece.strides) == piece.ndim - 1
