"""Decodes quantised tensors with NumPy: the value of each code times the scale of its block.

The arithmetic is float32, as in the programs that models are published with, so the results have the same bits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import ml_dtypes
import numpy as np

from orbax_safetensors.format.dtypes import DType
from orbax_safetensors.geometry.encoding import Encoding, Segments

# Elements decoded at a time: 512 KiB as float32, which stay in a core's cache from one step to the next. With fewer
# elements, threads wait for one another between the steps.
_CHUNK = 2**17


class _Codes(NamedTuple):
    """The values of pairs of codes.

    `values` has two float32 as one item; its index is the bytes of the two codes as a number of type `pair`. The first
    code is in the lower bits.
    """

    values: np.ndarray
    pair: np.dtype


def _codes(values: np.ndarray, pair: str) -> _Codes:
    pairs = np.stack(np.broadcast_arrays(values, values[:, None]), axis=-1)
    return _Codes(pairs.view(np.uint64).reshape(-1), np.dtype(pair))


_BYTES = np.arange(256, dtype=np.uint8)
_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
_CODES = {
    "F8_E4M3": _codes(_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32), "<u2"),
    "F4": _codes(np.concatenate([_HALVES, -_HALVES]), "u1"),
}
# The factors of U8 scales for `_HALVES`. Each is a number, even for 255, which is NaN in the OCP specification and
# 2**128 in the decoders that programs use.
_POWERS = np.ldexp(np.float32(1), _BYTES.astype(np.int32) - 128)


def decode(encoding: Encoding, segments: Segments, codes: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Decode elements into `out`, one-dimensional, as float32 or rounded from it to bfloat16.

    `codes` are the bytes of exactly these elements, `scales` are bytes of scales, and `segments` has the position in
    them of each element's scale; both are one-dimensional uint8. The interpreter lock is free most of the time.
    """
    factors, lengths = _factors(encoding.scales, scales)[segments.scales], segments.lengths
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(ends, np.arange(_CHUNK, out.size, _CHUNK), "right")
    bounds = np.unique(np.concatenate(([0], cuts, [ends.size])))
    alike = bool((lengths == lengths[0]).all())
    per_byte = encoding.elements_per_byte
    # One buffer for all chunks: new memory for each would cost a page fault for every page.
    wide = np.empty(0 if out.dtype == np.float32 else np.diff(ends[bounds[1:] - 1], prepend=0).max(), np.float32)
    with np.errstate(all="ignore"):
        for first, last in pairwise(bounds.tolist()):
            begin, end = int(ends[first] - lengths[first]), int(ends[last - 1])
            here = out[begin:end] if out.dtype == np.float32 else wide[: end - begin]
            _look_up(encoding.codes.name, codes[begin // per_byte : end // per_byte], here)
            if alike:  # repeating the factors would hold the lock
                rows = here.reshape(last - first, -1)
                np.multiply(rows, factors[first:last, None], out=rows)
            else:
                np.multiply(here, np.repeat(factors[first:last], lengths[first:last]), out=here)
            if out.dtype != np.float32:
                np.copyto(out[begin:end], here, casting="unsafe")


def _look_up(dtype: str, codes: np.ndarray, out: np.ndarray) -> None:
    """Write the values of codes without their scales, as float32."""
    values, pair = _CODES[dtype]
    even = out.size & ~1
    whole = codes[: codes.size // pair.itemsize * pair.itemsize]
    np.take(values, whole.view(pair), out=out[:even].view(values.dtype), mode="clip")
    if out.size > even:
        out[even:] = values[codes[-1:]].view(np.float32)[:1]


def _factors(stored: DType, scales: np.ndarray) -> np.ndarray:
    """Return scales as float32."""
    assert stored.numpy is not None, stored
    factors: np.ndarray = _POWERS[scales] if stored.name == "U8" else scales.view(stored.numpy).astype(np.float32)
    return factors
