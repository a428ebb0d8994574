"""Planning: what a restore of DeepSeek-V3 on 512 devices will cost, from headers alone.

    python benchmarks/plan.py [--quick] [--rounds 3] [--directory DIR] [--json FILE]

The checkpoint is 163 files with real headers and holes for data. Each plan is made in a fresh process, since geometry
that was planned once is remembered, and its byte counts are compared with what the shardings say by themselves.
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
# Mesh axes for the dimensions of a matrix and for a vector.
LAYOUTS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "leading": ((("rows", "columns"),), (("rows", "columns"),)),
    "inner": ((None, ("rows", "columns")), (("rows", "columns"),)),
    "both": (("rows", "columns"), ("rows",)),
    "replicated": ((), ()),
}
MAX_SECONDS = 2.0
MAX_PEAK_BYTES = 500e6


def plan_once(directory: Path, layout: str, process_count: int) -> dict[str, Any]:
    """Makes one plan in this process, checks it, and says what it took."""
    import jax
    import ml_dtypes
    import numpy as np

    import orbax_safetensors as ost

    imported = _peak()
    mesh = jax.sharding.AbstractMesh((ROWS, COLUMNS), ("rows", "columns"))
    matrix, vector = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in LAYOUTS[layout])
    dtypes = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}
    tensors = {name: tensor for own in checkpoints.read_tensors(directory).values() for name, tensor in own.items()}
    target = {
        name: jax.ShapeDtypeStruct(
            tensor.shape, dtypes[tensor.dtype], sharding=matrix if len(tensor.shape) > 1 else vector
        )
        for name, tensor in tensors.items()
    }
    prepared = _peak()

    cpu_began, began = time.process_time(), time.perf_counter()
    ost.open_checkpoint(directory)
    cpu_opened, opened = time.process_time(), time.perf_counter()
    plan = ost.plan_restore(directory, target, process_count=process_count)
    cpu_planned, planned = time.process_time(), time.perf_counter()
    _check(plan, tensors, layout, process_count)
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


def _check(plan: Any, tensors: checkpoints.Tensors, layout: str, process_count: int) -> None:
    """The plan's sizes, from the shardings alone: how many processes hold each byte."""
    matrices = sum(tensor.nbytes for tensor in tensors.values() if len(tensor.shape) > 1)
    vectors = sum(tensor.nbytes for tensor in tensors.values()) - matrices
    holders = {
        "leading": (1, 1),
        "inner": (1, 1),
        # A vector's block is on a whole row of the mesh, which several processes share.
        "both": (1, max(1, process_count // ROWS)),
        "replicated": (process_count, process_count),
    }[layout]
    assert plan.total_params == sum(prod(tensor.shape) for tensor in tensors.values())
    assert plan.total_bytes == matrices + vectors
    assert len(plan.processes) == process_count
    assert sum(cost.needed_bytes for cost in plan.processes) == holders[0] * matrices + holders[1] * vectors
    assert all(cost.read_bytes >= cost.needed_bytes == cost.destination_bytes for cost in plan.processes)
    if layout == "leading":
        assert all(cost.read_bytes == cost.needed_bytes for cost in plan.processes)


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
    parser.add_argument("--once", nargs=2, metavar=("LAYOUT", "PROCESSES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    directory = args.directory / "orbax-safetensors-bench" / "deepseek-v3"
    if args.once:
        print(json.dumps(plan_once(directory, args.once[0], int(args.once[1]))))
        return 0
    checkpoints.write_sparse(directory, checkpoints.deepseek_v3(), files=FILES)
    cases = [(layout, count) for layout in LAYOUTS for count in PROCESS_COUNTS][: 1 if args.quick else None]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(1 if args.quick else args.rounds):
        for layout, count in cases:
            command = [sys.executable, os.fspath(Path(__file__)), "--directory", os.fspath(args.directory)]
            done = subprocess.run([*command, "--once", layout, str(count)], stdout=subprocess.PIPE, check=True)
            runs[layout, count].append(json.loads(done.stdout.splitlines()[-1]))
    console = Console(width=120)
    table = Table(title=f"DeepSeek-V3, {FILES} files, {DEVICES} devices")
    columns = (
        "layout",
        "processes",
        "plan s",
        "CPU s",
        "headers CPU s",
        "peak MB",
        "imports MB",
        "read / needed",
        "met",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "layout" else "right")
    for (layout, count), own in runs.items():
        took = statistics.median(run["plan_seconds"] for run in own)
        peak = max(run["peak_bytes"] for run in own)
        table.add_row(
            layout,
            str(count),
            f"{took:.2f}",
            f"{statistics.median(run['plan_cpu_seconds'] for run in own):.2f}",
            f"{statistics.median(run['open_cpu_seconds'] for run in own):.2f}",
            f"{peak / 1e6:.0f}",
            f"{max(run['peak_imported_bytes'] for run in own) / 1e6:.0f}",
            f"{own[0]['read_bytes'] / own[0]['needed_bytes']:.3f}",
            "yes" if took < MAX_SECONDS and peak < MAX_PEAK_BYTES else "NO",
        )
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps([{"layout": c[0], "processes": c[1], "runs": r} for c, r in runs.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
