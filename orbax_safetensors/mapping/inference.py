"""Find the registered family, and the variant of a family, whose tree has the requested leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.names import by_path
from orbax_safetensors.geometry.view import UNKNOWN, View
from orbax_safetensors.mapping.coverage import leaf_problems, problems_text
from orbax_safetensors.mapping.family import Family, LeafShapes, Shapes, Variant


@dataclass(frozen=True)
class Fit:
    """A comparison of a family's variant with the requested leaves.

    Attributes:
      paths: the path of each leaf in the family's tree, by the leaf's name.
      missing: what the family's tree has and the leaves do not.
      wrong: what the leaves have and the family's tree does not.
    """

    family: Family
    variant: Variant
    paths: Mapping[str, str]
    missing: Sequence[str]
    wrong: Sequence[str]

    @property
    def problems(self) -> list[str]:
        """Return all differences."""
        return [*self.missing, *self.wrong]


def fit(families: Sequence[Family], config: Mapping[str, Any], leaves: LeafShapes, stored: Shapes) -> Fit:
    """Return the family whose tree has exactly these leaves, with its first variant that has them.

    `stored` are the shapes of the stored tensors. Raises `MappingError` if no family has such a tree, with the
    differences to the nearest tree, and if several families have one.
    """
    fits: list[Fit] = []
    others: list[Fit] = []
    errors: list[MappingError] = []
    for family in families:
        shapes = _renamed(family, config, stored)
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
        raise errors[0] if errors else MappingError("no registered family has a tree of these leaves")
    nearest = min(others, key=lambda candidate: len(candidate.problems))
    raise MappingError(
        f"{nearest.family.name}: no variant has a tree of these leaves; nearest is {dict(nearest.variant)}: "
        f"{problems_text(nearest.missing, nearest.wrong)}"
    )


def nearest_variant(
    family: Family, config: Mapping[str, Any], leaves: LeafShapes, passed: Variant, stored: Shapes | None
) -> Variant | None:
    """Return the variant with the `passed` switches whose tree has most of these leaves, and then the fewest others.

    `stored` is as for `fit`, or None without a checkpoint. Returns None if no variant has a tree for this config.
    """
    family = replace(family, variant={**family.variant, **passed})
    shapes = None if stored is None else _renamed(family, config, stored)
    candidates: list[Fit] = []
    for variant in _variants(family, leaves):
        with suppress(MappingError):
            candidates.append(_against(family, config, variant, leaves, shapes))
            if not candidates[-1].problems:
                return variant
    nearest = min(candidates, key=lambda candidate: (len(candidate.wrong), len(candidate.missing)), default=None)
    return None if nearest is None else nearest.variant


def _variants(family: Family, leaves: LeafShapes) -> list[Variant]:
    """Return the possible variants of a family for these leaves, each once, with its default switches."""
    with family.failing("no variants follow from these leaves"):
        every = [{**variant, **family.variant} for variant in family.variants(leaves)]
    return [variant for at, variant in enumerate(every) if variant not in every[:at]]


def _renamed(family: Family, config: Mapping[str, Any], stored: Shapes) -> Shapes:
    return {name: stored[tensor] for tensor, name in family.renamed(stored, config).items()}


def _against(
    family: Family, config: Mapping[str, Any], variant: Variant, leaves: LeafShapes, stored: Shapes | None
) -> Fit:
    def bind(name: str, shape: tuple[int, ...]) -> View:
        return View.tensor(name, shape, UNKNOWN)

    tree = family.describe(config, variant, bind, stored, leaves=len(leaves))
    paths = {name: path for path, name in by_path({name: name for name in leaves}, tree).items()}
    _, missing, wrong = leaf_problems(tree, {path: leaves[name] for name, path in paths.items()})
    return Fit(family, variant, paths, missing, wrong)
