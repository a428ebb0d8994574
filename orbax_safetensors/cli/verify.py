"""`verify`: every check of the format. No device is started."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import nullcontext

from orbax_safetensors import Checkpoint, SafetensorsOptions
from orbax_safetensors.checkpoint.data import DataCheck
from orbax_safetensors.checkpoint.verify import verified
from orbax_safetensors.cli.reporter import Reporter
from orbax_safetensors.cli.tables import Printer
from orbax_safetensors.orbax_store import open_step
from orbax_safetensors.orbax_store.leaf import STRING
from orbax_safetensors.storage.paths import absolute_path, is_url


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print one line for each fault of `args.path`, or that there is none."""
    with Reporter(args.command, sys.stderr) if args.data else nullcontext() as reporter:
        faults, data, checkpoint = verified(args.path, data=args.data, options=SafetensorsOptions(progress=reporter))
    if args.json:
        path, checked = (args.path, None) if faults else _checked(args.path, checkpoint)
        compared = None if data is None else {"tensors": data.tensors, "files": data.files, "bytes": data.nbytes}
        output.json(
            {"path": path, "faults": [str(fault) for fault in faults], "compared": compared, "checked": checked}
        )
        return 1 if faults else 0
    for fault in faults:
        output.line(str(fault))
    if data is not None:
        output.line(f"{args.path}: {_compared(data)}")
        if data.unknown and not is_url(absolute_path(args.path)):
            _advise(args.path, output)
    if faults:
        return 1
    path, checked = _checked(args.path, checkpoint)
    (unit, number), (containers, count) = checked.items()
    kind = "Orbax arrays" if unit == "arrays" else unit
    numbers = f"{_count(number, kind.removesuffix('s'))} in {_count(count, containers.removesuffix('s'))}"
    if checkpoint is not None and checkpoint.delta_of is not None:
        numbers += f", a delta of version {checkpoint.delta_of}: apply_delta makes the model"
    output.line(f"{path}: OK, {numbers}")
    return 0


def _checked(path: str, checkpoint: Checkpoint | None) -> tuple[str, dict[str, int]]:
    """Return the path of a valid checkpoint, how many tensors or arrays it has, and in how many files or items.

    It is a checkpoint of Orbax at `path` if `checkpoint` is None.
    """
    if checkpoint is not None:
        return checkpoint.path, {"tensors": len(checkpoint.tensors), "files": len(checkpoint.files)}
    step = open_step(path)
    arrays = sum(leaf.kind != STRING for item in step.items.values() for leaf in item.leaves.values())
    return step.item_path, {"arrays": arrays, "items": len(step.items)}


def _compared(data: DataCheck) -> str:
    """Return what was compared with what."""
    compared = []
    if data.tensors:
        compared.append(f"{_count(data.tensors, 'tensor')} with the checksums of the save")
    if data.files:
        compared.append(f"{_count(data.files, 'file')} with the SHA-256 of the Hugging Face Hub")
    return f"compared {' and '.join(compared) or 'nothing'}, {data.nbytes:,} bytes read"


def _advise(path: str, output: Printer) -> None:
    """Say how to compare files with the Hub, if nothing beside them says what it has."""
    directory = shlex.quote(path if os.path.isdir(path) else os.path.dirname(path) or ".")
    output.line("")
    output.line("To compare files that were downloaded with what the Hugging Face Hub has:")
    output.line(f"  hf cache verify OWNER/NAME --local-dir {directory}")
    output.line("or, without it, the SHA-256 on https://huggingface.co/OWNER/NAME/blob/main/FILE with:")
    output.line(f"  sha256sum {directory}/*.safetensors")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"
