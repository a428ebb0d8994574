"""`inspect`: what a checkpoint holds, from its headers. No JAX and no devices."""

from __future__ import annotations

import argparse
import posixpath
from collections import Counter
from math import prod
from typing import Any

from orbax_safetensors.checkpoint import Checkpoint, StoredFile, StoredTensor, open_checkpoint
from orbax_safetensors.cli.tables import Output, Size, shape_text


def run(args: argparse.Namespace, output: Output) -> int:
    """Prints the tensors of `args.path`, and totals."""
    checkpoint = open_checkpoint(args.path)
    if args.json:
        output.json(_document(checkpoint))
        return 0
    output.table(
        ("name", "dtype", "shape", "bytes", "file"),
        (
            (name, tensor.entry.dtype.name, shape_text(tensor.entry.shape), Size(tensor.entry.nbytes), file)
            for name, tensor, file in _rows(checkpoint)
        ),
    )
    dtypes = _dtypes(checkpoint)
    if len(dtypes) > 1:
        output.table(
            ("dtype", "tensors", "parameters", "bytes"),
            ((name, of["tensors"], of["parameters"], Size(of["bytes"])) for name, of in dtypes.items()),
        )
    totals = _totals(checkpoint)
    output.facts(
        [
            ("tensors", totals["tensors"]),
            ("parameters", totals["parameters"]),
            ("bytes", Size(totals["bytes"])),
            ("files", totals["files"]),
        ]
    )
    return 0


def _document(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `--json` prints; the keys are described in the help of the command."""
    return {
        "path": checkpoint.path,
        "tensors": [
            {
                "name": name,
                "dtype": tensor.entry.dtype.name,
                "shape": list(tensor.entry.shape),
                "parameters": prod(tensor.entry.shape),
                "bytes": tensor.entry.nbytes,
                "file": file,
                "offset": checkpoint.location(name)[1],
            }
            for name, tensor, file in _rows(checkpoint)
        ],
        "files": [{"file": _name(file), "bytes": file.header.file_bytes} for file in checkpoint.files],
        "metadata": checkpoint.metadata,
        "dtypes": _dtypes(checkpoint),
        "totals": _totals(checkpoint),
    }


def _rows(checkpoint: Checkpoint) -> list[tuple[str, StoredTensor, str]]:
    files = [_name(file) for file in checkpoint.files]
    return [(name, tensor, files[tensor.file]) for name, tensor in checkpoint.tensors.items()]


def _name(file: StoredFile) -> str:
    return posixpath.basename(file.path)


def _totals(checkpoint: Checkpoint) -> dict[str, int]:
    return {
        "tensors": len(checkpoint.tensors),
        "parameters": sum(prod(tensor.entry.shape) for tensor in checkpoint.tensors.values()),
        "bytes": checkpoint.nbytes,
        "files": len(checkpoint.files),
    }


def _dtypes(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Tensors, parameters and bytes of every dtype, the one with the most bytes first."""
    sums: dict[str, Counter[str]] = {}
    for tensor in checkpoint.tensors.values():
        entry = tensor.entry
        of = sums.setdefault(entry.dtype.name, Counter(tensors=0, parameters=0, bytes=0))
        of.update(tensors=1, parameters=prod(entry.shape), bytes=entry.nbytes)
    return {name: dict(sums[name]) for name in sorted(sums, key=lambda name: (-sums[name]["bytes"], name))}
