"""`inspect` of a checkpoint of Orbax: its arrays, from their metadata."""

from __future__ import annotations

import argparse
from collections import Counter
from math import prod
from typing import Any

from orbax_safetensors.cli.partition import UsageError
from orbax_safetensors.cli.tables import Cell, Printer, Size, shape_text
from orbax_safetensors.orbax_store import OrbaxLeaf, OrbaxStep, array_name, open_step
from orbax_safetensors.orbax_store.leaf import STRING


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print the arrays of `args.path`, with its scalars, and totals."""
    step = open_step(args.path)
    if args.family is not None or args.variant:
        raise UsageError("--family is for safetensors, and PATH is a checkpoint of Orbax")
    document = _document(step)
    if args.json:
        output.json(document)
        return 0
    output.table(
        ("name", "kind", "dtype", "shape", "bytes", "chunk", "chunks"),
        (
            (
                array["name"],
                array["kind"],
                array["dtype"],
                shape_text(array["shape"]),
                Size(array["bytes"]),
                shape_text(array["chunk_shape"]),
                array["chunks"],
            )
            for array in document["arrays"]
        ),
    )
    if len(document["dtypes"]) > 1:
        output.table(
            ("dtype", "arrays", "parameters", "bytes"),
            ((name, of["arrays"], of["parameters"], Size(of["bytes"])) for name, of in document["dtypes"].items()),
        )
    totals = document["totals"]
    facts: list[tuple[str, Cell]] = [
        ("path", document["path"]),
        ("arrays", totals["arrays"]),
        ("parameters", totals["parameters"]),
        ("bytes", Size(totals["bytes"])),
    ]
    if document["file_bytes"] is not None:
        facts += [("bytes of files", Size(document["file_bytes"]))]
    output.facts(facts)
    return 0


def _document(step: OrbaxStep) -> dict[str, Any]:
    """Return what `--json` prints; `docs/json.md` explains the keys."""
    arrays = [
        _array(array_name(step.items, name, key), leaf)
        for name, item in step.items.items()
        for key, leaf in item.leaves.items()
        if leaf.kind != STRING
    ]
    sums: dict[str, Counter[str]] = {}
    for array in arrays:
        of = sums.setdefault(array["dtype"], Counter(arrays=0, parameters=0, bytes=0))
        of.update(arrays=1, parameters=array["parameters"], bytes=array["bytes"])
    return {
        "path": step.item_path,
        "items": [name for name in step.items if name],
        "arrays": arrays,
        "metadata": step.metadata,
        "dtypes": {name: dict(sums[name]) for name in sorted(sums, key=lambda name: (-sums[name]["bytes"], name))},
        "file_bytes": step.stored_bytes(),
        "totals": {key: sum(of[key] for of in sums.values()) for key in ("arrays", "parameters", "bytes")},
    }


def _array(name: str, leaf: OrbaxLeaf) -> dict[str, Any]:
    parameters = prod(leaf.shape)
    return {
        "name": name,
        "kind": leaf.kind,
        "dtype": leaf.dtype.name,
        "shape": list(leaf.shape),
        "parameters": parameters,
        "bytes": parameters * leaf.dtype.itemsize,
        "chunk_shape": list(leaf.chunk_shape),
        "chunks": prod(leaf.grid),
    }
