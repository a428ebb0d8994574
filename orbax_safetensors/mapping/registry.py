"""Which family a checkpoint is restored with: the one that is asked for, or one registered for its architecture."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping.families import FAMILIES
from orbax_safetensors.mapping.family import Family

# Names in the tree are the names in the files, whatever has been registered.
IDENTITY = Family("identity", (), dict)

_lock = threading.Lock()
_registered: dict[str, Family] = {}


def register(families: Iterable[Family]) -> None:
    """Has checkpoints of the families' architectures restored with them; one of the same name is replaced."""
    families = list(families)
    for family in families:
        if not isinstance(family, Family):
            raise MappingError(f"expected an orbax_safetensors.mapping.Family to register, found {family!r:.80}")
    with _lock:
        _registered.update((family.name, family) for family in families)


def unregister() -> None:
    """Forgets all families that were registered."""
    with _lock:
        _registered.clear()


def any_registered() -> bool:
    """Whether a checkpoint that nobody names a family for might have one."""
    return bool(_registered)


def find(asked: Family | str | None, config: Mapping[str, Any]) -> Family | None:
    """The family for a checkpoint with this `config.json`, {} where there is none.

    `asked` is a family, its name, or the part of its name before the first dot, which leaves the rest to the config's
    architecture; None finds one that has been registered for the architecture, if any has. There is none for
    `IDENTITY`. Raises `MappingError` where there is none of that name, or none or several for the architecture.
    """
    if asked in (IDENTITY, IDENTITY.name):
        return None
    if isinstance(asked, Family):
        return asked
    known = {family.name: family for family in FAMILIES} | _registered
    if asked is None:
        return _one_for(config, _registered.values(), "registered")
    if not isinstance(asked, str):
        raise MappingError(f"expected a family or the name of one, found {asked!r:.80}")
    if asked in known:
        return known[asked]
    convention = [family for name, family in known.items() if name.startswith(f"{asked}.")]
    if not convention:
        raise MappingError(f"there is no family {asked!r}; there are {', '.join(sorted(known))}")
    found = _one_for(config, convention, asked)
    if found is None:
        served = ", ".join(sorted({name for family in convention for name in family.architectures}))
        raise MappingError(f"{asked}: no family is for {_described(config)}; there are families for {served}")
    return found


def _one_for(config: Mapping[str, Any], families: Iterable[Family], which: str) -> Family | None:
    """The family among `families` that is for the config's architecture."""
    found = [family for family in families if any(_is_for(name, config) for name in family.architectures)]
    if len(found) > 1:
        names = ", ".join(sorted(family.name for family in found))
        raise MappingError(f"{which}: several families are for {_described(config)}: {names}; pass family= to choose")
    return found[0] if found else None


def _is_for(architecture: str, config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    if isinstance(named, list | tuple) and named:
        return architecture in named
    # Some configs name the model alone: `gemma3` is what `Gemma3ForConditionalGeneration` is built of.
    model = str(config.get("model_type", "")).removesuffix("_text").replace("_", "")
    return architecture.split("For")[0].lower() == model


def _described(config: Mapping[str, Any]) -> str:
    """What a config says of its architecture."""
    if config.get("architectures"):
        return f"architectures {config['architectures']}"
    if "model_type" in config:
        return f"model_type {config['model_type']!r}"
    return "a checkpoint without config.json" if not config else "a config.json that names no architecture"
