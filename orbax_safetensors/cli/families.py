"""`families`: which families there are, for which architectures, and their switches. No device is started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from orbax_safetensors import MappingError
from orbax_safetensors.cli.arguments import UsageError, switches_text
from orbax_safetensors.cli.tables import Printer
from orbax_safetensors.format.names import hint
from orbax_safetensors.mapping import Family, registry
from orbax_safetensors.mapping.architectures import architecture_text
from orbax_safetensors.mapping.family import Shapes


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print the families for `args.model`, or all."""
    model = args.model
    document: dict[str, Any]
    if model is not None and ("/" in model or os.path.exists(model)):
        document = _of_checkpoint(model)
    else:
        document = {"families": [_family_document(family, family.switches) for family in _for_architecture(model)]}
    families = document["families"]
    families.sort(key=itemgetter("family"))
    if args.json:
        output.json(document)
        return 0
    output.table(
        ("family", "switches", "architectures"),
        [(family["family"], switches_text(family["switches"])) for family in families],
        [family["architectures"] or ["any"] for family in families],
    )
    if "config" in document:
        shorter = [(f"--family {name}", family) for name, family in sorted(document["names"].items())]
        output.facts([("config.json has", document["config"]), *shorter])
    return 0


def _for_architecture(architecture: str | None) -> list[Family]:
    if architecture is None:
        return registry.known()
    families = [family for family in registry.known() if architecture in family.architectures]
    if not families:
        if any(architecture in (family.name, family.name.partition(".")[0]) for family in registry.known()):
            example = "an architecture such as Qwen3ForCausalLM, or a checkpoint"
            raise UsageError(f"{architecture!r} is a family; MODEL is {example}")
        known = sorted({name for family in registry.known() for name in family.architectures})
        raise UsageError(f"no family is for {architecture!r}{hint(architecture, known)}; without MODEL, all are listed")
    return families


def _of_checkpoint(path: str) -> dict[str, Any]:
    """Return the families for a checkpoint, what its config says, and the family that each shorter name stands for."""
    # These import Orbax, which a list of all families need not wait for.
    from orbax_safetensors.checkpoint.config import CONFIG_NAME, parse_config, read_config
    from orbax_safetensors.checkpoint.from_config import config_directory
    from orbax_safetensors.checkpoint.read import read_checkpoint
    from orbax_safetensors.storage.schemes import store_of

    stored: Shapes | None = None
    if (directory := config_directory(path)) is None:
        checkpoint = read_checkpoint(path)
        path, config, stored = checkpoint.path, read_config(checkpoint), checkpoint.shapes
    else:
        store, path = store_of(f"{directory}/{CONFIG_NAME}", None)
        config = parse_config(store.open(path))
    try:
        families = registry.known_for(config)
    except MappingError as error:
        raise MappingError(f"{path}: {error}") from error
    shorter = [family.name.partition(".")[0] for family in families if "." in family.name]
    # Two families of one convention are told apart by their whole names alone.
    names = {name: f"{name}.{rest}" for name, _, rest in (family.name.partition(".") for family in families)}
    return {
        "families": [_family_document(family, family.use(config, stored, {}).variant) for family in families],
        "config": architecture_text(config),
        "names": {name: family for name, family in names.items() if shorter.count(name) == 1},
    }


def _family_document(family: Family, switches: Mapping[str, Any]) -> dict[str, Any]:
    return {"family": family.name, "architectures": list(family.architectures), "switches": dict(switches)}
