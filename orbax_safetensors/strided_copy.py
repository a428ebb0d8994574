"""Executes `plan.strided.Copy` on memory with NumPy. Everything that is not a plain range read passes through here."""

from __future__ import annotations

from math import gcd

import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.plan.strided import Copy

_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def move(copy: Copy, source: np.ndarray, destination: np.ndarray, itemsize: int) -> None:
    """Moves bits between one-dimensional uint8 arrays that hold elements of `itemsize` bytes."""
    modes = [(size, src * itemsize, dst * itemsize) for size, src, dst in copy.modes]
    # The widest words that the innermost contiguous elements and all strides are made of: NumPy moves one a step.
    run = itemsize
    if modes and modes[-1][1:] == (itemsize, itemsize):
        run *= modes.pop()[0]
    begin, into = copy.source * itemsize, copy.destination * itemsize
    word = gcd(8, run, begin, into, *(step for _, src, dst in modes for step in (src, dst)))
    shape = (*(size for size, _, _ in modes), run // word)
    dtype = _WORDS[word]
    taken = np.ndarray(shape, dtype, source.data, begin, (*(src for _, src, _ in modes), word))
    np.ndarray(shape, dtype, destination.data, into, (*(dst for _, _, dst in modes), word))[...] = taken


def cast(
    copy: Copy, source: np.ndarray, stored: np.dtype, destination: np.ndarray, wanted: np.dtype, *, lossless: bool
) -> None:
    """Copies elements of dtype `stored` as elements of dtype `wanted`; both arrays are one-dimensional and uint8.

    Rounds as NumPy does. With `lossless`, integers that do not fit and finite numbers that become infinite raise
    `TensorMismatchError`, which does not know the tensor's name.
    """
    shape = tuple(size for size, _, _ in copy.modes)
    taken = np.ndarray(
        shape, stored, source.data, copy.source * stored.itemsize, [src * stored.itemsize for _, src, _ in copy.modes]
    )
    made = np.ndarray(
        shape,
        wanted,
        destination.data,
        copy.destination * wanted.itemsize,
        [dst * wanted.itemsize for _, _, dst in copy.modes],
    )
    with np.errstate(all="ignore"):
        np.copyto(made, taken, casting="unsafe")
        if lossless:
            lost = made != taken if np.issubdtype(stored, np.integer) else np.isinf(made) & ~np.isinf(taken)
            if np.any(lost):
                raise TensorMismatchError(f"{taken[lost].flat[0]!r} of {stored} does not fit {wanted}")
