"""Decodes boxes of quantised tensors as a program on a device does, from exactly the bytes that are read for them."""

import functools
from dataclasses import replace

import jax
import numpy as np
from hypothesis import strategies as st

from orbax_safetensors.devices.decoding import decoded
from orbax_safetensors.geometry.encoding import Order, Role
from orbax_safetensors.geometry.view import View
from tests.support.quantized import as_bytes, box_of, read

_LEAST = np.finfo(np.float32).smallest_normal
_ONE = 0x38  # as a code of F8_E4M3


@functools.lru_cache(maxsize=2**12)
def _program(decoding):
    return jax.jit(functools.partial(decoded, decoding))


def on_device(encoding, decoding, runs, codes, parameters):
    """Elements in the order of their codes; `parameters` are all those of the encoding."""
    with jax.enable_x64(True):
        elements = np.asarray(_program(decoding)(packed_inputs(encoding, decoding, runs, codes, parameters)))
    assert elements.dtype == np.float32
    assert elements.shape == (decoding.rows, decoding.width)
    return elements.reshape(-1)


def packed_inputs(encoding, decoding, runs, codes, parameters):
    """The arrays of `decoding.inputs`, of the bytes that are read for them."""
    roles = {spread.parameter.role for spread in decoding.parameters}
    stored = [each for each, of in zip(parameters, encoding.parameters, strict=True) if of.role in roles]
    arrays = []
    for (shape, dtype), taken, data in zip(decoding.inputs, runs, [codes, *stored], strict=True):
        arrays.append(read(as_bytes(data), list(taken.pieces(0, taken.nbytes))).view(dtype).reshape(shape))
    return arrays


def on_host(encoding, codes, parameters):
    """All elements in the order of their codes, as NumPy decodes them, and which of them have subnormal scales."""
    box = tuple((0, size) for size in encoding.shape)
    elements = box_of(encoding, codes, parameters, box).reshape(-1)
    scale, second = [], False
    for parameter, stored in zip(encoding.parameters, parameters, strict=True):
        if parameter.role in (Role.SCALE, Role.FACTOR, Role.DIVISOR):
            scale.append((parameter, stored))
        if parameter.role is Role.FACTOR:
            second = is_subnormal(as_bytes(stored).view(np.float32)).any()
    kinds, stored = zip(*scale, strict=True)
    ones = replace(encoding, bits=8, values="F8_E4M3", order=Order.LOW_FIRST, rows_in_word=1, parameters=kinds, final=1)
    scales = box_of(ones, np.full(elements.size, _ONE, np.uint8), stored, box).reshape(-1)
    if encoding.values == "doubled F4":
        scales = scales.astype(np.float64) / 2
    return elements, is_subnormal(scales) | second


def is_subnormal(array):
    return (array != 0) & (np.abs(array) < _LEAST)


def assert_same(found, expected, has_subnormal_scale):
    """Equal bits, and NaN for NaN; what is rounded to bfloat16 is equal then as well.

    XLA on CPUs sets subnormal operands and results to zero, so elements with one of these may be zero.
    """
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    flushed = ~same & (has_subnormal_scale | is_subnormal(expected)) & (found == 0)
    flushed &= np.signbit(found) == np.signbit(expected)
    wrong = np.flatnonzero(~same & ~flushed)
    assert not wrong.size, (wrong[:9], found[wrong[:9]], expected[wrong[:9]])


@st.composite
def copies_of_codes(draw, encoding):
    """The copy of a box of a tensor in the order of its codes: rows in steps of steps, and columns in whole words."""
    *leading, rows, columns = encoding.shape
    begin = draw(st.integers(0, columns // encoding.word - 1))
    end = draw(st.integers(begin + 1, columns // encoding.word))
    taken = [*[draw(_some(size)) for size in leading], draw(_some(rows))]
    view = view_of(encoding).slice(*taken, slice(begin * encoding.word, end * encoding.word))
    *leading, rows, columns = view.shape
    inner = draw(st.sampled_from([size for size in range(1, rows + 1) if rows % size == 0]))
    view = view.reshape((*leading, rows // inner, inner, columns))
    return copy_of(view.slice(*[slice(0, size) for size in leading], draw(_some(rows // inner)), draw(_some(inner))))


@st.composite
def _some(draw, size):
    start = draw(st.just(0) | st.integers(0, size - 1))
    return slice(start, draw(st.just(size) | st.integers(start + 1, size)), draw(st.sampled_from([1, 1, 1, 2, 3])))


def view_of(encoding):
    return View.tensor("t", encoding.shape, np.dtype(np.float32))


def copy_of(view):
    """The copy of a view that transposes it."""
    view = view.transpose()
    (cut,) = view.cuts(tuple((0, size) for size in view.shape), view.shape)
    return cut.copy
