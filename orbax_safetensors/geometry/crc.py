"""CRC-32 of bytes that come in parts, in any order: pure arithmetic.

A CRC is linear. The *remainder* of a part is what the part adds to the CRC of the whole, seen from the end of the part.
To get the remainder of the whole, move those of all parts to its end and XOR them; it does not matter which process
computed which. Bytes that are zero, or belong to another part, add nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

try:  # six times as fast as zlib, which gives the same numbers
    from isal.isal_zlib import crc32
except ImportError:  # there are no wheels for this machine
    crc32 = zlib.crc32

Buffer = bytes | bytearray | memoryview

_ONES = 0xFFFFFFFF
# The polynomial of zlib, PNG and Ethernet. The highest bit of a remainder is the coefficient of x**0.
_POLYNOMIAL = 0xEDB88320
_ONE, _X8 = 1 << 31, 1 << 23


def remainder(part: Buffer) -> int:
    """Return the remainder of a part; the interpreter lock is free meanwhile."""
    return int(crc32(part, _ONES)) ^ _ONES


def crc_of(remainder_of_all: int, nbytes: int) -> int:
    """Return the CRC-32, as `zlib.crc32` has it, of `nbytes` bytes that have this remainder."""
    return remainder_of_all ^ moved(_ONES, nbytes) ^ _ONES


def moved(part: int, nbytes: int) -> int:
    """Return the remainder of a part seen from `nbytes` after its end."""
    return _product(_power(nbytes), part) if nbytes else part


def combined(parts: Sequence[int], ends: Sequence[int]) -> int:
    """Return the remainder of at least one part seen from the last of `ends`, where the parts end, in order.

    Takes two neighbours as one, again and again: of rows at equal distances, all pairs then take the same step.
    """
    if len(parts) == 1:
        return parts[0]
    left, at = np.array(parts, np.uint32), np.array(ends, np.int64)
    while left.size > 1:
        if left.size % 2:
            left, at = np.concatenate(([np.uint32(0)], left)), np.concatenate((at[:1], at))
        left = _all_moved(left[0::2], at[1::2] - at[0::2]) ^ left[1::2]
        at = at[1::2]
    return int(left[0])


def _all_moved(parts: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    if (nbytes == nbytes[0]).all():
        return _looked_up(_table(int(nbytes[0])), parts)
    distances, which = np.unique(nbytes, return_inverse=True)
    out = np.empty_like(parts)
    for number, distance in enumerate(distances.tolist()):
        out[which == number] = _looked_up(_table(distance), parts[which == number])
    return out


def _looked_up(table: np.ndarray, parts: np.ndarray) -> np.ndarray:
    out: np.ndarray = table[0][parts & 255]
    for byte in range(1, 4):
        out = out ^ table[byte][parts >> 8 * byte & 255]
    return out


@lru_cache(maxsize=2**10)
def _table(nbytes: int) -> np.ndarray:
    """Return what `moved` makes of each value of each byte of a remainder, as an array `(4, 256)` of uint32."""
    products = np.zeros(32, np.uint32)
    product = _power(nbytes)
    for bit in reversed(range(32)):
        products[bit] = product
        product = product >> 1 ^ (_POLYNOMIAL if product & 1 else 0)
    values = np.arange(256)
    out = np.zeros((4, 256), np.uint32)
    for bit in range(32):
        out[bit // 8, values >> bit % 8 & 1 == 1] ^= products[bit]
    return out


@lru_cache(maxsize=2**14)
def _power(nbytes: int) -> int:
    """Return x**(8 * nbytes) modulo the polynomial."""
    out, square = _ONE, _X8
    while nbytes:
        if nbytes & 1:
            out = _product(out, square)
        square = _product(square, square)
        nbytes >>= 1
    return out


def _product(a: int, b: int) -> int:
    """Return the product of two remainders modulo the polynomial."""
    out = 0
    while a:
        if a & _ONE:
            out ^= b
        a = a << 1 & _ONES
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return out
