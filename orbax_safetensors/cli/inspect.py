"""`inspect`: what a checkpoint holds, from its headers. No device is started."""

from __future__ import annotations

import argparse
import posixpath
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.files import StoredFile, is_orbax
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.cli import inspect_orbax, inspect_tree
from orbax_safetensors.cli.family import FAMILY_HELP, add_family
from orbax_safetensors.cli.tables import Cell, Output, Size, shape_text
from orbax_safetensors.storage.paths import place

# Broken by hand at 79 columns: argparse leaves these texts as they are.
_DESCRIPTION = """\
Prints name, dtype, shape, bytes and file of every tensor, and totals. With
--family instead the leaves of a model's own tree, and which stored tensors
each is made of. Of a checkpoint of Orbax, the arrays and how they are stored.
Reads headers only."""

_EPILOG = (
    FAMILY_HELP
    + """
columns with --family:
  dtype    of the array that is restored where no other is asked for
  bytes    of that array in memory
  tensors  how many stored tensors it is made of; those that are quantised are
           two, codes and scales
  made of  their names; layers.{0..35} stands for layers.0 to layers.35, and
           {1..35..2} for every second number; or the first name and how many
           more there are. On a terminal they are below the leaf.

with --json, one object:
  path      as given
  tensors   a list of {name, dtype, shape, parameters, bytes, file, offset} in
            file order; offset is that of the first byte in the file
  files     a list of {file, bytes}; bytes is the size of the whole file
  metadata  the free text of the files, {key: text}
  dtypes    {dtype: {tensors, parameters, bytes}}
  totals    {tensors, parameters, bytes, files}

with --family and --json, one object:
  path      as given
  family    its whole name
  variant   the switches that were given, {name: value}
  leaves    a list of {path, dtype, shape, parameters, bytes, tensors}; tensors
            is a list of stored names
  dtypes    {dtype: {leaves, parameters, bytes}}
  unused    names of stored tensors that no leaf uses
  totals    {leaves, parameters, bytes, tensors, unused_tensors}

of a checkpoint of Orbax, with --json, one object:
  path        the directory of the item or of the step
  items       their names; of several, names of arrays begin with them
  arrays      a list of {name, kind, dtype, shape, parameters, bytes,
              chunk_shape, chunks}; bytes is the size in memory, kind is what
              Orbax restores it as
  metadata    what Orbax has recorded of it
  dtypes      {dtype: {arrays, parameters, bytes}}
  file_bytes  of all files; null on an object store
  totals      {arrays, parameters, bytes}
"""
)


def add_parser(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of the command; `add` is that of the whole command line."""
    parser = add(
        "inspect", help="list the tensors of a checkpoint, or a tree's leaves", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("path", metavar="PATH")
    add_family(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace, output: Output) -> int:
    """Prints the tensors of `args.path`, or the leaves that a family makes of them, and totals."""
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


def _print_tensors(checkpoint: Checkpoint, output: Output) -> None:
    """Every tensor. On a terminal files are numbers, explained below the table, to leave room for the names."""
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
    """What `--json` prints; the keys are described in the help of the command."""
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
    """Tensors, parameters and bytes of every dtype, the one with the most bytes first."""
    sums: dict[str, Counter[str]] = {}
    for tensor in checkpoint.tensors.values():
        of = sums.setdefault(tensor.stored_dtype.name, Counter(tensors=0, parameters=0, bytes=0))
        of.update(tensors=1, parameters=prod(tensor.stored_shape), bytes=tensor.nbytes)
    return {name: dict(sums[name]) for name in sorted(sums, key=lambda name: (-sums[name]["bytes"], name))}
