"""Checks that a family's tree and the stored tensors fit each other: the tree uses every tensor whole, and once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from math import prod

import numpy as np

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.header import shown
from orbax_safetensors.format.names import hint, some
from orbax_safetensors.geometry.coalesce import disjoint
from orbax_safetensors.geometry.pieces import Piece
from orbax_safetensors.geometry.strided import extent, runs_of
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.family import LeafShapes, Shapes, Tree

# The most elements of a tensor that are counted one by one if arithmetic cannot tell whether an element is used twice.
_COUNTED = 2**26


def present(tree: Tree, absent: Set[str], *, complete: bool) -> Tree:
    """Return `tree` without leaves that use `absent` tensors; if `complete`, without all optional leaves or none."""
    if not complete:
        return _only(tree, {path for path, view in tree.items() if absent.isdisjoint(view.tensors)})
    return _without_optional(tree, {path for path, view in tree.items() if not absent >= set(view.tensors)})


def _without_optional(tree: Tree, there: Set[str]) -> Tree:
    """Return `tree` without its optional leaves, or the whole `tree` if one of these is `there`."""
    patterns = [re.compile(pattern) for pattern in tree.optional]
    optional = {path for path in tree if any(pattern.fullmatch(path) for pattern in patterns)}
    return tree if not optional.isdisjoint(there) else _only(tree, tree.keys() - optional)


def _only(tree: Tree, paths: Set[str]) -> Tree:
    leaves = {path: view for path, view in tree.items() if path in paths}
    return Tree(leaves, unused=tree.unused, optional=tree.optional, shared=tree.shared)


def check_shapes(where: str, tree: Mapping[str, View], described: Shapes, stored: Shapes) -> None:
    """Check that every tensor of a view is stored with the shape from the config.

    Raises `MappingError` with `where`, which names the family and the checkpoint, the path, the stored name and both
    shapes.
    """

    def problem(use: tuple[str, str]) -> str:
        path, name = use
        what = f"found {stored[name]}" if name in stored else f"which is not stored{hint(name, stored)}"
        return f"{path} is made of {shown(name)} of shape {described[name]}, {what}"

    wrong = {name for name, shape in described.items() if stored.get(name) != shape}
    if problems := [(path, name) for path, view in tree.items() if wrong for name in view.tensors if name in wrong]:
        raise MappingError(f"{where}: {some(problems, problem, '; ')}")


def leaf_problems(
    tree: Tree, leaves: LeafShapes, whose: str = "the family's tree"
) -> tuple[Tree, list[str], list[str]]:
    """Return `tree` without its optional leaves that are not among `leaves`, and what else differs.

    The first list has what is missing among `leaves`, the second what is wrong with them. `whose` names the tree for
    messages.
    """
    kept = _without_optional(tree, leaves.keys())
    missing = [f"{path} is missing" for path in kept if path not in leaves]
    wrong = [
        *(f"{path} is not in {whose}" for path in leaves if path not in kept),
        *(
            f"{path}, of {some(view.tensors, shown)}: expected {view.shape}, found {leaves[path]}"
            for path, view in kept.items()
            if path in leaves and leaves[path] not in (None, view.shape)
        ),
    ]
    return kept, missing, wrong


def check_leaves(where: str, tree: Tree, leaves: Shapes) -> Tree:
    """Return `tree` without its optional leaves that are not among `leaves`, the leaves to save.

    Raises `MappingError` if other leaves are missing or unknown, or have another shape.
    """
    kept, missing, wrong = leaf_problems(tree, leaves)
    if problems := missing + wrong:
        raise MappingError(f"{where}: {some(problems, separator='; ')}")
    return kept


def doubles(tree: Tree, shapes: Shapes, whole: Callable[[str], str] = str) -> set[str]:
    """Return the paths of leaves that are made of `shared` tensors which the leaves before them have whole."""
    paths = set()
    used: dict[str, int] = {}
    for path, view in tree.items() if tree.shared else ():
        names = {whole(tensor) for tensor in view.tensors}
        if (
            names
            and names <= tree.shared & shapes.keys()
            and all(used.get(name, 0) >= prod(shapes[name]) for name in names)
        ):
            paths.add(path)
            continue
        for piece in view.pieces:
            if piece.tensor is not None:
                name = whole(piece.tensor)
                used[name] = used.get(name, 0) + prod(map(extent, piece.dims))
    return paths


def check_use(where: str, tree: Tree, shapes: Shapes, whole: Callable[[str], str] = str) -> None:
    """Check that the tree uses every element of the tensors of `shapes` once, except for its `unused` tensors.

    Leaves that are `doubles` of others do not count.

    `whole` returns the name of the tensor that a view's tensor is a part of. Raises `MappingError` with the tensors
    that are not used, or not once.
    """
    pieces: dict[str, dict[str, list[Piece]]] = {}  # by tensor, then by the part of the tensor that is stored
    paths: dict[str, str] = {}
    left_out = doubles(tree, shapes, whole)
    for path, view in tree.items():
        for piece in view.pieces if path not in left_out else ():
            if piece.tensor is not None:
                name = whole(piece.tensor)
                pieces.setdefault(name, {}).setdefault(piece.tensor, []).append(piece)
                paths.setdefault(name, path)
    patterns = [re.compile(pattern) for pattern in tree.unused]
    unused, wrong = [], []
    for name, shape in shapes.items():
        parts = pieces.get(name, {}).values()
        used = sum(prod(map(extent, piece.dims)) for part in parts for piece in part)
        twice = any(len(part) > 1 and not _are_disjoint(part, prod(shape)) for part in parts)
        if used == prod(shape) and (parts or not used) and not twice:
            continue
        if used <= prod(shape) and not twice and any(pattern.fullmatch(name) for pattern in patterns):
            continue
        if not parts:
            unused.append(name)
        else:
            wrong.append(f"{used} of the {prod(shape)} elements of {shown(name)}, by {paths[name]} and others")
    if unused:
        raise MappingError(f"{where}: no leaf of the tree uses these stored tensors: {some(unused, shown)}")
    if wrong:
        raise MappingError(
            f"{where}: each element of a tensor has to be used once; used are {some(wrong, separator='; ')}"
        )


def _are_disjoint(pieces: list[Piece], size: int) -> bool:
    """Return whether no element of a tensor of `size` elements is in two of its pieces."""
    modes = [[mode for dim in piece.dims for mode in dim] for piece in pieces]
    sets = [runs_of(piece.offset, 1, piece_modes) for piece, piece_modes in zip(pieces, modes, strict=True)]
    if disjoint([runs for runs in sets if runs is not None]):
        return True
    if size > _COUNTED:
        return False
    seen = np.zeros(size, bool)
    for piece, piece_modes in zip(pieces, modes, strict=True):
        elements = np.array(piece.offset)
        for length, stride in piece_modes:
            elements = np.add.outer(elements, np.arange(length) * stride)
        if seen[elements].any():
            return False
        seen[elements] = True
    return True
