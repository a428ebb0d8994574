"""`verify`: every check of the format. No device is started."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from orbax_safetensors.checkpoint import find_faults, read_checkpoint
from orbax_safetensors.cli.tables import Output

# Broken by hand at 79 columns: argparse leaves these texts as they are.
_DESCRIPTION = """\
Checks every header, the size of every file, and the index against the files.
Prints a line for each fault and exits with 1, or one line that says OK and
exits with 0. Data is not read: the format has no checksums."""


def add_parser(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of the command; `add` is that of the whole command line."""
    parser = add("verify", help="check a checkpoint", description=_DESCRIPTION)
    parser.add_argument("path", metavar="PATH")
    return parser


def run(args: argparse.Namespace, output: Output) -> int:
    """Prints one line for each fault of `args.path`, or that there is none."""
    faults = find_faults(args.path)
    for fault in faults:
        output.line(str(fault))
    if faults:
        return 1
    checkpoint = read_checkpoint(args.path)
    files = len(checkpoint.files)
    output.line(
        f"{checkpoint.path}: OK, {len(checkpoint.tensors):,} tensors in {files:,} file{'s' if files != 1 else ''}"
    )
    return 0
