"""`inspect --family`: the leaves that a model's own tree has, and the stored tensors that each is made of."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from orbax_safetensors import Checkpoint, open_checkpoint
from orbax_safetensors.cli.braces import in_braces
from orbax_safetensors.cli.family import full_name, switches_text, variant
from orbax_safetensors.cli.tables import Printer, Size, shape_text
from orbax_safetensors.geometry.view import View


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print the leaves that `args.family` makes of `args.path`, and totals."""
    switches = variant(args)
    checkpoint = open_checkpoint(args.path, family=args.family, variant=switches)
    family = full_name(checkpoint, args.family)
    made_of = {path: stored_names(checkpoint, view) for path, view in checkpoint.leaves.items()}
    used = {name for names in made_of.values() for name in names}
    unused = [name for name in checkpoint.tensors if name not in used]
    totals = {
        "leaves": len(checkpoint.leaves),
        "parameters": sum(prod(view.shape) for view in checkpoint.leaves.values()),
        "bytes": sum(map(_nbytes, checkpoint.leaves.values())),
        "tensors": len(used),
        "unused_tensors": len(unused),
    }
    dtypes = _dtypes(checkpoint)
    if args.json:
        # The keys are described in the help of the command.
        output.json(
            {
                "path": checkpoint.path,
                "family": family,
                "variant": switches,
                "leaves": _leaves(checkpoint, made_of),
                "dtypes": dtypes,
                "unused": unused,
                "totals": totals,
            }
        )
        return 0
    output.listing(
        ("leaf", "dtype", "shape", "parameters", "bytes", "tensors", "made of"),
        [
            (
                path,
                view.dtype.name,
                shape_text(view.shape),
                prod(view.shape),
                Size(_nbytes(view)),
                len(made_of[path]),
            )
            for path, view in checkpoint.leaves.items()
        ],
        [[text for text, _ in in_braces(names)] for names in made_of.values()],
    )
    if len(dtypes) > 1:
        output.table(
            ("dtype", "leaves", "parameters", "bytes"),
            ((name, of["leaves"], of["parameters"], Size(of["bytes"])) for name, of in dtypes.items()),
        )
    if unused:
        output.table(("not used",), ((text,) for text, _ in in_braces(unused)))
    output.facts(
        [
            ("family", f"{family} {switches_text(switches)}".strip()),
            ("leaves", totals["leaves"]),
            ("parameters", totals["parameters"]),
            ("bytes", Size(totals["bytes"])),
            ("tensors used", totals["tensors"]),
            ("tensors not used", totals["unused_tensors"]),
        ]
    )
    return 0


def stored_names(checkpoint: Checkpoint, view: View) -> list[str]:
    """Return the tensors of the files that a leaf is made of; those that are quantised are codes and scales."""
    names: dict[str, None] = {}
    for name in map(checkpoint.whole, view.tensors):
        quantized = checkpoint.quantized.get(name)
        names |= dict.fromkeys((name,) if quantized is None else (quantized.codes, quantized.scales))
    return list(names)


def _leaves(checkpoint: Checkpoint, made_of: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    return [
        {
            "path": path,
            "dtype": view.dtype.name,
            "shape": list(view.shape),
            "parameters": prod(view.shape),
            "bytes": _nbytes(view),
            "tensors": made_of[path],
        }
        for path, view in checkpoint.leaves.items()
    ]


def _nbytes(view: View) -> int:
    return prod(view.shape) * view.dtype.itemsize


def _dtypes(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Return leaves, parameters and bytes of every dtype, the one with the most bytes first."""
    sums: dict[str, Counter[str]] = {}
    for view in checkpoint.leaves.values():
        of = sums.setdefault(view.dtype.name, Counter(leaves=0, parameters=0, bytes=0))
        of.update(leaves=1, parameters=prod(view.shape), bytes=_nbytes(view))
    return {name: dict(sums[name]) for name in sorted(sums, key=lambda name: (-sums[name]["bytes"], name))}
