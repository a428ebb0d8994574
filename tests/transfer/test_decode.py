"""The numbers that codes and scales stand for, one by one, in Python's arithmetic."""

import math

import ml_dtypes
import numpy as np
import pytest

from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry.encoding import Encoding, Segments
from orbax_safetensors.transfer.decode import _CHUNK, decode

F8, F4, F32, U8 = (DTYPES[name] for name in ("F8_E4M3", "F4", "F32", "U8"))
BF16 = np.dtype(ml_dtypes.bfloat16)


def e4m3(code):
    """Sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa; all ones are NaN."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9))


def e2m1(code):
    """Sign, 2 bits of exponent with a bias of 1, 1 bit of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (math.ldexp(2 + mantissa, exponent - 2) if exponent else mantissa / 2)


def rounded(values, dtype):
    """To float32 and from there to `dtype`. The values are exact in float64."""
    with np.errstate(all="ignore"):
        return np.asarray(values, np.float64).astype(np.float32).astype(dtype)


def assert_same_numbers(found, expected):
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    same = found.view(f"u{found.itemsize}") == expected.view(f"u{found.itemsize}")
    assert (same | np.isnan(expected)).all()


@pytest.mark.parametrize("length", [256, 1024])  # without and with tables
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_every_fp8_code_with_scales_of_every_size(dtype, length):
    scales = np.array(
        [0.0, -0.0, 1.0, -1.5, 1 / 3, 1e-45, 2.0**-126, 3.0e-38, 7.6e35, 3.4e38, np.inf, -np.inf, np.nan], np.float32
    )
    encoding = Encoding((scales.size, length), (1, length), F8, F32)
    codes = np.tile(np.arange(256, dtype=np.uint8), scales.size * length // 256)
    out = np.empty(codes.size, dtype)
    decode(encoding, Segments(np.full(scales.size, length), np.arange(scales.size)), codes, scales.view(np.uint8), out)
    with np.errstate(all="ignore"):
        row = np.array([e4m3(code) for code in range(256)] * (length // 256))
        expected = row * scales.astype(np.float64)[:, None]
    assert_same_numbers(out, rounded(expected, dtype).reshape(-1))


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_every_mxfp4_code_with_every_scale(dtype):
    """Halves of a byte, the low one first; 255 is an exponent as all others, though it overflows for most codes."""
    scales = np.arange(256, dtype=np.uint8)
    codes = np.tile((np.arange(16) | np.arange(16)[::-1] << 4).astype(np.uint8), 256)
    out = np.empty(256 * 32, dtype)
    decode(Encoding((256, 32), (1, 32), F4, U8), Segments(np.full(256, 32), np.arange(256)), codes, scales, out)
    each = [e2m1(code) for pair in zip(range(16), range(15, -1, -1), strict=True) for code in pair]
    expected = np.array(each) * np.ldexp(1.0, np.arange(256) - 127)[:, None]
    assert_same_numbers(out, rounded(expected, dtype).reshape(-1))


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("odd", [0, 1])
def test_segments_of_all_lengths_in_several_chunks(dtype, odd):
    """Segments that the ends of chunks cut, one that is longer, and elements not even in number."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(1, 9_999, 100), [2 * _CHUNK + 1, 1], rng.integers(1, 9_999, 50)])
    lengths[-1] += (lengths.sum() + odd) % 2
    codes = rng.integers(0, 0x7F, lengths.sum(), np.uint8)
    scales = rng.random(32, np.float32)
    which = rng.integers(0, scales.size, lengths.size)
    out = np.empty(codes.size, dtype)
    encoding = Encoding((1, codes.size), (1, codes.size), F8, F32)  # its block does not matter here
    decode(encoding, Segments(lengths, which), codes, scales.view(np.uint8), out)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales[which].repeat(lengths)
    assert out.tobytes() == values.astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("length", [1, 255, 256, 300])
def test_scales_of_few_elements(dtype, length):
    """With and without tables; more tables than an index of 16 bits finds; some scales decode nothing."""
    rng = np.random.default_rng(0)
    which = np.arange(300) * 2
    codes = rng.integers(0, 256, which.size * length, np.uint8)
    scales = rng.random(which.size * 2, np.float32)
    for kept in (scales, scales[::2].copy()):
        numbers = which // (2 if kept.size == which.size else 1)
        out = np.empty(codes.size, dtype)
        encoding = Encoding((which.size, length), (1, length), F8, F32)
        decode(encoding, Segments(np.full(which.size, length), numbers), codes, kept.view(np.uint8), out)
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * kept[numbers].repeat(length)
        assert_same_numbers(out, values.astype(dtype))


def test_bytes_may_lie_anywhere_in_a_buffer():
    """As where scales follow codes of any number in one buffer."""
    buffer = np.arange(64, dtype=np.uint8)
    buffer[3:11] = np.array([0.5, 2], np.float32).view(np.uint8)
    out = np.empty(9 + 1, np.float32)[1:]
    encoding = Encoding((3, 3), (2, 3), F8, F32)
    decode(encoding, Segments(np.array([3, 3, 3]), np.array([0, 0, 1])), buffer[21:30], buffer[3:11], out)
    assert out.tolist() == [e4m3(code) * (0.5 if code < 27 else 2) for code in range(21, 30)]
