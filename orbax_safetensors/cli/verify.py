"""`verify`: every check of the format. No JAX and no devices."""

from __future__ import annotations

import argparse

# What `api.verify` returns; the module of the public functions brings JAX with it, which takes longer than the check.
from orbax_safetensors.checkpoint import find_faults, read_checkpoint
from orbax_safetensors.cli.tables import Output


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
