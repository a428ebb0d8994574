"""Which model a config is of, for families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbax_safetensors.mapping.family import Family


def is_for(family: Family, config: Mapping[str, Any]) -> bool:
    """Return whether a family is for a config's architecture, and for this model of it."""
    if not any(_is_of(architecture, config) for architecture in family.architectures):
        return False
    with family.failing("cannot tell from this config.json if it applies"):
        return family.applies_to(config)


def _is_of(architecture: str, config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    if isinstance(architectures, list | tuple) and architectures:
        return architecture in architectures
    # Some configs name only the model, such as `gemma3` for `Gemma3ForConditionalGeneration`.
    model = str(config.get("model_type", "")).removesuffix("_text").replace("_", "")
    return architecture.split("For")[0].replace("_", "").lower() == model
