"""The tree that a family makes of a config alone, without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbax_safetensors.geometry.view import UNKNOWN, View
from orbax_safetensors.mapping.family import Family, Tree, Variant


def tree_of_config(
    family: Family, config: Mapping[str, Any], variant: Variant
) -> tuple[Tree, dict[str, tuple[int, ...]]]:
    """Return the tree, and the shapes of the tensors that the family asks for by name.

    Dtypes in its views are unknown. Raises `MappingError` if no tree follows from the config and the variant.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def bind(name: str, shape: tuple[int, ...]) -> View:
        shapes[name] = shape
        return View.tensor(name, shape, UNKNOWN)

    return family.describe(config, variant, bind), shapes
