"""Decodes quantised tensors with NumPy: the value of each code times the scale of its block.

The arithmetic is float32, as in the programs that models are published with, so the results are the same bits.
"""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np

from orbax_safetensors.plan.encoding import Encoding, Segments

# Elements decoded at a time: 512 KiB as float32, which stay in a core's cache from one step to the next. With fewer,
# threads wait for one another between the steps.
_CHUNK = 2**17

_BYTES = np.arange(256, dtype=np.uint8)
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

# What codes decode to, two at a time: at the position that their bytes make as an integer, two float32 as one item. The
# lower code is first.
_F8_E4M3 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_F4 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_PAIRS = {
    "F8_E4M3": np.stack(np.broadcast_arrays(_F8_E4M3, _F8_E4M3[:, None]), axis=-1).view(np.uint64).reshape(-1),
    "F4": np.stack(np.broadcast_arrays(_F4, _F4[:, None]), axis=-1).view(np.uint64).reshape(-1),
}
_PAIR = {"F8_E4M3": np.dtype("<u2"), "F4": np.dtype("u1")}

# 255 is NaN by the OCP specification and 2**128 in the decoders that are used, where it overflows to infinity.
with np.errstate(over="ignore"):
    _POWERS = np.ldexp(np.float32(1), _BYTES.astype(np.int32) - 127)


def decode(encoding: Encoding, segments: Segments, codes: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Decodes elements into `out`, one-dimensional, as float32 or rounded from it to bfloat16.

    `codes` are the bytes of exactly these elements, and `scales` bytes of scales, in which `segments` says where each
    element's is; both are one-dimensional uint8. The codes F8_E4M3 and F4, and the scales F32, BF16 and F8_E8M0 can be
    decoded. The interpreter lock is free most of the time.
    """
    factors, lengths = _factors(encoding.scales.name, scales)[segments.scales], segments.lengths
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(ends, np.arange(_CHUNK, out.size, _CHUNK), "right")
    bounds = np.unique(np.concatenate(([0], cuts, [ends.size]))).tolist()
    alike = bool((lengths == lengths[0]).all())
    per_byte = encoding.elements_per_byte
    with np.errstate(all="ignore"):
        for first, last in pairwise(bounds):
            begin, end = int(ends[first] - lengths[first]), int(ends[last - 1])
            here = out[begin:end] if out.dtype == np.float32 else np.empty(end - begin, np.float32)
            _look_up(encoding.codes.name, codes[begin // per_byte : end // per_byte], here)
            if alike:  # not repeated: that holds the lock
                rows = here.reshape(last - first, -1)
                np.multiply(rows, factors[first:last, None], out=rows)
            else:
                np.multiply(here, np.repeat(factors[first:last], lengths[first:last]), out=here)
            if out.dtype != np.float32:
                np.copyto(out[begin:end], here, casting="unsafe")


def _look_up(dtype: str, codes: np.ndarray, out: np.ndarray) -> None:
    """The values of codes without their scales, as float32."""
    pairs, index = _PAIRS[dtype], _PAIR[dtype]
    even = out.size & ~1
    whole = codes[: codes.size // index.itemsize * index.itemsize]
    np.take(pairs, whole.view(index), out=out[:even].view(pairs.dtype), mode="clip")
    if out.size > even:
        out[even:] = pairs[codes[-1:]].view(np.float32)[:1]


def _factors(dtype: str, scales: np.ndarray) -> np.ndarray:
    """Scales as float32."""
    if dtype == "F8_E8M0":
        powers: np.ndarray = _POWERS[scales]
        return powers
    stored = {"F32": np.dtype("<f4"), "BF16": np.dtype(ml_dtypes.bfloat16)}[dtype]
    factors: np.ndarray = scales.view(stored).astype(np.float32, copy=False)
    return factors
