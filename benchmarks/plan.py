"""Planning: what a restore of DeepSeek-V3 on 512 devices will cost, from headers alone.

    python benchmarks/plan.py [--quick] [--rounds 3] [--tree TREE ...] [--directory DIR] [--json FILE]

The checkpoint is 163 files with real headers and holes for data. It is planned as it is stored, and as the trees that
models have: in `layers` the experts of each layer are stacked, in `scanned` all layers are stacked as well. Each plan
is made in a fresh process, since geometry that was planned once is remembered, and its byte counts are compared with
what the shardings say by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import checkpoints
from rich.console import Console
from rich.table import Table

FILES = 163
ROWS, COLUMNS = 16, 32  # of the mesh
DEVICES = ROWS * COLUMNS
PROCESS_COUNTS = (64, 512)
DENSE_LAYERS, LAYERS, EXPERTS = 3, 61, 256
BOTH = ("rows", "columns")
LAYOUTS = ("leading", "inner", "both", "experts", "replicated")
MAX_SECONDS = 2.0
MAX_PEAK_BYTES = 500e6


@dataclass(frozen=True)
class Leaf:
    """An array of a tree: stored tensors by name, in nested lists where they are stacked.

    A letter for each dimension: `e` experts, `l` layers, `i` and `o` what a matrix multiplies and makes. The stored
    matrices are `oi`, those of stacks are transposed.
    """

    dims: str
    tensors: Any


def stored_tree(tensors: checkpoints.Tensors) -> dict[str, Leaf]:
    """Every tensor is a leaf."""
    return {name: Leaf("oi"[: len(tensor.shape)], name) for name, tensor in tensors.items()}


def layers_tree(tensors: checkpoints.Tensors) -> dict[str, Leaf]:
    """A leaf for each weight of each layer; those of the experts are stacked, `(experts, in, out)`."""
    tree = {}
    for name, tensor in tensors.items():
        if name.startswith(f"model.layers.{LAYERS}."):  # the prediction layer is not part of the model
            continue
        if ".experts." not in name:
            tree[name] = Leaf("oi"[: len(tensor.shape)][::-1], name)
        elif ".experts.0." in name:
            tree[name] = Leaf("eio", [name.replace("experts.0", f"experts.{number}") for number in range(EXPERTS)])
    return tree


def scanned_tree(tensors: checkpoints.Tensors) -> dict[str, Leaf]:
    """A leaf for each weight: the dense layers and the others are stacked, `(experts, layers, in, out)`."""
    tree = {}
    for name, leaf in layers_tree(tensors).items():
        if not name.startswith("model.layers."):
            tree[name] = leaf
            continue
        layer, weight = name.removeprefix("model.layers.").split(".", 1)
        if int(layer) not in (0, DENSE_LAYERS):
            continue
        dense = int(layer) == 0
        here = f"layers.{layer}."
        layers = [f"layers.{number}." for number in (range(DENSE_LAYERS) if dense else range(DENSE_LAYERS, LAYERS))]
        if leaf.dims == "eio":
            stacked: Any = [[one.replace(here, other) for other in layers] for one in leaf.tensors]
            tree[weight] = Leaf("elio", stacked)
        else:
            own = [name.replace(here, other) for other in layers]
            tree[f"{'dense' if dense else 'sparse'}.{weight}"] = Leaf("l" + leaf.dims, own)
    return tree


TREES: Mapping[str, Callable[[checkpoints.Tensors], dict[str, Leaf]]] = {
    "stored": stored_tree,
    "layers": layers_tree,
    "scanned": scanned_tree,
}


def partition(layout: str, dims: str) -> tuple[Any, ...]:
    """The mesh axes for the dimensions `dims` of a leaf."""
    matrix = [at for at, dim in enumerate(dims) if dim in "io"]
    axes: list[Any] = [None] * len(dims)
    if layout == "leading":
        axes[next(at for at, dim in enumerate(dims) if dim != "l")] = BOTH
    elif layout == "inner":
        axes[matrix[-1]] = BOTH
    elif layout == "experts" and "e" in dims:
        axes[dims.index("e")], axes[matrix[-1]] = BOTH
    elif layout in ("both", "experts"):
        for at, axis in zip(matrix, BOTH, strict=False):
            axes[at] = axis
    return tuple(axes)


def plan_once(directory: Path, tree: str, layout: str, process_count: int) -> dict[str, Any]:
    """Makes one plan in this process, checks it, and says what it took."""
    import jax
    import ml_dtypes
    import numpy as np

    import orbax_safetensors as ost
    from orbax_safetensors import SafetensorsOptions, arrays
    from orbax_safetensors.plan import report
    from orbax_safetensors.plan.view import View

    imported = _peak()
    mesh = jax.sharding.AbstractMesh((ROWS, COLUMNS), BOTH)
    dtypes = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}
    tensors = {name: tensor for own in checkpoints.read_tensors(directory).values() for name, tensor in own.items()}
    leaves = TREES[tree](tensors)
    specs = {dims: partition(layout, dims) for dims in {leaf.dims for leaf in leaves.values()}}
    shardings = {
        dims: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for dims, axes in specs.items()
    }

    def view(checkpoint: Any, names: Any, dims: str) -> View:
        if not isinstance(names, str):
            return View.stack([view(checkpoint, name, dims) for name in names])
        return checkpoint.view(names).T if dims.endswith("io") else checkpoint.view(names)

    def plan_views() -> Any:
        checkpoint = ost.open_checkpoint(directory)
        boxes: dict[Any, Any] = {}
        planned = []
        for name, leaf in leaves.items():
            made = view(checkpoint, leaf.tensors, leaf.dims)
            key = (leaf.dims, made.shape)
            if key not in boxes:
                of_devices = arrays.device_boxes(shardings[leaf.dims], made.shape)
                each = DEVICES // process_count
                boxes[key] = [tuple(of_devices[at : at + each]) for at in range(0, DEVICES, each)]
            planned.append(report.Leaf(name, made, made.shape, made.dtype, boxes[key]))
        options = SafetensorsOptions()
        return report.restore_plan(
            planned,
            checkpoint.location,
            [file.path for file in checkpoint.files],
            process_count=process_count,
            max_gap_bytes=options.max_gap_bytes,
            threads=options.threads,
        )

    target = {}
    if tree == "stored":
        for name, leaf in leaves.items():
            dtype = dtypes[tensors[name].dtype]
            target[name] = jax.ShapeDtypeStruct(tensors[name].shape, dtype, sharding=shardings[leaf.dims])
    prepared = _peak()
    cpu_began, began = time.process_time(), time.perf_counter()
    ost.open_checkpoint(directory)
    cpu_opened, opened = time.process_time(), time.perf_counter()
    plan = ost.plan_restore(directory, target, process_count=process_count) if target else plan_views()
    cpu_planned, planned = time.process_time(), time.perf_counter()
    _check(plan, leaves, tensors, specs, process_count)
    return {
        "open_seconds": opened - began,
        "open_cpu_seconds": cpu_opened - cpu_began,
        "plan_seconds": planned - opened,  # opens the checkpoint as well
        "plan_cpu_seconds": cpu_planned - cpu_opened,
        "peak_bytes": _peak(),
        "peak_imported_bytes": imported,
        "peak_prepared_bytes": prepared,
        "read_bytes": max(cost.read_bytes for cost in plan.processes),
        "needed_bytes": max(cost.needed_bytes for cost in plan.processes),
        "num_requests": max(cost.num_requests for cost in plan.processes),
    }


def _check(
    plan: Any,
    leaves: Mapping[str, Leaf],
    tensors: checkpoints.Tensors,
    specs: Mapping[str, tuple[Any, ...]],
    process_count: int,
) -> None:
    """The plan's sizes, from the shardings alone: how many processes hold each byte."""
    elements = nbytes = held = 0
    for leaf in leaves.values():
        axes = {name for entry in specs[leaf.dims] for name in ((entry,) if isinstance(entry, str) else entry or ())}
        holders = {
            (): process_count,
            ("columns",): ROWS,  # a block is on a column of the mesh, and no process has two devices of one
            ("rows",): max(1, process_count // ROWS),  # a block is on a whole row, which several processes share
            BOTH[::-1]: 1,
        }[tuple(sorted(axes))]
        for name in _flat(leaf.tensors):
            elements += prod(tensors[name].shape)
            nbytes += tensors[name].nbytes
            held += holders * tensors[name].nbytes
    assert plan.num_arrays == len(leaves)
    assert plan.total_params == elements
    assert plan.total_bytes == nbytes
    assert len(plan.processes) == process_count
    assert sum(cost.needed_bytes for cost in plan.processes) == held
    assert all(cost.read_bytes >= cost.needed_bytes == cost.destination_bytes for cost in plan.processes)
    wasted = sum(cost.read_bytes - cost.needed_bytes for cost in plan.processes)
    assert sum(leaf.read_bytes - leaf.needed_bytes for leaf in plan.over_reads) <= wasted


def _flat(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else [one for more in names for one in _flat(more)]


def _peak() -> int:
    """Peak resident memory of this process so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not say what the peak is")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where headers go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of one plan")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--tree", nargs="+", choices=list(TREES), default=list(TREES), help="only these")
    parser.add_argument("--once", nargs=3, metavar=("TREE", "LAYOUT", "PROCESSES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    directory = args.directory / "orbax-safetensors-bench" / "deepseek-v3"
    if args.once:
        print(json.dumps(plan_once(directory, args.once[0], args.once[1], int(args.once[2]))))
        return 0
    checkpoints.write_sparse(directory, checkpoints.deepseek_v3(), files=FILES)
    cases = [
        (tree, layout, count)
        for layout in LAYOUTS
        for count in PROCESS_COUNTS
        for tree in args.tree
        if layout != "experts" or tree != "stored"
    ]
    if args.quick:
        cases = cases[: len(args.tree)]
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(1 if args.quick else args.rounds):
        for case in cases:
            command = [sys.executable, os.fspath(Path(__file__)), "--directory", os.fspath(args.directory)]
            done = subprocess.run([*command, "--once", *map(str, case)], stdout=subprocess.PIPE, check=True)
            runs[case].append(json.loads(done.stdout.splitlines()[-1]))
    console = Console(width=120)
    table = Table(title=f"DeepSeek-V3, {FILES} files, {DEVICES} devices")
    columns = (
        "layout",
        "processes",
        "tree",
        "plan s",
        "CPU s",
        "of stored",
        "headers CPU s",
        "peak MB",
        "imports MB",
        "read / needed",
        "met",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("layout", "tree") else "right")
    for (tree, layout, count), own in runs.items():
        took = statistics.median(run["plan_seconds"] for run in own)
        peak = max(run["peak_bytes"] for run in own)
        # The stored tensors have no experts' dimension.
        stored = runs.get(("stored", "both" if layout == "experts" else layout, count))
        table.add_row(
            layout,
            str(count),
            tree,
            f"{took:.2f}",
            f"{_cpu(own):.2f}",
            f"{_cpu(own) / _cpu(stored):.2f}" if stored else "",
            f"{statistics.median(run['open_cpu_seconds'] for run in own):.2f}",
            f"{peak / 1e6:.0f}",
            f"{max(run['peak_imported_bytes'] for run in own) / 1e6:.0f}",
            f"{own[0]['read_bytes'] / own[0]['needed_bytes']:.3f}",
            "yes" if took < MAX_SECONDS and peak < MAX_PEAK_BYTES else "NO",
        )
    console.print(table)
    if args.json:
        described = [{"tree": c[0], "layout": c[1], "processes": c[2], "runs": r} for c, r in runs.items()]
        args.json.write_text(json.dumps(described))
    return 0


def _cpu(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["plan_cpu_seconds"] for run in runs)


if __name__ == "__main__":
    sys.exit(main())
