"""Decodes boxes of quantised tensors as a program on a device does, from exactly the bytes that are read for them."""

import functools

import jax
import numpy as np

from orbax_safetensors.devices.decoding import decoded
from orbax_safetensors.geometry.encoding import Role
from tests.support.quantized import as_bytes, box_of, read

_LEAST = np.finfo(np.float32).smallest_normal
# The code that means 1, and what its scale is multiplied by: with them, a decoder returns scales.
_ONES = {"F8_E4M3": (0x38, 1), "F4": (0x22, 1), "doubled F4": (0x22, 2)}


@functools.lru_cache(maxsize=2**12)
def _program(decoding):
    return jax.jit(functools.partial(decoded, decoding))


def on_device(encoding, decoding, runs, codes, parameters):
    """Elements in the order of their codes; `parameters` are all those of the encoding."""
    roles = {spread.parameter.role for spread in decoding.parameters}
    stored = [each for each, of in zip(parameters, encoding.parameters, strict=True) if of.role in roles]
    arrays = []
    for (shape, dtype), taken, data in zip(decoding.inputs, runs, [codes, *stored], strict=True):
        arrays.append(read(as_bytes(data), list(taken.pieces(0, taken.nbytes))).view(dtype).reshape(shape))
    with jax.enable_x64(True):
        elements = np.asarray(_program(decoding)(arrays))
    assert elements.dtype == np.float32
    assert elements.shape == (decoding.rows, decoding.width)
    return elements.reshape(-1)


def on_host(encoding, codes, parameters):
    """All elements in the order of their codes, as NumPy decodes them, and which of them have subnormal scales."""
    box = tuple((0, size) for size in encoding.shape)
    elements = box_of(encoding, codes, parameters, box).reshape(-1)
    if encoding.values not in _ONES or encoding.parameters[0].role is not Role.SCALE:
        return elements, np.zeros(elements.shape, bool)
    one, times = _ONES[encoding.values]
    scales = box_of(encoding, np.full(as_bytes(codes).shape, one, np.uint8), parameters, box).reshape(-1) / times
    return elements, is_subnormal(scales)


def is_subnormal(array):
    return (array != 0) & (np.abs(array) < _LEAST)


def assert_same(found, expected, has_subnormal_scale):
    """Equal bits, and NaN for NaN. XLA on CPUs sets subnormal operands and results to zero: return how many these are.

    What is rounded to bfloat16 is equal then as well.
    """
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    flushed = ~same & (has_subnormal_scale | is_subnormal(expected)) & (found == 0)
    flushed &= np.signbit(found) == np.signbit(expected)
    wrong = np.flatnonzero(~same & ~flushed)
    assert not wrong.size, (wrong[:9], found[wrong[:9]], expected[wrong[:9]])
    return int(flushed.sum())
