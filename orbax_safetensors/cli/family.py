"""Families and their switches as they are written on a command line."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from typing import Any

from orbax_safetensors import Checkpoint
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.cli.partition import UsageError
from orbax_safetensors.cli.tables import Cell
from orbax_safetensors.mapping import registry

_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# As text these would count as true, all of them.
_MISSPELT = {"true", "false", "null", "none", "yes", "no", "on", "off"}


def add_family(parser: argparse.ArgumentParser) -> None:
    """Add `--family` and `--variant`."""
    parser.add_argument("--family", metavar="NAME", help="a model's own tree, as maxtext or maxtext.qwen3")
    parser.add_argument(
        "--variant",
        type=parse_switch,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a switch of the family, as scan_layers=false; repeatable",
    )


def parse_switch(text: str) -> tuple[str, Any]:
    """Parse `scan_layers=false` as name and value. A value that is not a JSON literal is text."""
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value:
        raise UsageError(f"expected KEY=VALUE as in scan_layers=false, found {text!r}")
    if _LITERAL.fullmatch(value):
        return name, json.loads(value)
    if value.lower() in _MISSPELT:
        raise UsageError(f"expected true, false or null in {text!r}, found {value!r}")
    return name, value


def variant(args: argparse.Namespace) -> dict[str, Any]:
    """Return all switches of a command line, which are those of its family."""
    switches: dict[str, Any] = {}
    for name, value in args.variant:
        if name in switches:
            raise UsageError(f"--variant {name} is passed twice")
        switches[name] = value
    if switches and args.family is None:
        raise UsageError("--variant needs a --family")
    return switches


def full_name(checkpoint: Checkpoint, name: str) -> str:
    """Return the name of the family that `checkpoint` was opened with."""
    family = registry.find(name, read_config(checkpoint))
    return name if family is None else family.name


def facts(name: str | None, switches: Mapping[str, Any]) -> list[tuple[str, Cell]]:
    """Return what is printed of the family that was used: nothing without one."""
    return [] if name is None else [("family", f"{name} {switches_text(switches)}".strip())]


def switches_text(switches: Mapping[str, Any]) -> str:
    """Return switches as `--variant` takes them."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in switches.items()
    )
