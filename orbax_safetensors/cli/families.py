"""`families`: which families there are, for which architectures, and their switches. No device is started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

from orbax_safetensors import MappingError
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.cli.arguments import UsageError, switches_text
from orbax_safetensors.cli.tables import Printer
from orbax_safetensors.format.names import hint
from orbax_safetensors.mapping import Family, registry

# argparse leaves this text as it is.
_DESCRIPTION = """\
Lists families: what --family takes, the architectures that each is for, and
its switches with their defaults, as --variant takes them. null leaves the
choice to the checkpoint.

Of a checkpoint, lists the families for the architecture that its config.json
names, with the switches that its tensors and its config lead to."""


def add_parser(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return the parser of the command, which `add` has made."""
    parser = add("families", help="list the trees that a model can become", description=_DESCRIPTION)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a checkpoint's PATH, or an architecture, as Qwen3ForCausalLM"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print the families for `args.model`, or all."""
    families = _families(args.model)
    if args.json:
        output.json({"families": families})
        return 0
    output.listing(
        ("family", "switches", "architectures"),
        [(family["family"], switches_text(family["switches"])) for family in families],
        [family["architectures"] or ["any"] for family in families],
    )
    return 0


def _families(model: str | None) -> list[dict[str, Any]]:
    if model is None:
        return [_described(family, family.switches) for family in registry.known()]
    if "/" in model or os.path.exists(model):
        checkpoint = read_checkpoint(model)
        config = read_config(checkpoint)
        try:
            families = registry.known_for(config)
        except MappingError as error:
            raise MappingError(f"{checkpoint.path}: {error}") from error
        return [_described(family, family.use(config, checkpoint.shapes, {}).variant) for family in families]
    families = [family for family in registry.known() if model in family.architectures]
    if not families:
        architectures = sorted({name for family in registry.known() for name in family.architectures})
        raise UsageError(f"no family is for {model!r}{hint(model, architectures)}; without MODEL, all are listed")
    return [_described(family, family.switches) for family in families]


def _described(family: Family, switches: Mapping[str, Any]) -> dict[str, Any]:
    return {"family": family.name, "architectures": list(family.architectures), "switches": dict(switches)}
