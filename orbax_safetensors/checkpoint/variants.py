"""The switches of a family that a caller leaves out: its defaults, or those whose tree has the caller's leaves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.errors import MappingError, SafetensorsError, TensorMismatchError
from orbax_safetensors.mapping import inference, registry
from orbax_safetensors.mapping.family import LeafShapes, Variant, switches_of

_Result = TypeVar("_Result")


def with_variant(
    attempt: Callable[[Variant], _Result], variant: Variant | None, nearest: Callable[[Variant], Variant | None]
) -> _Result:
    """Return what `attempt` makes of a family's switches: those that are passed, and for others what fits.

    Others have the family's defaults, or if these do not fit, the values that are `nearest` to the passed ones. Raises
    what `attempt` raises. If a passed switch is wrong, the error names the variant that would fit.
    """
    passed = switches_of(variant)
    try:
        return attempt(passed)
    except (MappingError, TensorMismatchError) as error:
        refusal = error
    switches = nearest(passed)
    if switches not in (None, passed):
        try:
            return attempt(switches)
        except (MappingError, TensorMismatchError) as error:
            refusal = error
    if passed:
        fitting = {**passed, **(nearest({}) or {})}
        with suppress(SafetensorsError):
            attempt(fitting)
            refusal = type(refusal)(f"{refusal}; this tree is that of variant={fitting}")
    raise refusal


def nearest_variant(checkpoint: Checkpoint, asked: FamilyLike, leaves: LeafShapes, passed: Variant) -> Variant | None:
    """Return the variant of the checkpoint's family with the `passed` switches whose tree is nearest to these leaves.

    Returns None without a family, and if none of its variants has a tree.
    """
    if asked is None and not registry.any_registered():
        return None
    config = read_config(checkpoint)
    try:
        family = registry.find(asked, config)
        if family is None:
            return None
        return inference.nearest_variant(family, config, leaves, passed, checkpoint.shapes)
    except MappingError:
        return None
