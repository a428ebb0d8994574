"""`verify`: every check of the format. No device is started."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from orbax_safetensors import SafetensorsOptions
from orbax_safetensors.checkpoint.data import DataCheck
from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.checkpoint.verify import verified
from orbax_safetensors.cli.tables import Printer
from orbax_safetensors.orbax_store import open_step
from orbax_safetensors.orbax_store.leaf import STRING
from orbax_safetensors.storage.paths import place

# argparse leaves this text as it is.
_DESCRIPTION = """\
Checks every header, the size of every file, and the index against the files.
Prints a line for each fault and exits with 1, or one line that says OK and
exits with 0. The format has no checksums, so this does not read data.

With --data, reads every byte, and compares it with the checksums that a save
has recorded, and with the SHA-256 that the Hugging Face Hub has of a file:
for hf:// URLs, its cache, and directories that it was downloaded to. The last
line says what was compared with what. A file with nothing to compare it with
is a fault.

Of a checkpoint of Orbax, and of files that a link or a save has made one,
reads everything that Orbax reads, except chunks of arrays."""


def add_parser(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return the parser of the command, which `add` has made."""
    parser = add("verify", help="check a checkpoint", description=_DESCRIPTION)
    parser.add_argument("path", metavar="PATH")
    parser.add_argument("--data", action="store_true", help="read all data, and compare it with what is known of it")
    return parser


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print one line for each fault of `args.path`, or that there is none."""
    faults, data = verified(args.path, data=args.data, options=SafetensorsOptions())
    for fault in faults:
        output.line(str(fault))
    if data is not None:
        output.line(f"{args.path}: {_compared(data)}")
    if faults:
        return 1
    if is_orbax(place(args.path)):
        step = open_step(args.path)
        path, what, places = step.item_path, "Orbax arrays", _count(len(step.items), "item")
        number = sum(leaf.kind != STRING for item in step.items.values() for leaf in item.leaves.values())
    else:
        checkpoint = read_checkpoint(args.path)
        path, what, places = checkpoint.path, "tensors", _count(len(checkpoint.files), "file")
        number = len(checkpoint.tensors)
    output.line(f"{path}: OK, {number:,} {what} in {places}")
    return 0


def _compared(data: DataCheck) -> str:
    """Return what was compared with what."""
    compared = []
    if data.tensors:
        compared.append(f"{_count(data.tensors, 'tensor')} with the checksums of the save")
    if data.files:
        compared.append(f"{_count(data.files, 'file')} with the SHA-256 of the Hugging Face Hub")
    return f"compared {' and '.join(compared) or 'nothing'}, {data.nbytes:,} bytes read"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"
