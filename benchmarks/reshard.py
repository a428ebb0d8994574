"""What it is worth to store a checkpoint as a mesh will load it: restores before and after `reshard`.

    python benchmarks/reshard.py [--quick] [--rounds 3] [--directory DIR] [--json FILE] [--only {orbax,safetensors}]

`orbax`: stock Orbax saves a checkpoint whose arrays are sharded over 8 simulated devices on their leading dimension, so
that its chunks are shards of that kind, and `reshard` stores it anew for their last dimension. Stock Orbax restores
both onto the last dimension in one process with all devices, and TensorStore reads the shards of one of 8 devices, as
one of 8 hosts would. How many chunks were read, and how many bytes of files, TensorStore itself counts.

`safetensors`: files as Hugging Face's, and what `reshard` makes of them: a file for each device. The package restores
both onto the last dimension; requests and bytes are those of its plans, which the restore's own count has to equal.

Every run is a fresh process, and what is compared takes turns. Files are in the page cache, nothing is left to be
written to the disk from before, and memory is there: all that is off the clock, as are imports. After every run each
shard is compared bit by bit with what is in the files. A resharded checkpoint has to be read chunk by chunk, each once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import convert
import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from checkpoints import add_directory, read_tensors
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from loaders import EVENT_BYTES_READ, fresh, memory
from models import DTYPES, map_tensors
from rich.console import Console
from rich.table import Table

DEVICES = 8
# The same for `reshard`: vectors have one dimension, which is their last.
INNER = {"mesh": {"x": DEVICES}, "spec": {"norm": ("x",), "weight": (None, "x")}}
EVENT_REQUESTS = "/jax/orbax/read/safetensors/storage_reads"
COUNTERS = {
    "chunks": "/tensorstore/cache/chunk_cache/reads",
    "requests": "/tensorstore/kvstore/file/read",
    "read_bytes": "/tensorstore/kvstore/file/bytes_read",
}

Run = dict[str, Any]
Arrays = dict[str, Any]


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


def abstract_arrays(hf: Path, dimension: int) -> dict[str, jax.ShapeDtypeStruct]:
    """All tensors, sharded on one dimension."""
    out = {}
    for tensors in read_tensors(hf).values():
        for name, tensor in tensors.items():
            spec: list[str | None] = [None] * len(tensor.shape)
            spec[dimension] = "x"
            sharding = NamedSharding(mesh(), PartitionSpec(*spec))
            out[name] = jax.ShapeDtypeStruct(tensor.shape, DTYPES[tensor.dtype], sharding=sharding)
    return out


# Programs get ready off the clock and return what the clock is for, which returns arrays, or boxes of them.


def save(hf: Path, destination: Path) -> Callable[[], Arrays]:
    """Stock Orbax, sharded on the leading dimension."""
    stored = map_tensors(hf)
    arrays = {name: jax.device_put(stored[name], array.sharding) for name, array in abstract_arrays(hf, 0).items()}

    def run() -> Arrays:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as checkpointer:
            checkpointer.save(destination / "0" / "items", args=ocp.args.PyTreeSave(arrays))
        return {}

    return run


def reshard(source: Path, destination: Path) -> Callable[[], Arrays]:
    """This package, for the last dimension."""
    import orbax_safetensors as ost

    def run() -> Arrays:
        ost.reshard(source, destination, **INNER)
        return {}

    return run


def restore(source: Path, hf: Path) -> Callable[[], Arrays]:
    """Stock Orbax."""
    arrays = abstract_arrays(hf, -1)
    restore_args = {name: ocp.ArrayRestoreArgs(sharding=array.sharding) for name, array in arrays.items()}

    def run() -> Arrays:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(source / "0" / "items", ocp.args.PyTreeRestore(restore_args=restore_args))

    return run


def read_shards(source: Path, hf: Path) -> Callable[[], Arrays]:
    """TensorStore: the boxes that the first device has."""
    boxes = {}
    for name, array in abstract_arrays(hf, -1).items():
        boxes[name] = array.sharding.devices_indices_map(array.shape)[jax.devices()[0]]

    def run() -> Arrays:
        leaves = convert.stored_leaves(source / "0" / "items")
        reads = {name: leaves[name][box].read() for name, box in boxes.items()}
        return {name: (boxes[name], read.result()) for name, read in reads.items()}

    return run


def restore_files(source: Path, hf: Path) -> Callable[[], Arrays]:
    """This package."""
    import orbax_safetensors as ost

    arrays = abstract_arrays(hf, -1)
    restore_args = {name: ocp.ArrayRestoreArgs(sharding=array.sharding) for name, array in arrays.items()}

    def run() -> Arrays:
        with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
            return checkpointer.restore(source, args=ost.SafetensorsRestore(restore_args=restore_args))

    return run


PROGRAMS = {function.__name__: function for function in (save, reshard, restore, read_shards, restore_files)}


def once(job: Mapping[str, Any]) -> Run:
    """One program, in this process. Times in seconds, memory in bytes."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    source, other = Path(job["source"]), Path(job["other"])
    run = PROGRAMS[job["program"]](source, other)
    asked: dict[str, float] = {}
    jax.monitoring.register_scalar_listener(lambda name, value, **_: asked.update({name: value}))
    os.sync()
    fresh(job["memory"])
    convert.cache(source)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    counts_before, resident, cpu_before = counters(), memory()["VmRSS"], sum(os.times()[:4])
    began = time.monotonic()
    arrays = run()
    jax.block_until_ready(arrays)
    seconds, cpu = time.monotonic() - began, sum(os.times()[:4]) - cpu_before
    peak = memory()["VmHWM"] - resident
    counted = {name: value - counts_before[name] for name, value in counters().items()}
    if arrays:
        check(arrays, map_tensors(other))
    events = [asked.get(EVENT_BYTES_READ), asked.get(EVENT_REQUESTS)]
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak, **counted, "events": events}


def counters() -> dict[str, int]:
    """What TensorStore has counted in this process."""
    out = {}
    for name, metric in COUNTERS.items():
        found = tensorstore.experimental_collect_matching_metrics(metric)
        out[name] = sum(value["value"] for one in found if one["name"] == metric for value in one["values"])
    return out


def check(arrays: Arrays, stored: Mapping[str, np.ndarray]) -> None:
    """Raises where one bit of one shard is not that of the files."""
    assert arrays.keys() == stored.keys()
    for name, array in arrays.items():
        shards = [array] if isinstance(array, tuple) else [(one.index, one.data) for one in array.addressable_shards]
        for box, data in shards:
            expected = stored[name][box]
            assert (data.dtype, data.shape) == (expected.dtype, expected.shape), name
            bits = f"u{expected.itemsize}"
            assert np.array_equal(np.ascontiguousarray(data).view(bits), np.ascontiguousarray(expected).view(bits))


def measure(program: str, source: Path, other: Path, nbytes: int) -> Run:
    """One program, in a process of its own."""
    job = {"program": program, "source": os.fspath(source), "other": os.fspath(other), "memory": 2 * nbytes}
    done = subprocess.run([sys.executable, __file__, "--once", json.dumps(job)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def chunks_of(item: Path) -> int:
    """How many chunks a checkpoint of Orbax is stored in."""
    grids = ((leaf.shape, leaf.chunk_layout.read_chunk.shape) for leaf in convert.stored_leaves(item).values())
    return sum(int(np.prod([-(-size // chunk) for size, chunk in zip(*grid, strict=True)])) for grid in grids)


def orbax(directory: Path, rounds: int, nbytes: int, console: Console) -> dict[str, Any]:
    """Measures restores of a checkpoint of Orbax."""
    hf, stored = directory / "hf", {"leading": directory / "leading", "inner": directory / "inner"}
    saved = measure("save", hf, stored["leading"], nbytes)
    moved = measure("reshard", stored["leading"], stored["inner"], nbytes)
    ways = {"restore": "Orbax, 8 devices", "read_shards": "TensorStore, one of 8"}
    runs: dict[str, list[Run]] = {f"{ways[way]}, {layout}": [] for way in ways for layout in stored}
    for _ in range(rounds):
        for way, title in ways.items():
            for layout, path in stored.items():
                runs[f"{title}, {layout}"].append(measure(way, path, hf, nbytes))
    chunks = {layout: chunks_of(path / "0" / "items") for layout, path in stored.items()}
    console.print(f"Orbax, {nbytes / 1e9:.2f} GB: saved in {saved['seconds']:.1f} s as {chunks['leading']} chunks,")
    console.print(f"resharded in {moved['seconds']:.1f} s to {chunks['inner']}; medians of restores by chunks:")
    table = Table()
    for column in ("restored by, stored by", "s", "times inner", "CPU s", "peak MB", "chunks read", "MB of files"):
        table.add_column(column, justify="left" if column == "restored by, stored by" else "right")
    for name, own in runs.items():
        quickest = runs[name.replace("leading", "inner")]
        table.add_row(
            name,
            f"{convert.median(own):.2f}",
            f"{convert.median(own) / convert.median(quickest):.2f}",
            f"{convert.median(own, lambda run: run['cpu_seconds']):.2f}",
            f"{convert.median(own, lambda run: run['peak_bytes']) / 1e6:.0f}",
            f"{convert.median(own, lambda run: run['chunks']):.0f}",
            f"{convert.median(own, lambda run: run['read_bytes']) / 1e6:.0f}",
        )
    console.print(table)
    for run in runs["Orbax, 8 devices, inner"]:
        assert run["chunks"] == chunks["inner"], f"{run['chunks']} reads of {chunks['inner']} chunks"
    for run in runs["TensorStore, one of 8, inner"]:
        assert run["chunks"] * DEVICES == chunks["inner"], f"{run['chunks']} reads by one device of {DEVICES}"
    return {"save": saved, "reshard": moved, "chunks": chunks, "runs": runs}


def safetensors(directory: Path, rounds: int, nbytes: int, console: Console) -> dict[str, Any]:
    """Measures restores of safetensors files."""
    import orbax_safetensors as ost

    hf, stored = directory / "hf", {"whole tensors": directory / "hf", "a file a device": directory / "pieces"}
    moved = measure("reshard", hf, stored["a file a device"], nbytes)
    runs: dict[str, list[Run]] = {layout: [] for layout in stored}
    for _ in range(rounds):
        for layout, path in stored.items():
            runs[layout].append(measure("restore_files", path, hf, nbytes))
    arrays = abstract_arrays(hf, -1)
    console.print(f"safetensors, {nbytes / 1e9:.2f} GB: resharded in {moved['seconds']:.1f} s; medians of restores:")
    table = Table()
    columns = ("stored as", "s", "CPU s", "requests", "read / needed", "of 8: requests", "read / needed")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    plans: dict[str, Any] = {}
    for layout, own in runs.items():
        alone, shared = (ost.plan_restore(stored[layout], arrays, process_count=count) for count in (1, DEVICES))
        plans[layout] = [json.loads(plan.to_json())["processes"] for plan in (alone, shared)]
        (one,), most = alone.processes, max(shared.processes, key=lambda cost: cost.num_requests)
        assert all(run["events"] == [one.read_bytes, one.num_requests] for run in own)
        table.add_row(
            layout,
            f"{convert.median(own):.2f}",
            f"{convert.median(own, lambda run: run['cpu_seconds']):.2f}",
            f"{one.num_requests}",
            f"{one.over_read:.3f}",
            f"{most.num_requests}",
            f"{max(cost.over_read for cost in shared.processes):.3f}",
        )
    console.print(table)
    return {"reshard": moved, "runs": runs, "plans": plans}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_directory(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of a small model")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--only", choices=("orbax", "safetensors"))
    parser.add_argument("--once", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(once(args.once)))
        return 0
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    results = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        nbytes = convert.make(directory / "hf", **(convert.SMALL if args.quick else convert.LLAMA_1B))
        for part in (orbax, safetensors):
            if args.only in (None, part.__name__):
                results[part.__name__] = part(directory, 1 if args.quick else args.rounds, nbytes, Console(width=120))
    if args.json:
        args.json.write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
