"""Which model a config is of, for families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbax_safetensors.format.names import some
from orbax_safetensors.mapping.family import Family


def is_for(family: Family, config: Mapping[str, Any]) -> bool:
    """Return whether a family is for a config's architecture, and for this model of it."""
    if not any(_is_of(architecture, config) for architecture in family.architectures):
        return False
    with family.failing("cannot tell from this config.json if it applies"):
        return family.applies_to(config)


def architecture_of(family: Family, config: Mapping[str, Any]) -> str | None:
    """Return the architecture of a config that names none: the only one of the family for its model; else None."""
    named = [name for name in family.architectures if "model_type" not in config or _is_of(name, config)]
    return named[0] if len(named) == 1 else None


def architecture_text(config: Mapping[str, Any]) -> str:
    """Return how a message names a config's architecture."""
    if architectures := config.get("architectures"):
        names = architectures if isinstance(architectures, list | tuple) else [architectures]
        return f"architecture {some(names)}"
    if "model_type" in config:
        return f"model_type {config['model_type']}"
    if "peft_type" in config:
        return "an adapter of PEFT"
    return "a checkpoint without config.json" if not config else "a config.json that names no architecture"


def _is_of(architecture: str, config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    if isinstance(architectures, list | tuple) and architectures:
        return architecture in architectures
    # Some configs name only the model, such as `gemma3` for `Gemma3ForConditionalGeneration`.
    model = str(config.get("model_type", "")).removesuffix("_text").replace("_", "")
    return architecture.split("For")[0].replace("_", "").lower() == model
