"""Trees of views made into arrays and back, slowly and in memory, with nothing of what restores and saves."""

import re
from collections.abc import Callable, Mapping

import numpy as np

from orbax_safetensors.geometry import elementwise
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping import Tree
from tests.support.views import run, run_backwards

Arrays = dict[str, np.ndarray]


def bound(name: str, shape: tuple[int, ...]) -> View:
    """A tensor of float32, whatever name and shape a description wants."""
    return View.tensor(name, shape, np.dtype(np.float32))


def unused(tree: Tree, name: str) -> bool:
    """Whether a stored tensor is one that the tree leaves out."""
    return any(re.fullmatch(pattern, name) for pattern in tree.unused)


def binder(stored: Mapping[str, np.ndarray]) -> Callable[[str, tuple[int, ...]], View]:
    """What `Family.describe` binds tensors with: it fails where one is not stored, or with another shape."""

    def bind(name: str, shape: tuple[int, ...]) -> View:
        assert name in stored, f"{name} is not stored"
        assert stored[name].shape == shape, f"{name} is stored as {stored[name].shape}, not {shape}"
        return View.tensor(name, shape, stored[name].dtype)

    return bind


def evaluate(view: View, stored: Mapping[str, np.ndarray]) -> np.ndarray:
    """The array that a view stands for, with the bits -1 wherever no copy goes."""
    out = np.full(view.shape, -1, np.dtype(f"i{view.dtype.itemsize}")).view(view.dtype)
    for taken in view.copies(Box.whole(view.shape), view.shape):
        source = np.zeros(1, view.dtype) if taken.tensor is None else stored[taken.tensor]
        values = elementwise.apply(taken.ops, source).astype(view.dtype) if taken.ops else source
        run([taken], {taken.tensor: values}, out)
    return out


def given_back(tree: Mapping[str, View], arrays: Mapping[str, np.ndarray], stored: Mapping[str, np.ndarray]) -> Arrays:
    """The stored tensors that the tree uses, from `arrays`, one for each of its paths."""
    out: Arrays = {}
    for path, view in tree.items():
        for name in view.tensors:
            like = stored[name]
            out.setdefault(name, np.full(like.shape, -1, np.dtype(f"i{like.itemsize}")).view(like.dtype))
        array = np.ascontiguousarray(arrays[path])
        for taken in view.copies(Box.whole(view.shape), view.shape):
            if taken.tensor is not None:
                values = elementwise.undo(taken.ops, array).astype(out[taken.tensor].dtype) if taken.ops else array
                run_backwards([taken], out, values)
    return out


def uses(tree: Mapping[str, View], shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """How often each element of the tensors that a tree uses is used."""
    counts: Arrays = {}
    for view in tree.values():
        ones = np.ones(view.shape, int)
        for taken in view.copies(Box.whole(view.shape), view.shape):
            if taken.tensor is not None:
                once = np.zeros(shapes[taken.tensor], int)
                run_backwards([taken], {taken.tensor: once}, ones)
                assert once.sum() == taken.copy.elements  # no element twice in one copy
                counts[taken.tensor] = counts.get(taken.tensor, 0) + once
    return counts
