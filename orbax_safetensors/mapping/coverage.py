"""Checks that a family's tree and the stored tensors fit each other: the tree uses every tensor whole, and once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from math import prod

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.header import shown
from orbax_safetensors.format.names import hint, some
from orbax_safetensors.geometry.coalesce import distinct_bytes
from orbax_safetensors.geometry.pieces import Piece
from orbax_safetensors.geometry.strided import extent, runs_of
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.family import LeafShapes, Shapes, Tree

# The end of the paths of codes, as `qwix.QArray` names them.
CODES_END = ".qvalue"

# Problems of a kind that an error lists before it counts the rest.
_LISTED = 3

# The most stretches of a tensor that are compared if arithmetic cannot tell whether an element is used twice.
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


def check_shapes(where: str, tree: Mapping[str, View], expected: Shapes, stored: Shapes) -> None:
    """Check that every tensor of a view is stored with its `expected` shape, from the config.

    Raises `MappingError` with `where`, which names the family and the checkpoint, the path, the stored name and both
    shapes.
    """

    def problem(use: tuple[str, str]) -> str:
        path, name = use
        what = f"found {stored[name]}" if name in stored else f"which is not stored{hint(name, stored)}"
        return f"{path} is made of {shown(name)} of shape {expected[name]}, {what}"

    wrong = {name for name, shape in expected.items() if stored.get(name) != shape}
    if problems := [(path, name) for path, view in tree.items() if wrong for name in view.tensors if name in wrong]:
        raise MappingError(f"{where}: {some(problems, problem, '; ', most=_LISTED)}")


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
    if missing or wrong:
        raise MappingError(f"{where}: {problems_text(missing, wrong)}{codes_hint(leaves, tree)}")
    return kept


def problems_text(missing: Sequence[str], wrong: Sequence[str]) -> str:
    """Return how an error lists what is missing among leaves and what is wrong with them."""
    return "; ".join(some(problems, separator="; ", most=_LISTED) for problems in (missing, wrong) if problems)


def codes_hint(leaves: Iterable[str], tree: Iterable[str], *, loads: bool = False) -> str:
    """Return what an error adds if the leaves to save or load are codes and scales, and those of the tree are not."""
    if any(path.endswith(CODES_END) for path in tree) or not any(path.endswith(CODES_END) for path in leaves):
        return ""
    like, verb = ("", "load") if loads else ("like= and ", "save")
    options = "options=SafetensorsOptions(dequantize='split')"
    return f"; the leaves are codes and scales: pass {like}{options} to {verb} them"


def doubles(tree: Tree, shapes: Shapes) -> set[str]:
    """Return the paths of leaves of `shared` tensors all of whose elements other leaves have.

    Leaves of whole tensors come first, then those that come first in the tree.
    """

    def is_part(path: str) -> bool:
        parts = _by_tensor([tree[path]]).items()
        return any(sum(map(_elements, pieces)) != prod(shapes[name]) for name, pieces in parts)

    kept: dict[str, list[Piece]] = {}
    paths = set()
    shared = tree.shared & shapes.keys()
    for path in sorted((path for path, view in tree.items() if not shared.isdisjoint(view.tensors)), key=is_part):
        pieces = _by_tensor([tree[path]])
        together = {name: [*kept.get(name, ()), *of_leaf] for name, of_leaf in pieces.items()}
        if pieces.keys() <= shared & kept.keys() and all(
            _distinct(together[name]) == _distinct(kept[name]) for name in pieces
        ):
            paths.add(path)
        else:
            kept |= together
    return paths


def check_use(where: str, tree: Tree, shapes: Shapes, whole: Callable[[str], str] = str, *, misfit: str = "") -> None:
    """Check that the tree uses every element of the tensors of `shapes` once, except for its `unused` tensors.

    It may use those of its `shared` tensors several times.

    `whole` returns the name of the tensor that a view's tensor is a part of. Raises `MappingError` with the tensors
    that are not used, or not once. `misfit` is what it says first if the tree uses these tensors of other layers.
    """
    parts: dict[str, list[list[Piece]]] = {}
    for part, pieces in _by_tensor(tree.values()).items():
        parts.setdefault(whole(part), []).append(pieces)
    paths: dict[str, str] = {}
    for path, view in tree.items():
        for part in view.tensors:
            paths.setdefault(whole(part), path)
    patterns = [re.compile(pattern) for pattern in tree.unused]
    unused, wrong = [], []
    for name, shape in shapes.items():
        of_name = parts.get(name, ())
        distinct = sum(map(_distinct, of_name))
        used = distinct if name in tree.shared else sum(_elements(piece) for part in of_name for piece in part)
        if used == distinct == prod(shape) and (name in parts or not used):
            continue
        if used == distinct <= prod(shape) and any(pattern.fullmatch(name) for pattern in patterns):
            continue
        if name not in parts:
            unused.append(name)
        else:
            wrong.append(f"{used} of the {prod(shape)} elements of {shown(name)}, by {paths[name]} and others")
    if unused:
        layers = set(map(_of_any_layer, parts))
        where += misfit if any(_of_any_layer(name) in layers for name in unused) else ""
        raise MappingError(f"{where}: no leaf of the tree uses these stored tensors: {some(unused, shown)}")
    if wrong:
        raise MappingError(
            f"{where}: each element of a tensor has to be used once; used are {some(wrong, separator='; ')}"
        )


def _of_any_layer(name: str) -> str:
    return re.sub(r"\d+", "0", name)


def _by_tensor(views: Iterable[View]) -> dict[str, list[Piece]]:
    """Return the pieces of tensors that views are made of, by the tensor's name."""
    out: dict[str, list[Piece]] = {}
    for view in views:
        for piece in view.pieces:
            if piece.tensor is not None:
                out.setdefault(piece.tensor, []).append(piece)
    return out


def _elements(piece: Piece) -> int:
    return prod(map(extent, piece.dims))


def _distinct(pieces: Sequence[Piece]) -> int:
    """Return how many elements of a tensor are in at least one of its pieces; `MappingError` if that takes too long."""
    if len(pieces) == 1:
        return _elements(pieces[0])
    sets = [runs_of(piece.offset, 1, [mode for dim in piece.dims for mode in dim]) for piece in pieces]
    # Those of a view always nest: no piece is left out.
    if (count := distinct_bytes([runs for runs in sets if runs is not None], _COUNTED)) is None:
        raise MappingError(f"{shown(pieces[0].tensor)}: its slices have over {_COUNTED} parts, too many to compare")
    return count
