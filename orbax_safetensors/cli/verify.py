"""`verify`: every check of the format. No device is started."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from orbax_safetensors import verify
from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.cli.tables import Printer
from orbax_safetensors.orbax_store import open_step
from orbax_safetensors.orbax_store.leaf import STRING
from orbax_safetensors.storage.paths import place

# argparse leaves this text as it is.
_DESCRIPTION = """\
Checks every header, the size of every file, and the index against the files.
Prints a line for each fault and exits with 1, or one line that says OK and
exits with 0. Does not read data: the format has no checksums. Of a
checkpoint of Orbax, checks that it is finished and that every array opens."""


def add_parser(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return the parser of the command, which `add` has made."""
    parser = add("verify", help="check a checkpoint", description=_DESCRIPTION)
    parser.add_argument("path", metavar="PATH")
    return parser


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print one line for each fault of `args.path`, or that there is none."""
    faults = verify(args.path)
    for fault in faults:
        output.line(str(fault))
    if faults:
        return 1
    if is_orbax(place(args.path)):
        step = open_step(args.path)
        path, what, places = step.path, "Orbax arrays", _count(len(step.items), "item")
        number = sum(leaf.kind != STRING for item in step.items.values() for leaf in item.leaves.values())
    else:
        checkpoint = read_checkpoint(args.path)
        path, what, places = checkpoint.path, "tensors", _count(len(checkpoint.files), "file")
        number = len(checkpoint.tensors)
    output.line(f"{path}: OK, {number:,} {what} in {places}")
    return 0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"
