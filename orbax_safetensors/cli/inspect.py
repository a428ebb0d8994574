"""`inspect`: what a checkpoint holds, from its headers. No device is started."""

from __future__ import annotations

import argparse
import posixpath
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from orbax_safetensors import Checkpoint
from orbax_safetensors.checkpoint.files import StoredFile, is_orbax
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.cli import inspect_orbax, inspect_tree
from orbax_safetensors.cli.family import add_family
from orbax_safetensors.cli.tables import Cell, Printer, Size, shape_text
from orbax_safetensors.storage.paths import place

# argparse leaves this text as it is.
_DESCRIPTION = """\
Lists name, dtype, shape, bytes and file of every tensor. With --family, lists
the leaves of a model's own tree, and which stored tensors each is made of. For
a checkpoint of Orbax, lists the arrays and their chunks. Reads headers only."""


def add_parser(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return the parser of the command, which `add` has made."""
    parser = add("inspect", help="list the tensors of a checkpoint, or a tree's leaves", description=_DESCRIPTION)
    parser.add_argument("path", metavar="PATH")
    add_family(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print the tensors of `args.path`, or the leaves that a family makes of them, and totals."""
    if is_orbax(place(args.path)):
        return inspect_orbax.run(args, output)
    if args.family is not None or args.variant:
        return inspect_tree.run(args, output)
    checkpoint = read_checkpoint(args.path)
    if args.json:
        output.json(_document(checkpoint))
        return 0
    _print_tensors(checkpoint, output)
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


def _print_tensors(checkpoint: Checkpoint, output: Printer) -> None:
    """Print every tensor. On a terminal files are numbers, explained below the table, to leave room for the names."""
    files = [_name(file) for file in checkpoint.files]

    def rows(file: Sequence[Cell]) -> Iterator[tuple[Cell, ...]]:
        for name, tensor in checkpoint.tensors.items():
            yield (
                name,
                tensor.stored_dtype.name,
                shape_text(tensor.stored_shape),
                Size(tensor.nbytes),
                file[tensor.file],
            )

    headings = ("name", "dtype", "shape", "bytes", "file")
    if not output.for_people:
        output.table(headings, rows(files))
        return
    if len(files) > 1:
        output.table(headings, rows(range(1, len(files) + 1)))
    else:
        output.table(headings[:-1], (row[:-1] for row in rows(files)))
    tensors = Counter(tensor.file for tensor in checkpoint.tensors.values())
    output.table(
        ("file", "name", "tensors", "bytes"),
        (
            (number + 1, files[number], tensors[number], Size(file.header.file_bytes))
            for number, file in enumerate(checkpoint.files)
        ),
    )


def _document(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `--json` prints; `docs/json.md` explains the keys."""
    return {
        "path": checkpoint.path,
        "tensors": [
            {
                "name": name,
                "dtype": tensor.stored_dtype.name,
                "shape": list(tensor.stored_shape),
                "parameters": prod(tensor.stored_shape),
                "bytes": tensor.nbytes,
                "file": _name(checkpoint.files[tensor.file]),
                "offset": checkpoint.location(name).begin,
            }
            for name, tensor in checkpoint.tensors.items()
        ],
        "files": [{"file": _name(file), "bytes": file.header.file_bytes} for file in checkpoint.files],
        "metadata": checkpoint.metadata,
        "dtypes": _dtypes(checkpoint),
        "totals": _totals(checkpoint),
    }


def _name(file: StoredFile) -> str:
    return posixpath.basename(file.path)


def _totals(checkpoint: Checkpoint) -> dict[str, int]:
    return {
        "tensors": len(checkpoint.tensors),
        "parameters": sum(prod(tensor.stored_shape) for tensor in checkpoint.tensors.values()),
        "bytes": checkpoint.nbytes,
        "files": len(checkpoint.files),
    }


def _dtypes(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Return tensors, parameters and bytes of every dtype, the one with the most bytes first."""
    sums: dict[str, Counter[str]] = {}
    for tensor in checkpoint.tensors.values():
        of = sums.setdefault(tensor.stored_dtype.name, Counter(tensors=0, parameters=0, bytes=0))
        of.update(tensors=1, parameters=prod(tensor.stored_shape), bytes=tensor.nbytes)
    return {name: dict(sums[name]) for name in sorted(sums, key=lambda name: (-sums[name]["bytes"], name))}
