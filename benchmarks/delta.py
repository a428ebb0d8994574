"""Deltas: how long it takes to publish and apply one, in how much memory, and how many bytes it has.

    python benchmarks/delta.py [--quick] [--rounds 5] [--directory DIR] [--json FILE]

Two checkpoints in the shape of Llama 3.2 1B, with the checksums of their saves, of which 1 % of the bfloat16 elements
differ by one bit in the last place, as after a step at a small learning rate. Files are in the page cache. Each version
that `apply_delta` makes has to be the newer checkpoint, byte for byte. Memory is what the process has more at its peak
than before: importing JAX and Orbax alone takes 200 MB.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from checkpoints import add_directory, llama, warm, write
from rich.console import Console
from rich.table import Table

import orbax_safetensors as ost
from orbax_safetensors.format.checksums import CHECKSUMS_NAME, FileChecksums, encode

CHANGED = 0.01
PIECE_BYTES = 2**24
# Targets of a whole run on two cores.
MOST_SECONDS, MOST_BYTES, MOST_SHARE = 6.0, 150e6, 0.02


def change(old: Path, new: Path) -> int:
    """Makes `new` of `old` with other bits in some elements; returns how many of them."""
    rng = np.random.default_rng(1)
    changed = 0
    new.mkdir()
    for stored in ost.open_checkpoint(old).files:
        path = Path(stored.path)
        with open(path, "rb") as source, open(new / path.name, "wb") as target:
            target.write(source.read(stored.header.data_start))
            while piece := bytearray(source.read(PIECE_BYTES)):
                elements = np.frombuffer(piece, np.uint16)
                mask = rng.random(elements.size, np.float32) < CHANGED
                elements ^= mask
                changed += int(np.count_nonzero(mask))
                target.write(piece)
    for index in old.glob("*.index.json"):
        (new / index.name).write_bytes(index.read_bytes())
    return changed


def record(directory: Path) -> None:
    """Writes the checksums that a save would have recorded."""
    files = {}
    for stored in ost.open_checkpoint(directory).files:
        content = np.memmap(stored.path, np.uint8, "r")
        begin = stored.header.data_start
        tensors = {
            name: zlib.crc32(content[begin + entry.begin : begin + entry.end])
            for name, entry in stored.header.tensors.items()
        }
        files[Path(stored.path).name] = FileChecksums(stored.fingerprint, tensors)
    (directory / CHECKSUMS_NAME).write_bytes(encode(files))


def resident(kind: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{kind}:"))


def measured(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    memory, cpu, wall = resident("VmRSS"), time.process_time(), time.perf_counter()
    result = call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return result, {"seconds": wall, "cpu_seconds": cpu, "added_bytes": resident("VmHWM") - memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small checkpoint and one round")
    parser.add_argument("--rounds", type=int, default=5)
    add_directory(parser)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = llama(layers=2, hidden=256, feed_forward=512, vocabulary=2048) if args.quick else llama()
    runs: dict[str, list[dict[str, float]]] = {"delta": [], "apply_delta": [], "identical": []}
    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        old, new, published, made = (Path(root) / name for name in ("old", "new", "published", "made"))
        old.mkdir()
        write(old, shape, files=1)
        changed = change(old, new)
        for directory in (old, new):
            record(directory)
        for number in range(2 if args.quick else args.rounds + 1):
            for directory in (old, new):
                warm(directory)
            for place in (published, made):
                rmtree(place, ignore_errors=True)
            done, delta = measured(lambda: ost.delta(old, new, published, version=1))
            assert (done.changed_elements, done.version) == (changed, 1)
            _, apply = measured(lambda: ost.apply_delta(old, done.path, made))  # noqa: B023
            names = sorted(path.name for path in new.glob("*safetensors*"))
            assert filecmp.cmpfiles(new, made, names, shallow=False) == (names, [], [])
            same, identical = measured(lambda: ost.delta(new, new, published, version=2))
            assert (same.changed_elements, same.delta_bytes) == (0, 0)
            if number:  # the first round warms up
                for name, run in zip(runs, (delta, apply, identical), strict=True):
                    runs[name].append(run)
    console = Console(width=120)
    table = Table(f"{done.model_bytes / 1e9:.2f} GB", "seconds", "CPU seconds", "MB of memory added")
    medians = {name: {key: statistics.median(run[key] for run in of) for key in of[0]} for name, of in runs.items()}
    for name, median in medians.items():
        table.add_row(
            name,
            f"{median['seconds']:.2f}",
            f"{median['cpu_seconds']:.2f}",
            f"{median['added_bytes'] / 1e6:.0f}",
        )
    console.print(table)
    share = done.delta_bytes / done.model_bytes
    console.print(f"{changed / done.elements:.2%} of the elements changed, {share:.2%} of the bytes")
    for what, found, most in (
        ("seconds of a delta", medians["delta"]["seconds"], MOST_SECONDS),
        ("bytes of memory added by a delta", medians["delta"]["added_bytes"], MOST_BYTES),
        ("share of the bytes", share, MOST_SHARE),
    ):
        if not args.quick and found > most:
            console.print(f"missed: {what}: {found:.3g}, at most {most:.3g}")
    if args.json:
        args.json.write_text(json.dumps({"runs": runs, "changed": changed / done.elements, "share": share}))


if __name__ == "__main__":
    main()
