"""Planning: what a restore of DeepSeek-V3 on 512 devices will cost, from headers alone.

    python benchmarks/plan.py [--quick] [--rounds 3] [--tree TREE ...] [--directory DIR] [--json FILE]

The checkpoint is 163 files with real headers and holes for data, in bf16 and as it is published, in fp8 with scales. It
is planned as it is stored, and as MaxText's trees: `layers` stacks the experts of each layer, `scanned` stacks all
layers as well, and `scanned fp8` decodes what it stacks. `scanned int4` does so with Kimi K2, whose trillion of
parameters are int4 in groups of 32. Each plan is made in a fresh process, since geometry that was
planned once is remembered, and its byte counts are compared with what the shardings say by themselves. A plan looks at
four of the processes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import checkpoints
from rich.console import Console
from rich.table import Table

GEOMETRY = Path(__file__).parents[1] / "testdata" / "geometry"
FILES = 163
BOTH = ("rows", "columns")
ROWS, COLUMNS = 16, 32  # of the mesh
DEVICES = ROWS * COLUMNS
PROCESSES = (64, 512)  # with eight devices each, and with one
MAX_SECONDS = 10.0
KIMI = "kimi-k2-int4"
# What of DeepSeek-V3's config is different in Kimi K2.
KIMI_SIZES = {
    "vocab_size": 163_840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
# By tree the checkpoint, and the arguments of its family where it has one.
TREES: dict[str, tuple[str, dict[str, Any]]] = {
    "stored": ("deepseek-v3", {}),
    "layers": ("deepseek-v3", {"family": "maxtext", "variant": {"scan_layers": False}}),
    "scanned": ("deepseek-v3", {"family": "maxtext", "variant": {"scan_layers": True}}),
    "scanned fp8": ("deepseek-v3-fp8", {"family": "maxtext", "variant": {"scan_layers": True}}),
    "scanned int4": (KIMI, {"family": "maxtext", "variant": {"scan_layers": True}}),
}
LAYOUTS = ("leading", "inner", "both", "experts", "replicated")
MAX_PEAK_BYTES = 500e6


def write(directory: Path, name: str) -> Path:
    """The checkpoint `name` and its config, without its data."""
    if name == KIMI:
        config = json.loads((GEOMETRY / "deepseek-v3.config.json").read_text()) | KIMI_SIZES
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
        }
        checkpoints.write_sparse(directory / name, checkpoints.kimi_int4(config), files=FILES)
        (directory / name / "config.json").write_text(json.dumps(config, indent=1))
        return directory / name
    facts = json.loads(gzip.decompress((GEOMETRY / f"{name}.json.gz").read_bytes()))
    tensors = {tensor: checkpoints.Tensor(dtype, tuple(shape)) for tensor, (dtype, shape) in facts.items()}
    checkpoints.write_sparse(directory / name, tensors, files=FILES)
    shutil.copy(GEOMETRY / f"{name}.config.json", directory / name / "config.json")
    return directory / name


def partition(layout: str, name: str, rank: int) -> tuple[Any, ...]:
    """The mesh axes for the dimensions of a leaf."""
    kinds = ["matrix"] * rank
    if ".MoeBlock_0.w" in name:
        kinds[0] = "experts"
    if "_layers." in name:
        kinds[1] = "layers"
    matrix = [axis for axis, kind in enumerate(kinds) if kind == "matrix"]
    axes: list[Any] = [None] * rank
    if layout == "leading":
        axes[0] = BOTH
    elif layout == "inner":
        axes[matrix[-1]] = BOTH
    elif layout == "experts" and kinds[0] == "experts":
        axes[0], axes[matrix[-1]] = BOTH
    elif layout in ("both", "experts"):
        for axis, entry in zip(matrix, BOTH, strict=False):
            axes[axis] = entry
    return tuple(axes)


def plan_once(directory: Path, tree: str, layout: str, process_count: int) -> dict[str, Any]:
    """Makes one plan in this process, checks it, and says what it took."""
    import jax

    import orbax_safetensors as ost

    imported = _peak()
    checkpoint, family = TREES[tree]
    directory = directory / checkpoint
    mesh = jax.sharding.AbstractMesh((ROWS, COLUMNS), BOTH)
    leaves = {}
    shardings: dict[Any, Any] = {}

    def described(name: str, view: Any) -> jax.ShapeDtypeStruct:
        axes = partition(layout, name, len(view.shape))
        if axes not in shardings:
            shardings[axes] = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        leaves[name] = (axes, prod(view.shape), view.dtype.itemsize)
        return jax.ShapeDtypeStruct(view.shape, view.dtype, sharding=shardings[axes])

    target = ost.open_checkpoint(directory, **family).tree(described)
    prepared = _peak()

    cpu_began, began = time.process_time(), time.perf_counter()
    ost.open_checkpoint(directory)
    cpu_opened, opened = time.process_time(), time.perf_counter()
    plan = ost.plan_restore(directory, target, process_count=process_count, **family)
    cpu_planned, planned = time.process_time(), time.perf_counter()
    _check(plan, leaves, process_count, stored_as_held=not tree.endswith(("fp8", "int4")))
    return {
        "open_seconds": opened - began,
        "open_cpu_seconds": cpu_opened - cpu_began,
        "plan_seconds": planned - opened,  # opens the checkpoint as well
        "plan_cpu_seconds": cpu_planned - cpu_opened,
        "peak_bytes": _peak(),
        "peak_imported_bytes": imported,
        "peak_prepared_bytes": prepared,
        "num_arrays": plan.num_arrays,
        "read_bytes": sum(cost.read_bytes for cost in plan.processes),
        "needed_bytes": sum(cost.needed_bytes for cost in plan.processes),
        "num_requests": sum(cost.num_requests for cost in plan.processes),
    }


def _check(
    plan: Any, leaves: Mapping[str, tuple[tuple[Any, ...], int, int]], process_count: int, *, stored_as_held: bool
) -> None:
    """The plan's sizes, from the shardings alone: what each of the processes that it looks at holds."""
    shares = {  # of what each process holds of a leaf
        (): 1.0,
        ("columns",): min(1.0, DEVICES / process_count / COLUMNS),  # devices are dealt to processes row by row
        ("rows",): 1 / ROWS,
        ("columns", "rows"): 1 / process_count,
    }
    held = 0.0
    for axes, elements, itemsize in leaves.values():
        used = {name for entry in axes for name in ((entry,) if isinstance(entry, str) else entry or ())}
        held += shares[tuple(sorted(used))] * elements * itemsize
    assert plan.num_arrays == len(leaves)
    assert plan.total_params == sum(elements for _, elements, _ in leaves.values())
    assert plan.total_bytes == sum(elements * itemsize for _, elements, itemsize in leaves.values())
    assert (plan.process_count, len(plan.processes)) == (process_count, 4)
    # Blocks that do not divide evenly are cut from the front: of 256 experts on 512 devices, half of these have none.
    assert 0.999 * held <= plan.processes[0].destination_bytes < 2.05 * held
    for cost in plan.processes:
        assert cost.destination_bytes <= plan.processes[0].destination_bytes
        assert cost.read_bytes >= cost.needed_bytes
        # fp8 with its scales is half of bf16, and a little; int4 a quarter.
        assert cost.needed_bytes == cost.destination_bytes if stored_as_held else cost.needed_bytes > 0
    wasted = sum(cost.read_bytes - cost.needed_bytes for cost in plan.processes)
    assert sum(leaf.read_bytes - leaf.needed_bytes for leaf in plan.over_reads) <= wasted


def _peak() -> int:
    """Peak resident memory of this process so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not say what the peak is")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoints.add_directory(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of one plan")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--tree", nargs="+", choices=list(TREES), default=list(TREES), help="only these")
    parser.add_argument("--once", nargs=3, metavar=("TREE", "LAYOUT", "PROCESSES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    directory = args.directory / "orbax-safetensors-bench"
    if args.once:
        print(json.dumps(plan_once(directory, args.once[0], args.once[1], int(args.once[2]))))
        return 0
    for name in dict.fromkeys(TREES[tree][0] for tree in args.tree):
        write(directory, name)
    cases = [
        (tree, layout, count)
        for layout in LAYOUTS
        for count in PROCESSES
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
