"""Executes `plan.strided.Copy` on memory with NumPy. Everything that is not moved as a plain range passes through here.

Memory is one-dimensional and uint8: *packed* is as a file has it, *dense* is a block.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.plan.strided import Copy

_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def words(copy: Copy, packed: np.ndarray, dense: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of a copy that moves bits, as arrays of one shape; assigning one to the other makes the copy."""
    modes = [(size, src * itemsize, dst * itemsize) for size, src, dst in copy.modes]
    # The widest words that the innermost contiguous elements and all strides are made of: NumPy moves one a step.
    run = itemsize
    if modes and modes[-1][1:] == (itemsize, itemsize):
        run *= modes.pop()[0]
    begin, into = copy.source * itemsize, copy.destination * itemsize
    word = gcd(8, run, begin, into, *(step for _, src, dst in modes for step in (src, dst)))
    shape = (*(size for size, _, _ in modes), run // word)
    dtype = _WORDS[word]
    return (
        np.ndarray(shape, dtype, packed.data, begin, (*(src for _, src, _ in modes), word)),
        np.ndarray(shape, dtype, dense.data, into, (*(dst for _, _, dst in modes), word)),
    )


def elements(
    copy: Copy, packed: np.ndarray, stored: np.dtype, dense: np.ndarray, held: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of a copy that casts between the dtypes `stored` and `held`, as arrays of one shape."""
    shape = tuple(size for size, _, _ in copy.modes)
    source = [src * stored.itemsize for _, src, _ in copy.modes]
    into = [dst * held.itemsize for _, _, dst in copy.modes]
    return (
        np.ndarray(shape, stored, packed.data, copy.source * stored.itemsize, source),
        np.ndarray(shape, held, dense.data, copy.destination * held.itemsize, into),
    )


def cast(source: np.ndarray, destination: np.ndarray, *, lossless: bool) -> None:
    """Assigns with a cast that rounds as NumPy does.

    With `lossless`, numbers that do not fit an integer and finite numbers that become infinite raise
    `TensorMismatchError`, which does not know the tensor's name. Fractions are cut, or rounded, without a word.
    """
    with np.errstate(all="ignore"):
        np.copyto(destination, source, casting="unsafe")
        if lossless:
            if np.issubdtype(destination.dtype, np.integer):
                whole = source if np.issubdtype(source.dtype, np.integer) else np.trunc(source.astype(np.float64))
                lost = destination != whole
            else:
                lost = np.isinf(destination) & ~np.isinf(source)
            if np.any(lost):
                raise TensorMismatchError(
                    f"{source[lost].flat[0]!r} of {source.dtype} does not fit {destination.dtype}"
                )
