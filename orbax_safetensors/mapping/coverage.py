"""Whether a family's tree and the stored tensors are made for each other: every tensor used whole, and once."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from math import prod
from typing import TypeVar

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.header import shown
from orbax_safetensors.mapping.family import Tree
from orbax_safetensors.plan.strided import extent
from orbax_safetensors.plan.view import View

_T = TypeVar("_T")
Shapes = Mapping[str, tuple[int, ...]]

# Names that an error lists before it says how many more there are.
_LISTED = 8


def present(tree: Tree, absent: Set[str], *, complete: bool) -> Tree:
    """`tree` without the leaves of which a tensor is `absent`; if `complete`, without its optional ones or whole."""
    if not complete:
        return _only(tree, {path for path, view in tree.items() if absent.isdisjoint(view.tensors)})
    return _without_optional(tree, {path for path, view in tree.items() if not absent >= set(view.tensors)})


def _without_optional(tree: Tree, there: Set[str]) -> Tree:
    """`tree` without its optional leaves, unless one of them is `there`: then all have to be."""
    patterns = [re.compile(pattern) for pattern in tree.optional]
    optional = {path for path in tree if any(pattern.fullmatch(path) for pattern in patterns)}
    return tree if not optional.isdisjoint(there) else _only(tree, tree.keys() - optional)


def _only(tree: Tree, paths: Set[str]) -> Tree:
    leaves = {path: view for path, view in tree.items() if path in paths}
    return Tree(leaves, unused=tree.unused, optional=tree.optional)


def check_shapes(where: str, tree: Mapping[str, View], described: Shapes, stored: Shapes) -> None:
    """Every tensor that a view uses is stored, with the shape that the config says.

    Raises `MappingError` with the family and checkpoint, which `where` names, the path, the stored name and both
    shapes.
    """

    def problem(path: str, name: str) -> str:
        found = f"found {stored[name]}" if name in stored else f"which is not stored{_nearest(name, stored)}"
        return f"{path} is made of {shown(name)} of shape {described[name]}, {found}"

    wrong = {name for name, shape in described.items() if stored.get(name) != shape}
    if problems := [(path, name) for path, view in tree.items() if wrong for name in view.tensors if name in wrong]:
        raise MappingError(f"{where}: {_some(problems, '; ', lambda found: problem(*found))}")


def check_leaves(where: str, tree: Tree, leaves: Shapes) -> Tree:
    """`tree` without its optional leaves that are not among `leaves`, which are to be saved.

    Raises `MappingError` where others are missing or unknown, or have another shape.
    """
    kept = _without_optional(tree, leaves.keys())
    problems = [
        *(f"{path} is missing" for path in kept if path not in leaves),
        *(f"{path} is not in the family's tree{_nearest(path, kept)}" for path in leaves if path not in kept),
        *(
            f"{path}, which makes {_some([shown(name) for name in view.tensors])}: expected {view.shape}, found "
            f"{leaves[path]}"
            for path, view in kept.items()
            if path in leaves and leaves[path] != view.shape
        ),
    ]
    if problems:
        raise MappingError(f"{where}: {_some(problems, '; ')}")
    return kept


def check_use(where: str, tree: Tree, shapes: Shapes, whole: Callable[[str], str] = str) -> None:
    """Every element of the tensors of `shapes` is used once, apart from those that the tree leaves unused, or in part.

    `whole` gives the name of the tensor that a view's tensor is a part of. Raises `MappingError` that lists what is
    not used, or not once.
    """
    used: Counter[str] = Counter()
    paths: dict[str, str] = {}
    for path, view in tree.items():
        for piece in view.pieces:
            if piece.tensor is not None:
                name = whole(piece.tensor)
                used[name] += prod([extent(modes) for modes in piece.dims])
                paths.setdefault(name, path)
    patterns = [re.compile(pattern) for pattern in tree.unused]
    unused, wrong = [], []
    for name, shape in shapes.items():
        if used[name] < prod(shape) and any(pattern.fullmatch(name) for pattern in patterns):
            continue
        if name not in used:
            if prod(shape):
                unused.append(shown(name))
        elif used[name] != prod(shape):
            wrong.append(f"{used[name]} of the {prod(shape)} elements of {shown(name)}, by {paths[name]} and others")
    if unused:
        raise MappingError(f"{where}: no leaf of the tree uses these stored tensors: {_some(unused)}")
    if wrong:
        raise MappingError(f"{where}: each element of a tensor has to be used once; used are {_some(wrong, '; ')}")


def _nearest(name: str, stored: Mapping[str, object]) -> str:
    found = difflib.get_close_matches(name, stored, n=1) if len(stored) < 1000 and len(name) < 1000 else []
    return f" (nearest: {shown(found[0])})" if found else ""


def _some(found: Sequence[_T], separator: str = ", ", text: Callable[[_T], str] = str) -> str:
    more = len(found) - _LISTED
    return separator.join(text(one) for one in found[:_LISTED]) + (f" and {more} more" if more > 0 else "")
