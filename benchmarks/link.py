"""Stock Orbax on linked files, beside the same Orbax on checkpoints that it has written itself.

    python benchmarks/link.py [--quick] [--rounds 4] [--directory DIR] [--json FILE]

A Qwen3-MoE in bf16 (2.6 GB) becomes a checkpoint of Orbax in several ways: the tensors as they are, and MaxText's
scanned tree, are linked with chunks of 4, 16 and 64 MiB; stock Orbax saves the same arrays, sharded over 8 devices on
their leading dimension, with and without compression; and `convert` makes MaxText's tree. Stock Orbax then restores
each, whole on one device, and over 8 simulated devices on the leading and on the last dimension that they divide.

Every run is a fresh process, and what is compared takes turns. Files are in the page cache, and memory is there: both
are off the clock, as are imports. After every run each shard is compared bit by bit with what NumPy makes of the files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import checkpoints
import convert
import jax
import numpy as np
import orbax.checkpoint as ocp
from families import QWEN3_MOE
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from loaders import fresh, memory
from models import map_tensors, materialised
from rich.console import Console
from rich.table import Table

DEVICES = 8
FAMILY = "maxtext.qwen3_moe"
TREES = {"stored": None, "maxtext": FAMILY}
CHUNKS = (4, 16, 64)  # MiB
LAYOUTS = ("whole", "leading", "inner")

Run = dict[str, Any]


def expected(hf: Path, tree: str) -> dict[str, np.ndarray]:
    """What NumPy makes of the files, by the names that Orbax has for the arrays."""
    if tree == "stored":
        return map_tensors(hf)
    return {f"params.{name}": array for name, array in materialised(hf, FAMILY).items()}


def sharding(shape: tuple[int, ...], layout: str) -> Sharding:
    """The dimension that a layout shards is the first, or the last, that the devices divide."""
    mesh = Mesh(np.array(jax.devices()[: 1 if layout == "whole" else DEVICES]), ("x",))
    dividing = [axis for axis, size in enumerate(shape) if size % DEVICES == 0]
    if layout == "whole" or not dividing:
        return NamedSharding(mesh, PartitionSpec())
    cut = dividing[0] if layout == "leading" else dividing[-1]
    return NamedSharding(mesh, PartitionSpec(*("x" if axis == cut else None for axis in range(len(shape)))))


def nested(leaves: Mapping[str, Any], tree: str) -> Any:
    """The tree that Orbax has of leaves by name."""
    if tree == "stored":
        return dict(leaves)
    out: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *above, last = name.split(".")
        node = out
        for part in above:
            node = node.setdefault(part, {})
        node[last] = leaf
    return out


def save(job: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Stock Orbax saves the arrays as its users do: one chunk for each shard."""
    placed = {name: jax.device_put(array, sharding(array.shape, "leading")) for name, array in arrays.items()}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=job["compression"])
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(job["path"], args=ocp.args.PyTreeSave(nested(placed, job["tree"])))


def restore(job: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Run:
    """Stock Orbax restores arrays; what comes back is checked."""
    described = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding(array.shape, job["layout"]))
        for name, array in arrays.items()
    }
    item = nested(described, job["tree"])
    restore_args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding), item)
    os.sync()
    fresh(2 * sum(array.nbytes for array in arrays.values()))
    for path in (job["hf"], job["path"]):
        convert.cache(Path(path))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    resident, cpu = memory()["VmRSS"], sum(os.times()[:4])
    began = time.monotonic()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        tree = jax.block_until_ready(checkpointer.restore(job["path"], args))
    run = {"seconds": time.monotonic() - began, "cpu_seconds": sum(os.times()[:4]) - cpu}
    run["peak_bytes"] = memory()["VmHWM"] - resident
    assert "orbax_safetensors" not in sys.modules
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        stored = arrays[jax.tree_util.keystr(path, simple=True, separator=".")]
        for shard in array.addressable_shards:
            own, wanted = np.ascontiguousarray(shard.data), np.ascontiguousarray(stored[shard.index])
            assert own.dtype == wanted.dtype, path
            assert np.array_equal(own.view(np.uint16), wanted.view(np.uint16)), path
    return run


def once(job: Mapping[str, Any]) -> Run:
    """One program, in this process."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    arrays = expected(Path(job["hf"]), job["tree"])
    if job["program"] == "restore":
        return restore(job, arrays)
    began = time.monotonic()
    save(job, arrays)
    return {"seconds": time.monotonic() - began}


def measure(**job: Any) -> Run:
    """One program, in a process of its own."""
    text = json.dumps(job, default=os.fspath)
    done = subprocess.run([sys.executable, __file__, "--once", text], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def make(directory: Path, hf: Path) -> tuple[dict[tuple[str, str], Path], dict[str, float]]:
    """All checkpoints by tree and form, and the seconds that some of them took."""
    import orbax_safetensors as ost

    paths, seconds = {}, {}
    for tree, family in TREES.items():
        for size in CHUNKS:
            path = paths[tree, f"linked, {size} MiB"] = directory / f"{tree}-{size}"
            done = ost.link(hf, path, family=family, chunk_bytes=size * 2**20)
            assert done.made_bytes == 0
            seconds[f"link, {tree}, {size} MiB"] = done.seconds
        for form, compression in (("Orbax, compressed", True), ("Orbax", False)):
            path = paths[tree, form] = directory / f"{tree}-{'zstd' if compression else 'plain'}"
            measure(program="save", tree=tree, hf=hf, path=path, compression=compression)
    seconds["convert, maxtext"] = ost.convert(hf, directory / "converted", to="orbax", family=FAMILY).seconds
    return paths, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoints.add_directory(parser)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one round of a small model")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--once", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(once(args.once)))
        return 0
    config = QWEN3_MOE
    if args.quick:
        config = {**QWEN3_MOE, "num_hidden_layers": 2, "num_experts": 16, "vocab_size": 4096}
    console = Console(width=120)
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        hf = directory / "hf"
        checkpoints.write(hf, checkpoints.qwen3_moe(config), files=4)
        (hf / "config.json").write_text(json.dumps(config))
        paths, seconds = make(directory, hf)
        for what, took in seconds.items():
            console.print(f"{what}: {took:.3f} s")
        runs: dict[str, list[Run]] = {}
        for _ in range(1 if args.quick else args.rounds):
            for layout in LAYOUTS:
                for (tree, form), path in paths.items():
                    run = measure(program="restore", tree=tree, hf=hf, path=path, layout=layout)
                    runs.setdefault(f"{tree}, {layout}, {form}", []).append(run)
    show(runs, console)
    if args.json:
        args.json.write_text(json.dumps({"seconds": seconds, "runs": runs}))
    return 0


def show(runs: Mapping[str, list[Run]], console: Console) -> None:
    table = Table("tree, layout, form")
    for column in ("s", "times 16 MiB", "CPU s", "peak MB"):
        table.add_column(column, justify="right")
    for name, own in runs.items():
        linked = runs[", ".join((*name.split(", ")[:2], "linked, 16 MiB"))]
        table.add_row(
            name,
            f"{convert.median(own):.2f}",
            f"{convert.median(own) / convert.median(linked):.2f}",
            f"{convert.median(own, lambda run: run['cpu_seconds']):.2f}",
            f"{convert.median(own, lambda run: run['peak_bytes']) / 1e6:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
