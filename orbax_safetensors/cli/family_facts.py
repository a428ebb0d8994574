"""What is printed of the family that a command used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbax_safetensors import Checkpoint
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.cli.arguments import switches_text
from orbax_safetensors.cli.tables import Facts
from orbax_safetensors.mapping import registry


def full_name(checkpoint: Checkpoint, name: str) -> str:
    """Return the name of the family that `checkpoint` was opened with."""
    family = registry.find(name, read_config(checkpoint))
    return name if family is None else family.name


def family_facts(name: str | None, switches: Mapping[str, Any]) -> Facts:
    """Return what is printed of the family that was used: nothing without one."""
    return [] if name is None else [("family", f"{name} {switches_text(switches)}".strip())]
