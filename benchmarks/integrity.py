"""Checksums: what recording them costs a save, how fast `verify --data` reads, and whether it finds flipped bits.

    python benchmarks/integrity.py [--quick] [--rounds 5] [--flips 1000] [--directory DIR] [--json FILE]

Saves with and without checksums take turns in one process, over eight CPU devices, and so do the readers: a plain read
of the files with the same threads, `verify(data=True)` against the checksums of the save and against SHA-256, and
`sha256` of Python alone. Memory is touched and freed before each. Every saved tensor is summed again with zlib, and
each flipped bit has to be found, in the tensor that it is in.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from checkpoints import DTYPES, Tensors, add_directory, llama
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from loaders import fresh
from rich.console import Console
from rich.table import Table

import orbax_safetensors as ost
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.save import job
from orbax_safetensors.storage import hub_digests, local

PIECE_BYTES = 16 * 2**20
THREADS = 2 * (os.cpu_count() or 1)
FILE_BYTES = 300_000_000
LARGE = llama(layers=6, vocabulary=64_128)
SMALL = llama(layers=2, hidden=256, feed_forward=512, vocabulary=2048)
Seconds = dict[str, list[tuple[float, float]]]  # wall and CPU of each round


def tree(tensors: Tensors, spec: PartitionSpec) -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rng = np.random.default_rng(0)
    return {
        name: jax.device_put(
            rng.integers(0, 2**15, tensor.shape, np.uint16).view(DTYPES["BF16"]),
            NamedSharding(mesh, spec if len(tensor.shape) == 2 else PartitionSpec()),
        )
        for name, tensor in tensors.items()
    }


def in_turn(jobs: dict[str, Callable[[], Any]], rounds: int, before: Callable[[], Any]) -> Seconds:
    """The seconds of each job, after a round that is not measured."""
    found: Seconds = {name: [] for name in jobs}
    names = list(jobs)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before()
            cpu, wall = time.process_time(), time.perf_counter()
            jobs[name]()
            if number:
                found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return found


def saves(directory: Path, tensors: Tensors, rounds: int) -> dict[str, tuple[Seconds, int]]:
    """Saves with and without checksums; the last is left in the directory."""
    found = {}
    for name, spec in (("inner", PartitionSpec(None, "x")), ("leading", PartitionSpec("x"))):
        leaves = tree(tensors, spec)
        for files, most in (("one file", 10**12), ("several files", FILE_BYTES))[name == "inner" :]:

            def save(most: int = most, leaves: dict[str, jax.Array] = leaves) -> None:
                ost.save(directory, leaves, max_file_bytes=most)

            def without(save: Callable[[], None] = save) -> None:
                real = job.Writer
                with (
                    mock.patch.object(job, "Writer", lambda create, requests, _: real(create, requests)),
                    mock.patch.object(job.SaveJob, "_checksums", return_value={}),
                ):
                    save()

            def before(leaves: dict[str, jax.Array] = leaves) -> None:
                shutil.rmtree(directory, ignore_errors=True)
                fresh(2 * sum(leaf.nbytes for leaf in leaves.values()))

            seconds = in_turn({"without": without, "with": save}, rounds, before)
            found[f"{name}, {files}"] = seconds, sum(leaf.nbytes for leaf in leaves.values())
    shutil.rmtree(directory)
    save()
    return found


def check_record(directory: Path) -> None:
    """Compares the record with what zlib makes of the files."""
    for name, of_file in json.loads((directory / CHECKSUMS_NAME).read_text())["files"].items():
        content = (directory / name).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:start])
        for tensor, crc in of_file["tensors"].items():
            begin, end = entries[tensor]["data_offsets"]
            assert f"{zlib.crc32(content[start + begin : start + end]):08x}" == crc, tensor


def plain_read(paths: list[Path]) -> None:
    """Reads files with as many threads, in as long pieces, into a buffer of each thread."""
    thread = threading.local()

    def read(path: Path, begin: int, descriptor: int) -> None:
        if not hasattr(thread, "buffer"):
            thread.buffer = memoryview(bytearray(PIECE_BYTES))
        nbytes = min(PIECE_BYTES, path.stat().st_size - begin)
        assert os.preadv(descriptor, [thread.buffer[:nbytes]], begin) == nbytes

    with ThreadPoolExecutor(THREADS) as pool:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            list(pool.map(lambda begin: read(path, begin, descriptor), range(0, path.stat().st_size, PIECE_BYTES)))  # noqa: B023
            os.close(descriptor)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reads(directory: Path, rounds: int) -> tuple[Seconds, int]:
    paths = sorted(directory.glob("*.safetensors"))
    known = {str(path): sha256(path) for path in paths}
    hidden = directory.parent / CHECKSUMS_NAME

    def checked() -> None:
        assert ost.verify(directory, data=True) == []

    def against_sha256() -> None:
        (directory / CHECKSUMS_NAME).rename(hidden)
        with mock.patch.object(local, "downloaded_sha256", known.get):
            checked()
        hidden.rename(directory / CHECKSUMS_NAME)

    jobs = {
        "plain read": lambda: plain_read(paths),
        "verify --data, checksums": checked,
        "verify --data, SHA-256": against_sha256,
        "hashlib.sha256, one thread": lambda: [sha256(path) for path in paths],
    }
    assert hub_digests.downloaded_sha256(str(paths[0])) is None
    return in_turn(jobs, rounds, lambda: fresh(2**28)), sum(path.stat().st_size for path in paths)


def flips(directory: Path, count: int) -> int:
    """Flips one bit at a time, anywhere in the files, and returns how many of them `verify` found."""
    rng = np.random.default_rng(1)
    files = ost.open_checkpoint(directory).files
    sizes = np.array([file.stamp.nbytes for file in files])
    found = 0
    for _ in range(count):
        file = files[rng.choice(len(files), p=sizes / sizes.sum())]
        at, bit = int(rng.integers(file.stamp.nbytes)), 1 << int(rng.integers(8))
        with open(file.path, "r+b") as opened:
            for step in range(2):
                opened.seek(at)
                (byte,) = opened.read(1)
                opened.seek(at)
                opened.write(bytes([byte ^ bit]))
                opened.flush()
                if step == 0:
                    faults = [str(fault) for fault in ost.verify(directory, data=True)]
        names = [
            entry.name
            for entry in file.header.tensors.values()
            if file.header.data_start + entry.begin <= at < file.header.data_start + entry.end
        ]
        found += any(not names or f"tensor {names[0]!r}" in fault for fault in faults)
    assert ost.verify(directory, data=True) == []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small checkpoint and one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flips", type=int, default=1000)
    add_directory(parser)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rounds, count = (1, 5) if args.quick else (args.rounds, args.flips)
    console = Console(width=120)
    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        directory = Path(root) / "saved"
        saved = saves(directory, SMALL if args.quick else LARGE, rounds)
        check_record(directory)
        table = Table("save", "without, s", "with, s", "wall", "CPU")
        for name, (seconds, _) in saved.items():
            wall, cpu = (
                {job: statistics.median(pair[at] for pair in seconds[job]) for job in seconds} for at in (0, 1)
            )
            table.add_row(
                name,
                f"{wall['without']:.3f}",
                f"{wall['with']:.3f}",
                f"x {wall['with'] / wall['without']:.2f}",
                f"x {cpu['with'] / cpu['without']:.2f}",
            )
        console.print(table)
        found, nbytes = reads(directory, rounds)
        table = Table("read", "GB/s", "CPU s/GB")
        for name, pairs in found.items():
            wall, cpu = (statistics.median(pair[at] for pair in pairs) for at in (0, 1))
            table.add_row(name, f"{nbytes / wall / 1e9:.2f}", f"{cpu / nbytes * 1e9:.2f}")
        console.print(table)
        shutil.rmtree(directory)
        ost.save(directory, tree(SMALL, PartitionSpec("x")), index=False)
        flipped = flips(directory, count)
        console.print(f"{flipped} of {count} flipped bits found")
        assert flipped == count
        if args.json:
            args.json.write_text(json.dumps({"saves": {name: pair[0] for name, pair in saved.items()}, "reads": found}))


if __name__ == "__main__":
    main()
