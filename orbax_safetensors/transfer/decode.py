"""Decodes quantised tensors with NumPy: looks each byte of codes up in a table of its scale.

A table has the result for every byte, so nothing is computed for each element. The arithmetic of tables is float32, as
in the programs that models are published with, so the results have the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import ml_dtypes
import numpy as np

from orbax_safetensors.format.dtypes import DType
from orbax_safetensors.geometry.encoding import Encoding, Segments

# Bytes of codes that are looked up at a time: NumPy takes eight bytes for the index of each, which should stay in a
# core's cache. With fewer bytes, threads wait for one another between the steps.
_CHUNK = 2**16

_BYTES = np.arange(256, dtype=np.uint8)
_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
_HALVES = np.concatenate([_HALVES, -_HALVES])
# For every byte, the values of its codes without a scale; the code in the lower bits is the first.
_VALUES = {
    "F8_E4M3": _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None],
    "F4": _HALVES[np.stack([_BYTES & 15, _BYTES >> 4], axis=-1)],
}
# The factors of U8 scales for `_HALVES`. Each is a number, even for 255, which is NaN in the OCP specification and
# 2**128 in the decoders that programs use.
_POWERS = np.ldexp(np.float32(1), _BYTES.astype(np.int32) - 128)


def decode(encoding: Encoding, segments: Segments, codes: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Decode elements into `out`, one-dimensional, as float32 or rounded from it to bfloat16.

    `codes` are the bytes of exactly these elements, `scales` are bytes of scales, and `segments` has the position in
    them of each element's scale; both are one-dimensional uint8. The interpreter lock is free most of the time.
    """
    values, lengths = _VALUES[encoding.codes.name], segments.lengths // encoding.elements_per_byte
    if encoding.scales.name == "U8":
        tables, numbers = _power_tables(encoding.codes.name, out.dtype), scales[segments.scales]
    else:
        factors, numbers = _factors(encoding.scales, scales), segments.scales
        if 2 * factors.size * len(values) > codes.size:  # tables would take longer to make than to use
            _multiply_each(values, codes, factors[numbers], lengths, out)
            return
        tables = _tables(values, factors, out.dtype)
    begins = numbers.astype(np.min_scalar_type(tables.size - 1)) << 8  # of the table of each segment
    index = codes.astype(begins.dtype)
    if (lengths == lengths[0]).all():  # to repeat `begins` would hold the lock
        rows = index.reshape(lengths.size, -1)
        np.add(rows, begins[:, None], out=rows)
    else:
        np.add(index, np.repeat(begins, lengths), out=index)
    items = out.view(tables.dtype)
    for chunk in (slice(begin, begin + _CHUNK) for begin in range(0, index.size, _CHUNK)):
        np.take(tables, index[chunk], out=items[chunk], mode="clip")


def _tables(values: np.ndarray, factors: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the table of each factor, one after the other; an item has all elements of a byte."""
    products = np.empty((factors.size, *values.shape), dtype)
    _multiply(values, factors[:, None, None], products)
    return products.view(f"u{products.itemsize * values.shape[1]}").reshape(-1)


@lru_cache
def _power_tables(codes: str, dtype: np.dtype) -> np.ndarray:
    """Return the tables of all U8 scales."""
    return _tables(_VALUES[codes], _POWERS, dtype)


def _multiply_each(
    values: np.ndarray, codes: np.ndarray, factors: np.ndarray, lengths: np.ndarray, out: np.ndarray
) -> None:
    """Write the elements of `codes`, scaled: each factor is for the next bytes, whose number is in `lengths`."""
    if (lengths != lengths[0]).any():
        factors = np.repeat(factors, lengths)
    rows, products = codes.reshape(factors.size, -1), out.reshape(factors.size, -1)
    step = max(_CHUNK // rows.shape[1], 1)
    buffer = np.empty((min(step, len(rows)), rows.shape[1], values.shape[1]), np.float32)
    for chunk in (slice(begin, begin + step) for begin in range(0, len(rows), step)):
        here = buffer[: len(rows[chunk])]
        np.take(values, rows[chunk], axis=0, out=here, mode="clip")
        _multiply(here.reshape(len(here), -1), factors[chunk, None], products[chunk])


def _multiply(values: np.ndarray, factors: np.ndarray, out: np.ndarray) -> None:
    """Write products of float32, rounded to the dtype of `out`."""
    with np.errstate(all="ignore"):
        np.multiply(values, factors, out=out, dtype=np.float32, casting="unsafe")


def _factors(stored: DType, scales: np.ndarray) -> np.ndarray:
    """Return scales as float32."""
    assert stored.numpy is not None, stored
    factors: np.ndarray = scales.view(stored.numpy).astype(np.float32)
    return factors
