"""Cooperative restores: several processes that need the same bytes of a slow store, alone and together.

    python benchmarks/cooperative.py [--quick] [--rounds 3] [--processes 4] [--streams 4] [--directory DIR]
                                     [--json FILE]

One checkpoint, restored in turn with `cooperative=False` and `cooperative=True` by processes that are one JAX program
on this machine, with two CPU devices each: replicated, and sharded in the inner dimension. The store is the local disk,
slowed down to what an object store gives: each request waits, then its bytes come at a steady rate. A process has
fewer requests in flight than it would have at an object store, because what devices exchange goes over loopback here,
which is slower than what connects hosts, by as much. The first round compiles, and is shown apart. Every shard is
compared with the file.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import add_directory
from rich.console import Console
from rich.table import Table

TIMEOUT_SECONDS = 600
DEVICES = 2  # of each process
SPECS: dict[str, tuple[Any, ...]] = {"replicated": (), "inner": (None, "d")}
WAYS = {"alone": False, "together": True}


def shapes(*, quick: bool) -> dict[str, tuple[int, int]]:
    """Layers of two kinds of matrices."""
    rows = 512 if quick else 2048
    return {
        f"layers.{number}.{kind}": (rows, columns)
        for number in range(4 if quick else 8)
        for kind, columns in (("up", 4096), ("down", 8192))
    }


def write(directory: Path, tensors: dict[str, tuple[int, int]]) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: rng.integers(0, 2**16, shape, np.uint16) for name, shape in tensors.items()},
        directory / "model.safetensors",
    )


def slow_down() -> None:
    """Makes local files as slow as a store behind a network."""
    from orbax_safetensors.storage import local, remote

    cost, real = remote.COST, local.LocalFile.read

    def read(file: local.LocalFile, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        for offset, buffers in ranges:
            nbytes = sum(buffer.nbytes for buffer in buffers)
            time.sleep(cost.request_seconds + nbytes / cost.bytes_per_second)
            real(file, [(offset, buffers)])

    local.LocalStore.cost = cost
    local.LocalStore.maps = False
    local.LocalFile.read = read  # type: ignore[method-assign]


def work(job: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """What one process measures."""
    import jax
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from safetensors.numpy import load_file

    import orbax_safetensors as ost

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(job["coordinator"], job["processes"], index)
    expected = load_file(Path(job["directory"]) / "model.safetensors")
    slow_down()
    mesh = Mesh(np.array(jax.devices()), ("d",))
    read: list[float] = []
    jax.monitoring.register_scalar_listener(
        lambda event, value, **_: read.append(value) if event.endswith("safetensors/bytes_read") else None
    )
    out = []
    for number in range(job["rounds"] + 1):
        for layout, spec in SPECS.items():
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            item = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for name, a in expected.items()}
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                handler = ost.SafetensorsHandler(
                    options=ost.SafetensorsOptions(cooperative=WAYS[way], threads=job["streams"])
                )
                multihost_utils.sync_global_devices(f"{number} {layout} {way}")
                began = time.perf_counter()
                found = handler.restore(job["directory"], ost.SafetensorsRestore(item=item))
                jax.block_until_ready(found)
                seconds = time.perf_counter() - began
                for name, array in found.items():
                    for shard in array.addressable_shards:
                        assert np.array_equal(np.asarray(shard.data), expected[name][shard.index]), (name, way)
                out.append(
                    {"round": number, "layout": layout, "way": way, "seconds": seconds, "bytes_read": read.pop()}
                )
    jax.distributed.shutdown()
    return out


def run(directory: Path, processes: int, streams: int, rounds: int) -> list[list[dict[str, Any]]]:
    """Starts the processes, and collects what each of them measured."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        job = {
            "directory": os.fspath(directory),
            "processes": processes,
            "streams": streams,
            "rounds": rounds,
            "coordinator": f"127.0.0.1:{reserved.getsockname()[1]}",
        }
        flags = f"--xla_force_host_platform_device_count={DEVICES}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        command = [sys.executable, os.fspath(Path(__file__)), "--job", json.dumps(job)]
        running = [
            subprocess.Popen([*command, "--index", str(index)], env=environment, stdout=subprocess.PIPE, text=True)
            for index in range(processes)
        ]
        try:
            texts = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in running]
        finally:
            for process in running:
                process.kill()
        if any(process.returncode for process in running):
            raise SystemExit("a process failed")
        return [json.loads(text.splitlines()[-1]) for text in texts]


def show(found: list[list[dict[str, Any]]], nbytes: int) -> None:
    table = Table(title=f"{len(found)} processes, {nbytes / 1e6:.0f} MB, slowest process, median of rounds")
    for column in ("layout", "way", "first s", "then s", "MB read by a process", "read by all / stored"):
        table.add_column(column, justify="left" if column in ("layout", "way") else "right")
    for layout in SPECS:
        for way in WAYS:
            own = [[one for one in of_process if (one["layout"], one["way"]) == (layout, way)] for of_process in found]
            slowest = [max(one["seconds"] for one in each) for each in zip(*own, strict=True)]
            read = [each[0]["bytes_read"] for each in own]
            table.add_row(
                layout,
                way,
                f"{slowest[0]:.2f}",
                f"{statistics.median(slowest[1:]):.2f}",
                f"{max(read) / 1e6:.1f}",
                f"{sum(read) / nbytes:.2f}",
            )
    Console(width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_directory(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--streams", type=int, default=4, help="requests that each process has in flight at once")
    parser.add_argument("--quick", action="store_true", help="one round of 50 MB: shows that everything runs")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(work(json.loads(args.job), args.index)))
        return 0
    tensors = shapes(quick=args.quick)
    directory = args.directory / "orbax-safetensors-bench" / ("cooperative-quick" if args.quick else "cooperative")
    write(directory, tensors)
    found = run(directory, args.processes, args.streams, 1 if args.quick else args.rounds)
    if args.json:
        args.json.write_text(json.dumps(found))
    show(found, sum(prod(shape) * 2 for shape in tensors.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
