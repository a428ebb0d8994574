"""The family of a checkpoint: the requested family, or a family registered for the checkpoint's architecture."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping.architectures import architecture_text, is_for
from orbax_safetensors.mapping.families import FAMILIES
from orbax_safetensors.mapping.family import NO_CONFIG, SAVE_CONFIG, Family, Variant, switches_of

# Which family is for an adapter depends on its base model, which the adapter's config does not describe.
_ADAPTERS = "pass family='maxtext.lora' with variant={'base': ...}, or ost.mapping.lora(...)"

# Names in the tree are the names in the files, whatever families are registered.
IDENTITY = Family("identity", (), dict)

_LISTED = 4  # names in a message

_lock = threading.Lock()


class _RegisteredFamily(NamedTuple):
    family: Family  # the family of this name
    chosen: Family  # the same with the registered switches, for checkpoints of its architectures


# By name. Replaced and never changed, as other threads may be reading it.
_registered: Mapping[str, _RegisteredFamily] = {}


def register(families: Iterable[Family | str], variant: Variant | None = None) -> None:
    """Register families for restores of checkpoints of their architectures; replace families of the same name.

    A name stands for a family, and the part before the first dot for all families whose names begin with this part.
    Raises `MappingError`, and registers nothing, if no family has a name, or if no family of a name can have the
    variant.
    """
    global _registered
    variant = switches_of(variant)
    added: dict[str, _RegisteredFamily] = {}
    for requested in families:
        matches = [requested] if isinstance(requested, Family) else _by_name(requested, _known())
        errors: list[MappingError] = []
        for family in matches:
            try:
                family.check_variant(variant)
            except MappingError as error:
                errors.append(error)
        if len(errors) == len(matches):
            raise errors[0]
        for family in matches:
            added[family.name] = _RegisteredFamily(family, replace(family, variant={**family.variant, **variant}))
    with _lock:
        _registered = {**_registered, **added}


def unregister() -> None:
    """Forget all registered families."""
    global _registered
    with _lock:
        _registered = {}


def any_registered() -> bool:
    """Return whether a checkpoint might have a family if nobody names one."""
    return bool(_registered)


def registered_for(config: Mapping[str, Any]) -> list[Family]:
    """Return all families that are registered for a config's architecture; `MappingError` if there are none."""
    if not (families := _for(config, _chosen())):
        raise MappingError(f"no registered family is for {architecture_text(config)}")
    return families


def find(family: Family | str | None, config: Mapping[str, Any], *, saves: bool = False) -> Family | None:
    """Return the family for a checkpoint with this `config.json` ({} without one); None for `IDENTITY`.

    `family` is a family, its name, or the part of the name before the first dot: the config's architecture then decides
    among the families whose names begin with this part. If it is None, returns the family that is registered for the
    architecture, or None. Messages to a caller that `saves` say where its config comes from. Raises `MappingError` if
    no family has the name, or if none or several are for the architecture.
    """
    if family in (IDENTITY, IDENTITY.name):
        return None
    if isinstance(family, Family):
        return family
    if family is None:
        return _single_for(config, _chosen(), "registered")
    known = _known()
    matches = _by_name(family, known)
    if family in known:
        return known[family]
    single = _single_for(config, matches, family)
    if single is None:
        advice = SAVE_CONFIG if saves else NO_CONFIG
        if config:
            served = sorted({name for match in matches for name in match.architectures})
            names = ", ".join(match.name for match in matches)
            advice = f"there are families for {_few(served)}" if served else f"pass the whole name of one: {names}"
        if "peft_type" in config:
            advice = _ADAPTERS
        raise MappingError(f"{family}: no family is for {architecture_text(config)}; {advice}")
    return single


def known_for(config: Mapping[str, Any]) -> list[Family]:
    """Return all families that are for a config's architecture; `MappingError` if there are none."""
    if not (families := _for(config, known())):
        advice = f"; {_ADAPTERS}" if "peft_type" in config else ""
        raise MappingError(f"no family is for {architecture_text(config)}{advice}")
    return families


def known() -> list[Family]:
    """Return all families."""
    return list(_known().values())


def _chosen() -> list[Family]:
    """Return the registered families with their registered switches."""
    return [registered.chosen for registered in _registered.values()]


def _known() -> dict[str, Family]:
    """Return all families by name."""
    registered = {name: registered.family for name, registered in _registered.items()}
    return {family.name: family for family in FAMILIES} | registered


def _by_name(name: str, known: Mapping[str, Family]) -> list[Family]:
    """Return the family of a name, or all families whose names begin with it; `MappingError` if there is none."""
    if not isinstance(name, str):
        advice = ""
        if callable(name):
            advice = "; wrap the function: ost.mapping.Family('mine.model', ('ArchitectureOfTheConfig',), function)"
        raise MappingError(f"expected a family or the name of one, found {name!r:.80}{advice}")
    if name in known:
        return [known[name]]
    if not (families := [family for full_name, family in known.items() if full_name.startswith(f"{name}.")]):
        raise MappingError(f"there is no family {name!r:.80}{_similar(name, known)}")
    return families


def _similar(name: str, known: Mapping[str, Family]) -> str:
    """Return what a message says of the families whose names, or the parts before or after the dot, are similar."""
    meant: dict[str, list[str]] = {}
    for family in sorted(known):
        convention, _, part = family.partition(".")
        meant[family.lower()], meant[convention.lower()] = [family], [convention]
        meant.setdefault(part.lower(), []).append(family)
    spelling = name.lower()
    spellings = [spelling] if spelling in meant else difflib.get_close_matches(spelling, meant, n=3, cutoff=0.8)
    if not spellings:
        return f"; there are {_few(sorted({name.partition('.')[0] for name in known}))}"
    return f" (nearest: {', '.join(repr(family) for spelling in spellings for family in meant[spelling])})"


def _few(names: Sequence[str]) -> str:
    """Return some of these names of families or architectures for a message, and how to see all."""
    more = " and more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}; `orbax-safetensors families` lists all"


def _for(config: Mapping[str, Any], families: Iterable[Family]) -> list[Family]:
    """Return the `families` that are for a config's architecture, and for this model of it."""
    return [family for family in families if is_for(family, config)]


def _single_for(config: Mapping[str, Any], families: Iterable[Family], which: str) -> Family | None:
    """Return the only family among `families` that is for the config's architecture; None if there is none."""
    matches = _for(config, families)
    if len(matches) > 1:
        names = ", ".join(sorted(family.name for family in matches))
        raise MappingError(
            f"{which}: several families are for {architecture_text(config)}: {names}; pass family= to choose"
        )
    return matches[0] if matches else None
