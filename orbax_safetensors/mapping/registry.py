"""Which family a checkpoint is restored with: the one that is asked for, or one registered for its architecture."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping.families import FAMILIES
from orbax_safetensors.mapping.family import Family, Variant

# Names in the tree are the names in the files, whatever has been registered.
IDENTITY = Family("identity", (), dict)

_lock = threading.Lock()


class _Registered(NamedTuple):
    family: Family  # what its name stands for
    chosen: Family  # the same with the switches that were registered, for checkpoints of its architectures


# By name. It is replaced and not changed, as other threads look at it meanwhile.
_registered: Mapping[str, _Registered] = {}


def register(families: Iterable[Family | str], variant: Variant | None = None) -> None:
    """Has checkpoints of the families' architectures restored with them; one of the same name is replaced.

    A name stands for one family, or the part before the first dot for all whose names begin with it. Raises
    `MappingError`, and registers nothing, if no family has a name, or none of those of a name can have the variant.
    """
    global _registered
    added: dict[str, _Registered] = {}
    for asked in families:
        named = [asked] if isinstance(asked, Family) else _named(asked, _known())
        errors: list[MappingError] = []
        for family in named:
            try:
                family.check_variant(variant or {})
            except MappingError as error:
                errors.append(error)
        if len(errors) == len(named):
            raise errors[0]
        for family in named:
            added[family.name] = _Registered(family, replace(family, variant={**family.variant, **(variant or {})}))
    with _lock:
        _registered = {**_registered, **added}


def unregister() -> None:
    """Forgets all families that were registered."""
    global _registered
    with _lock:
        _registered = {}


def any_registered() -> bool:
    """Whether a checkpoint that nobody names a family for might have one."""
    return bool(_registered)


def registered_for(config: Mapping[str, Any]) -> list[Family]:
    """Return all families that are registered for a config's architecture, or raise `MappingError` if none is."""
    if not (found := _for(config, [one.chosen for one in _registered.values()])):
        raise MappingError(f"no registered family is for {_described(config)}")
    return found


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
    if asked is None:
        return _one_for(config, [one.chosen for one in _registered.values()], "registered")
    known = _known()
    named = _named(asked, known)
    if asked in known:
        return known[asked]
    found = _one_for(config, named, asked)
    if found is None:
        served = ", ".join(sorted({name for family in named for name in family.architectures}))
        raise MappingError(f"{asked}: no family is for {_described(config)}; there are families for {served}")
    return found


def _known() -> dict[str, Family]:
    """Return all families by name."""
    return {family.name: family for family in FAMILIES} | {name: one.family for name, one in _registered.items()}


def _named(asked: str, known: Mapping[str, Family]) -> list[Family]:
    """Return the family of a name, or all whose names begin with it; raise `MappingError` if there is none."""
    if not isinstance(asked, str):
        raise MappingError(f"expected a family or the name of one, found {asked!r:.80}")
    if asked in known:
        return [known[asked]]
    if not (found := [family for name, family in known.items() if name.startswith(f"{asked}.")]):
        raise MappingError(f"there is no family {asked!r}; there are {', '.join(sorted(known))}")
    return found


def _for(config: Mapping[str, Any], families: Iterable[Family]) -> list[Family]:
    """Return those of `families` that are for a config's architecture."""
    return [family for family in families if any(_is_for(name, config) for name in family.architectures)]


def _one_for(config: Mapping[str, Any], families: Iterable[Family], which: str) -> Family | None:
    """The family among `families` that is for the config's architecture."""
    found = _for(config, families)
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
