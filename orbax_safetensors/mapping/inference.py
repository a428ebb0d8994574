"""Finds the registered family and its variant whose tree has the requested leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.names import by_same, some
from orbax_safetensors.geometry.view import UNKNOWN, View
from orbax_safetensors.mapping.coverage import leaf_problems
from orbax_safetensors.mapping.family import Family, LeafShapes, Shapes, Tree, Variant

# Flax's collection of parameters: some trees begin below it, and some have it twice.
_COLLECTION = "params."


@dataclass(frozen=True)
class Fit:
    """A comparison of a family's variant with the requested leaves.

    Attributes:
      paths: the path of each leaf in the family's tree, by the leaf's name.
      problems: the differences.
    """

    family: Family
    variant: Variant
    paths: Mapping[str, str]
    problems: Sequence[str]


def fit(families: Sequence[Family], config: Mapping[str, Any], leaves: LeafShapes, stored: Shapes) -> Fit:
    """Return the family whose tree has exactly these leaves, with its first variant that has them.

    `stored` are the shapes of the stored tensors. Raises `MappingError` if no family has such a tree, with the
    differences to the nearest tree, and if several families have one.
    """
    fits: list[Fit] = []
    others: list[Fit] = []
    errors: list[MappingError] = []
    for family in families:
        shapes = {family.renamed(name): shape for name, shape in stored.items()}
        for variant in _variants(family, leaves):
            try:
                candidate = _against(family, config, variant, leaves, shapes)
            except MappingError as error:
                errors.append(error)
                continue
            if not candidate.problems:
                fits.append(candidate)
                break
            others.append(candidate)
    if len(fits) > 1:
        names = ", ".join(sorted(candidate.family.name for candidate in fits))
        raise MappingError(f"several registered families have a tree of these leaves: {names}; register one of them")
    if fits:
        return fits[0]
    if not others:
        raise errors[0] if errors else MappingError("no registered family has a variant")
    nearest = min(others, key=lambda candidate: len(candidate.problems))
    raise MappingError(
        f"{nearest.family.name}: no variant has a tree of these leaves; nearest is {dict(nearest.variant)}: "
        f"{some(nearest.problems, separator='; ')}"
    )


def _variants(family: Family, leaves: LeafShapes) -> list[Variant]:
    """Return the possible variants of a family for these leaves, each once, with its default switches."""
    try:
        every = [{**variant, **family.variant} for variant in family.variants(leaves)]
    except Exception as error:
        raise MappingError(f"{family.name}: no variants follow from these leaves: {error!r}") from error
    return [variant for at, variant in enumerate(every) if variant not in every[:at]]


def _against(family: Family, config: Mapping[str, Any], variant: Variant, leaves: LeafShapes, stored: Shapes) -> Fit:
    tree = family.describe(config, variant, lambda name, shape: View.tensor(name, shape, UNKNOWN), stored)
    paths = _paths(leaves, tree)
    _, problems = leaf_problems(tree, {path: leaves[name] for name, path in paths.items()})
    return Fit(family, variant, paths, problems)


def _paths(leaves: LeafShapes, tree: Tree) -> dict[str, str]:
    """Return the paths of all leaves in `tree`, by name.

    The paths have one leading `params` more or less than the names if that puts more of them in the tree.
    """
    spellings = [{name: name for name in leaves}, {_COLLECTION + name: name for name in leaves}]
    if all(name.startswith(_COLLECTION) for name in leaves):
        spellings.append({name.removeprefix(_COLLECTION): name for name in leaves})
    best = max((by_same(names, tree) for names in spellings), key=lambda names: len(names.keys() & tree.keys()))
    return {name: path for path, name in best.items()}
