"""Decodes quantised tensors with NumPy: the value of each code times the scale of its block.

The arithmetic is float32, as in the programs that models are published with, so the results are the same bits.
"""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np

from orbax_safetensors.plan.encoding import Encoding, Segments

# Elements decoded at a time: 256 KiB as float32, which stay in a core's cache from one step to the next. The calls take
# longer than the work below a quarter of this.
_CHUNK = 2**16

_HALVES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NIBBLES = np.concatenate([_HALVES, -_HALVES])
_BYTES = np.arange(256, dtype=np.uint8)

# What each byte of codes decodes to, as one item: one float32, or two of which the low nibble's is first.
_VALUES = {
    "F8_E4M3": _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "F4": np.stack([_NIBBLES[_BYTES & 15], _NIBBLES[_BYTES >> 4]], axis=1).view(np.uint64)[:, 0],
}
# 255 is NaN by the OCP specification and 2**128 in the decoders that are used, where it overflows to infinity.
with np.errstate(over="ignore"):
    _POWERS = np.ldexp(np.float32(1), _BYTES.astype(np.int32) - 127)


def decode(encoding: Encoding, segments: Segments, codes: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Decodes elements into `out`, one-dimensional, as float32 or rounded from it to bfloat16.

    `codes` are the bytes of exactly these elements, and `scales` bytes of scales, in which `segments` says where each
    element's is; both are one-dimensional uint8. The codes F8_E4M3 and F4, and the scales F32, BF16 and F8_E8M0 can be
    decoded. The interpreter lock is free most of the time.
    """
    values, per_byte = _VALUES[encoding.codes.name], encoding.elements_per_byte
    factors = _factors(encoding.scales.name, scales)
    ends = np.cumsum(segments.lengths)
    cuts = np.searchsorted(ends, np.arange(_CHUNK, ends[-1], _CHUNK))
    bounds = np.unique(np.concatenate(([0], cuts, [ends.size]))).tolist()
    starts = (ends - segments.lengths)[bounds[:-1]].tolist()

    with np.errstate(all="ignore"):
        for (first, last), (begin, end) in zip(pairwise(bounds), pairwise([*starts, out.size]), strict=True):
            here = out[begin:end] if out.dtype == np.float32 else np.empty(end - begin, np.float32)
            np.take(values, codes[begin // per_byte : end // per_byte], out=here.view(values.dtype), mode="clip")
            scale = np.repeat(factors[segments.scales[first:last]], segments.lengths[first:last])
            np.multiply(here, scale, out=here)
            if out.dtype != np.float32:
                np.copyto(out[begin:end], here, casting="unsafe")


def _factors(dtype: str, scales: np.ndarray) -> np.ndarray:
    """Scales as float32."""
    if dtype == "F8_E8M0":
        powers: np.ndarray = _POWERS[scales]
        return powers
    stored = {"F32": np.dtype("<f4"), "BF16": np.dtype(ml_dtypes.bfloat16)}[dtype]
    return scales.view(stored).astype(np.float32, copy=False)
