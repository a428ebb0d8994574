"""Which registered family, in which variant, has a tree of the leaves that somebody wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.names import by_same, some
from orbax_safetensors.geometry.view import UNKNOWN, View
from orbax_safetensors.mapping.coverage import leaf_problems
from orbax_safetensors.mapping.family import Family, LeafShapes, Tree, Variant

# Flax's collection of parameters: some trees begin below it, and some have it twice.
_COLLECTION = "params."


@dataclass(frozen=True)
class Fit:
    """A family in a variant, against the leaves that are wanted.

    Attributes:
      paths: in the family's tree, of all leaves by name.
      problems: what differs.
    """

    family: Family
    variant: Variant
    paths: Mapping[str, str]
    problems: Sequence[str]


def fit(families: Sequence[Family], config: Mapping[str, Any], leaves: LeafShapes, *, stored: int) -> Fit:
    """Return the one of `families` that has a tree of exactly these leaves, in the first of its variants that has.

    `stored` is how many tensors there are. Raises `MappingError` if no family has such a tree, with the differences to
    the nearest one, and if several have.
    """
    fits: list[Fit] = []
    others: list[Fit] = []
    errors: list[MappingError] = []
    for family in families:
        for variant in _variants(family, leaves):
            try:
                found = _against(family, config, variant, leaves, stored)
            except MappingError as error:
                errors.append(error)
                continue
            if not found.problems:
                fits.append(found)
                break
            others.append(found)
    if len(fits) > 1:
        names = ", ".join(sorted(one.family.name for one in fits))
        raise MappingError(f"several registered families have a tree of these leaves: {names}; register one of them")
    if fits:
        return fits[0]
    if not others:
        raise errors[0] if errors else MappingError("no registered family has a variant")
    nearest = min(others, key=lambda one: len(one.problems))
    raise MappingError(
        f"{nearest.family.name}: no variant has a tree of these leaves; nearest is {dict(nearest.variant)}: "
        f"{some(nearest.problems, separator='; ')}"
    )


def _variants(family: Family, leaves: LeafShapes) -> list[Variant]:
    """Return the variants of a family that may have such a tree, each once, with the switches that are set."""
    try:
        every = [{**variant, **family.variant} for variant in family.variants(leaves)]
    except Exception as error:
        raise MappingError(f"{family.name}: no variants follow from these leaves: {error!r}") from error
    return [variant for at, variant in enumerate(every) if variant not in every[:at]]


def _against(family: Family, config: Mapping[str, Any], variant: Variant, leaves: LeafShapes, stored: int) -> Fit:
    tree = family.describe(config, variant, lambda name, shape: View.tensor(name, shape, UNKNOWN), stored=stored)
    paths = _paths(leaves, tree)
    _, problems = leaf_problems(tree, {path: leaves[name] for name, path in paths.items()})
    return Fit(family, variant, paths, problems)


def _paths(leaves: LeafShapes, tree: Tree) -> dict[str, str]:
    """Return the paths of all leaves in `tree`, by name.

    The paths have one leading `params` more or less than the names if more of them are in the tree then.
    """
    spellings = [{name: name for name in leaves}, {_COLLECTION + name: name for name in leaves}]
    if all(name.startswith(_COLLECTION) for name in leaves):
        spellings.append({name.removeprefix(_COLLECTION): name for name in leaves})
    found = [by_same(names, tree) for names in spellings]
    best = max(found, key=lambda names: len(names.keys() & tree.keys()))
    return {name: path for path, name in best.items()}
