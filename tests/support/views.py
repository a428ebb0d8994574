"""Random compositions of views beside the same compositions in NumPy, and slow executors of copies as the model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from orbax_safetensors.errors import MappingError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.strided import Copy
from orbax_safetensors.geometry.view import TensorCopy, View
from tests.support.files import random_bits


@dataclass
class Composition:
    """A view, the array that NumPy makes of the same words, and the stored tensors of both."""

    view: View
    array: np.ndarray
    stored: dict[str, np.ndarray] = field(default_factory=dict)
    refused: int = 0


def _stored(made: dict[str, np.ndarray], shape: tuple[int, ...], dtype: Any, prefix: str) -> tuple[View, np.ndarray]:
    name = f"{prefix}t{len(made)}"
    # Every element of every tensor is another number, so that a wrong source shows; of other dtypes, any bits.
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape) + 10_000 * len(made)
    if dtype != array.dtype:
        array = random_bits(np.random.default_rng(len(made)), shape, dtype)
    made[name] = array
    return View.tensor(name, shape, array.dtype), array


def _factors(draw: Any, elements: int) -> tuple[int, ...]:
    sizes = []
    while elements > 1:
        size = draw(st.sampled_from([n for n in range(2, elements + 1) if elements % n == 0]))
        sizes.append(size)
        elements //= size
    sizes += [1] * draw(st.integers(0, 2))
    return tuple(draw(st.permutations(sizes)))


@st.composite
def compositions(draw: Any, *, matrices: bool = False, dtype: Any = np.int32, prefix: str = "") -> Composition:
    """Views of up to six operations. A reshape that is refused is left out on both sides, and counted.

    With `matrices`, no view is empty, and each stored tensor has two dimensions or more. Names of tensors begin with
    `prefix`.
    """
    made: dict[str, np.ndarray] = {}
    fewest, least = (2, 1) if matrices else (0, 0)
    view, array = _stored(
        made, tuple(draw(st.lists(st.integers(least, 6), min_size=fewest, max_size=4))), dtype, prefix
    )
    refused = 0
    for word in draw(st.lists(st.sampled_from(["transpose", "reshape", "slice", "stack", "concatenate"]), max_size=6)):
        if word == "transpose":
            axes = draw(st.permutations(range(array.ndim)))
            view, array = view.transpose(axes), array.transpose(axes)
        elif word == "reshape" and array.size <= 2000:
            shape = _factors(draw, array.size) if array.size else (3, 0)
            try:
                view, array = view.reshape(shape), array.reshape(shape)
            except MappingError:
                refused += 1
        elif word == "slice":
            taken = []
            for size in array.shape[: draw(st.integers(0, array.ndim))]:
                start, stop = sorted(
                    draw(st.tuples(st.integers(-size - 1, size + 1), st.integers(-size - 1, size + 1)))
                )
                taken.append(slice(start, stop, draw(st.sampled_from([None, 1, 2, 3]))))
            if array[tuple(taken)].size or not matrices:
                view, array = view.slice(*taken), array[tuple(taken)]
        elif word == "stack" and array.size <= 2000 and array.ndim >= fewest:
            axis = draw(st.integers(-array.ndim - 1, array.ndim))
            other, other_array = _stored(made, array.shape, dtype, prefix)
            view = View.stack([view, other, view], axis)
            array = np.stack([array, other_array, array], axis)
        elif word == "concatenate" and array.ndim >= max(fewest, 1):
            axis = draw(st.integers(-array.ndim, array.ndim - 1))
            shape = list(array.shape)
            shape[axis] = draw(st.integers(least, 4))
            other, other_array = _stored(made, tuple(shape), dtype, prefix)
            view, array = View.concatenate([view, other], axis), np.concatenate([array, other_array], axis)
    return Composition(view, array, made, refused)


@st.composite
def seen(draw: Any, view: View, array: np.ndarray) -> tuple[View, np.ndarray]:
    """Views of up to four operations on `view`, and the same of the array that it means."""
    for word in draw(st.lists(st.sampled_from(["transpose", "reshape", "slice"]), max_size=4)):
        if word == "transpose":
            axes = draw(st.permutations(range(array.ndim)))
            view, array = view.transpose(axes), array.transpose(axes)
        elif word == "reshape" and array.size:
            shape = _factors(draw, array.size)
            try:
                view, array = view.reshape(shape), array.reshape(shape)
            except MappingError:
                continue
        elif word == "slice":
            taken = []
            for size in array.shape[: draw(st.integers(0, array.ndim))]:
                start, stop = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
                taken.append(slice(start, stop, draw(st.sampled_from([1, 2, 3]))))
            view, array = view.slice(*taken), array[tuple(taken)]
    return view, array


@st.composite
def boxes(draw: Any, shape: tuple[int, ...]) -> Box:
    """Boxes of an array of `shape`, empty ones among them."""
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box((start, stop) for start, stop in ends)


def _ends(copy: Copy, source: np.ndarray, destination: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The elements that a copy reads and those that it writes, as arrays over flat memory."""
    shape = [size for size, _, _ in copy.modes]
    taken = as_strided(source[copy.source :], shape, [src * source.itemsize for _, src, _ in copy.modes])
    filled = as_strided(
        destination[copy.destination :], shape, [dst * destination.itemsize for _, _, dst in copy.modes], writeable=True
    )
    return taken, filled


def run(copies: list[TensorCopy], sources: Mapping[str, np.ndarray], destination: np.ndarray) -> None:
    """Makes the copies, from the stored tensors into `destination`."""
    flat = destination.reshape(-1)
    for name, copy, _ in copies:
        taken, filled = _ends(copy, sources[name].reshape(-1), flat)
        filled[...] = taken


def run_backwards(copies: list[TensorCopy], sources: Mapping[str, np.ndarray], destination: np.ndarray) -> None:
    """Makes the copies with the arrows reversed, from `destination` into the stored tensors."""
    flat = destination.reshape(-1)
    for name, copy, _ in copies:
        taken, filled = _ends(copy, sources[name].reshape(-1), flat)
        as_strided(taken, writeable=True)[...] = filled
