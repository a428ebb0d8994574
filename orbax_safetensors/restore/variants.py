"""A request and the checkpoint as a family sees it, in the variant whose tree the request is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.family import FamilyLike, mapped
from orbax_safetensors.checkpoint.variants import nearest_variant, with_variant
from orbax_safetensors.options import Dequantize
from orbax_safetensors.restore.request import Request, leaf_shapes, resolve


def resolved(
    stored: Checkpoint,
    item: Any,
    restore_args: Any,
    *,
    partial: bool,
    family: FamilyLike,
    variant: Mapping[str, Any] | None,
    dequantize: Dequantize,
) -> tuple[Checkpoint, Request]:
    """Return the checkpoint as its family sees it, if it has one, and the request, checked against it.

    Switches that `variant` does not pass follow from names and shapes of the leaves if the family's defaults do not
    fit. Raises `MappingError` or `TensorMismatchError`, as `mapped` and `resolve`.
    """

    def attempt(switches: Mapping[str, Any]) -> tuple[Checkpoint, Request]:
        checkpoint = mapped(stored, family, switches, complete=not partial, dequantize=dequantize)
        return checkpoint, resolve(checkpoint, item, restore_args, partial=partial)

    def nearest(passed: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return nearest_variant(stored, family, leaf_shapes(item, restore_args), passed)

    return with_variant(attempt, variant, nearest)
