"""What codes mean: from bytes as they are stored to numbers, before scales and what else is beside them."""

from __future__ import annotations

from functools import lru_cache
from math import lcm

import ml_dtypes
import numpy as np

from orbax_safetensors.geometry.encoding import Encoding, Order

BYTES = np.arange(256, dtype=np.uint8)
_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
_HALVES = np.concatenate([_HALVES, -_HALVES])
# What is subtracted from codes that are integers, and what codes mean, by the name of their kind.
_OFFSETS = {"int8": 0, "offset2": 2, "offset4": 8, "offset8": 128}
CODES = {
    "F8_E4M3": BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "F4": _HALVES / 2,
    "doubled F4": _HALVES,  # for exponents as scales
    "offset2": np.arange(4, dtype=np.float32) - 2,
    "offset4": np.arange(16, dtype=np.float32) - 8,
    "offset8": np.arange(256, dtype=np.float32) - 128,
}
EVEN_FIRST_SHIFTS = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)


def in_order(codes: np.ndarray) -> np.ndarray:
    """Return codes of 4 bits from words in which those with even numbers are the first: with the first code first."""
    words = codes.view("<u4")
    swapped = (words ^ (words >> 8)) & 0x0000FF00  # the two inner bytes, then the inner halves of each pair of bytes
    words = words ^ swapped ^ (swapped << 8)
    swapped = (words ^ (words >> 4)) & 0x00F000F0
    ordered: np.ndarray = words ^ swapped ^ (swapped << 4)
    return ordered.view(np.uint8)


def integers(encoding: Encoding, codes: np.ndarray) -> np.ndarray:
    """Return codes that are integers, those of words for several rows as these rows."""
    bits = encoding.bits
    if encoding.rows_in_word > 1:
        words = codes.view(f"<u{encoding.rows_in_word * bits // 8}")
        shifts = np.arange(0, encoding.rows_in_word * bits, bits, dtype=words.dtype)[:, None]
        fields: np.ndarray = words[:, None] >> shifts & words.dtype.type(2**bits - 1)
        return fields.reshape(-1, words.shape[1])
    if 8 % bits:
        codes = _across_bytes(codes, bits)
    else:
        for width in range(4, bits - 1, -2):  # every byte becomes two, which have half of it each
            wide = codes.astype("<u2")
            wide |= wide << np.uint16(8 - width)
            wide &= np.uint16((2**width - 1) * 0x0101)
            codes = wide.view(np.uint8)
    if encoding.values.startswith("unsigned"):
        return codes
    return (codes - np.uint8(_OFFSETS[encoding.values])).view(np.int8)


def _across_bytes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes that run over the ends of bytes, the first in the lowest bits, in a byte each."""
    units = codes.reshape(len(codes), -1, lcm(bits, 8) // 8)
    fields = np.empty((*units.shape[:2], lcm(bits, 8) // bits), np.uint8)
    for number in range(fields.shape[2]):
        at, shift = divmod(number * bits, 8)
        field = units[..., at] >> np.uint8(shift)
        if shift + bits > 8:
            field |= units[..., at + 1] << np.uint8(8 - shift)
        np.bitwise_and(field, np.uint8(2**bits - 1), out=fields[..., number])
    return fields.reshape(len(codes), -1)


def values_of_bytes(encoding: Encoding) -> np.ndarray | None:
    """Return what each byte of codes means: an item has the values of all of its codes, in float32.

    Returns None if codes are integers, which take less time to compute.
    """
    if encoding.values not in CODES or encoding.values in _OFFSETS:
        return None
    return of_kind(encoding.values, encoding.bits, encoding.order)


@lru_cache
def of_kind(name: str, bits: int, order: Order) -> np.ndarray:
    """Return what each byte means of codes of a kind of `CODES`, as items."""
    return of_bytes(CODES[name], bits, order)


def of_bytes(values: np.ndarray, bits: int, order: Order) -> np.ndarray:
    """Return what each byte means, as items, if `values` has the value of each code."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    if order is Order.HIGH_FIRST:
        shifts = shifts[::-1]
    fields = BYTES[:, None] >> shifts & (2**bits - 1)
    return items(np.ascontiguousarray(values, np.float32)[fields])


def items(table: np.ndarray) -> np.ndarray:
    """Return a table whose items are the rows of `table`: one step of NumPy moves all results of a byte."""
    whole: np.ndarray = table.view(f"V{table.itemsize * table.shape[-1]}")[..., 0]
    return whole
