"""A request and the checkpoint as a family sees it, in the variant whose tree the request is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.family import FamilyLike, mapped, nearest_variant, with_variant
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

    If there is no `variant` and the family's default tree does not have the leaves of the request, the variant follows
    from their names and shapes. Raises `MappingError` or `TensorMismatchError`, as `mapped` and `resolve`.
    """

    def attempt(switches: Mapping[str, Any] | None) -> tuple[Checkpoint, Request]:
        checkpoint = mapped(stored, family, switches, complete=not partial, dequantize=dequantize)
        return checkpoint, resolve(checkpoint, item, restore_args, partial=partial)

    return with_variant(attempt, variant, lambda: nearest_variant(stored, family, leaf_shapes(item, restore_args)))
