"""The numbers that codes and scales stand for, one by one, in Python's arithmetic."""

import math

import ml_dtypes
import numpy as np
import pytest

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry.encoding import Area, Encoding, Parameter, Role
from orbax_safetensors.transfer.decode import _CHUNK, decode
from tests.support.quantized import as_bytes, scaled

F32, BF16_STORED, U8, I32 = (DTYPES[name] for name in ("F32", "BF16", "U8", "I32"))
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


def decoded(encoding, codes, *parameters, dtype=np.float32, rows=None, columns=None):
    """Some rows and stretches of columns, decoded from exactly what is to be read for them."""
    every, width = math.prod(encoding.shape[:-1]), encoding.shape[-1]
    area = Area(np.arange(every) if rows is None else rows, columns or ((0, width),))
    matrix = as_bytes(codes).reshape(every, -1)
    parts = [matrix[area.rows, encoding.bytes_of(begin) : encoding.bytes_of(end)] for begin, end in area.columns]
    held = []
    for parameter, stored in zip(encoding.parameters, map(as_bytes, parameters), strict=True):
        patch = encoding.patch(parameter, [area], 0)
        held.append((patch, np.concatenate([stored[begin : begin + nbytes] for begin, nbytes in patch.ranges])))
    out = np.empty((len(area.rows), area.width), dtype)
    decode(encoding, area, np.concatenate(parts, axis=1).reshape(-1), held, out.reshape(-1))
    return out


def fp8(shape, block):
    return scaled(shape, 8, "F8_E4M3", F32, block)


@pytest.mark.parametrize("length", [256, 1024])  # without and with tables
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_every_fp8_code_with_scales_of_every_size(dtype, length):
    scales = np.array(
        [0.0, -0.0, 1.0, -1.5, 1 / 3, 1e-45, 2.0**-126, 3.0e-38, 7.6e35, 3.4e38, np.inf, -np.inf, np.nan], np.float32
    )
    codes = np.tile(np.arange(256, dtype=np.uint8), scales.size * length // 256)
    out = decoded(fp8((scales.size, length), (1, length)), codes, scales, dtype=dtype)
    with np.errstate(all="ignore"):
        row = np.array([e4m3(code) for code in range(256)] * (length // 256))
        expected = row * scales.astype(np.float64)[:, None]
    assert_same_numbers(out, rounded(expected, dtype))


@pytest.mark.parametrize("repeated", [1, 64])  # without and with tables of all scales
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_every_mxfp4_code_with_every_scale(dtype, repeated):
    """Halves of a byte, the low one first; 255 is an exponent as all others, though it overflows for most codes."""
    scales = np.tile(np.arange(256, dtype=np.uint8), repeated)
    codes = np.tile((np.arange(16) | np.arange(16)[::-1] << 4).astype(np.uint8), scales.size)
    out = decoded(scaled((scales.size, 32), 4, "doubled F4", U8, (1, 32)), codes, scales, dtype=dtype)
    each = [e2m1(code) for pair in zip(range(16), range(15, -1, -1), strict=True) for code in pair]
    expected = np.array(each) * np.ldexp(1.0, scales.astype(int) - 127)[:, None]
    assert_same_numbers(out, rounded(expected, dtype))


@pytest.mark.parametrize("different", [8, 2**16])  # with tables of all scales, and of none: there are too many
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_every_int4_code_with_scales_of_16_bits(dtype, different):
    """In two calls, of which the second meets scales that the first has made tables for."""
    step = 2**16 // different
    scales = np.repeat(np.arange(0, 2**16, step), step if different == 8 else 1).astype(np.uint16)
    codes = np.tile(np.arange(16, dtype=np.uint8) | np.arange(16, dtype=np.uint8)[::-1] << 4, len(scales))
    values = np.tile(np.stack([np.arange(16), np.arange(16)[::-1]], -1).reshape(-1) - 8, (len(scales), 1))
    encoding = scaled((len(scales), 32), 4, "offset4", BF16_STORED, (1, 32))
    with np.errstate(all="ignore"):
        expected = values * scales.view(BF16).astype(np.float64)[:, None]
    for _ in range(2):
        assert_same_numbers(decoded(encoding, codes, scales, dtype=dtype), rounded(expected, dtype))


@pytest.mark.parametrize("width", [1, 7, 16, 100, 9_999, _CHUNK, 2 * _CHUNK + 1])
def test_areas_of_rows_of_all_lengths_in_several_chunks(width):
    """Rows that chunks cut into groups of rows, one that is longer than a chunk, blocks of any width."""
    rng = np.random.default_rng(0)
    height = max(2 * _CHUNK // width, 1) + 1
    codes = rng.integers(0, 0x7F, (height, width), np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for block in ((1, width), (height, width), (3, 5), (2, 20), (height, 1)):
        scales = rng.random((-(-height // block[0]), -(-width // block[1])), np.float32)
        each = scales.repeat(block[0], 0)[:height].repeat(block[1], 1)[:, :width]
        for dtype in (np.float32, BF16):
            out = decoded(fp8((height, width), block), codes, scales, dtype=dtype)
            assert out.tobytes() == (values * each).astype(dtype).tobytes()


@pytest.mark.parametrize(("length", "dtype"), [(1, BF16), (255, np.float32), (256, BF16), (300, np.float32)])
def test_scales_of_few_elements(dtype, length):
    """With and without tables; more tables than an index of 16 bits finds; some scales decode nothing."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (600, length), np.uint8)
    scales = rng.random(600, np.float32)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales[:, None]
    for rows in (np.arange(600), np.arange(300) * 2):
        out = decoded(fp8((600, length), (1, length)), codes, scales, dtype=dtype, rows=rows)
        assert_same_numbers(out, values[rows].astype(dtype))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([0, 1, 2], ((3, 50), (60, 61))),
        ([5], ((0, 10), (20, 30))),
        ([1, 4, 7, 8, 29], ((0, 5), (95, 100))),
        (list(range(30)), ((41, 49),)),
    ],
)
def test_stretches_of_some_rows(rows, columns):
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 0x7F, (30, 100), np.uint8), rng.random((8, 10), np.float32)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    wanted = values * scales.repeat(4, 0)[:30].repeat(10, 1)
    out = decoded(fp8((30, 100), (4, 10)), codes, scales, rows=np.array(rows), columns=columns)
    np.testing.assert_array_equal(out, np.concatenate([wanted[rows, begin:end] for begin, end in columns], axis=1))


def test_bytes_may_lie_anywhere_in_a_buffer():
    """As where scales follow codes of any number in one buffer."""
    buffer = np.arange(64, dtype=np.uint8)
    buffer[3:11] = np.array([0.5, 2], np.float32).view(np.uint8)
    out = np.empty(9 + 1, np.float32)[1:]
    encoding = fp8((3, 3), (2, 3))
    area = Area(np.arange(3), ((0, 3),))
    patch = encoding.patch(encoding.parameters[0], [area], 0)
    decode(encoding, area, buffer[21:30], [(patch, buffer[3:11])], out)
    assert out.tolist() == [e4m3(code) * (0.5 if code < 27 else 2) for code in range(21, 30)]


def grouped(index):
    """A matrix of 2 x 8 codes of 4 bits, whose columns are in the groups that an index names; all codes are 9."""
    encoding = Encoding(
        (2, 8),
        4,
        "offset4",
        (Parameter(Role.SCALE, F32, (2, 2), (1, 0)), Parameter(Role.GROUP, I32, (1, 8), (2, 1))),
    )
    codes, scales = np.full((2, 4), 0x99, np.uint8), np.array([[1, 2], [3, 4]], np.float32)
    return decoded(encoding, codes, scales, np.array(index, np.int32))


def test_a_group_index_selects_the_scales_of_columns():
    index = [0, 1, 1, 0, 0, 0, 1, 1]
    assert grouped(index).tolist() == [[1 + group for group in index], [3 + group for group in index]]


@pytest.mark.parametrize("index", [[0, 1, 1, 0, 0, 0, 1, 2], [-1, 1, 1, 0, 0, 0, 1, 1], [2**31 - 1] * 8, [-2] * 8])
def test_a_group_that_there_is_not_is_an_error(index):
    with pytest.raises(TensorMismatchError, match=f"group index has {min(index)} to {max(index)}, expected 0 to 1"):
        grouped(index)
