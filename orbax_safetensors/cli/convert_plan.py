"""`convert --plan` and `reshard --plan`: what they would read and write. Nothing is made."""

from __future__ import annotations

import argparse
import json
import posixpath

from orbax_safetensors import ConversionPlan, TimeEstimate
from orbax_safetensors.cli.partition import UsageError
from orbax_safetensors.cli.plan_tables import files_read
from orbax_safetensors.cli.tables import Cell, Printer, Seconds, Size, shape_text

_FOR_A_PLAN = ("processes", "files", "bandwidth", "latency", "write_bandwidth", "write_latency")


def check(args: argparse.Namespace) -> None:
    """Raise `UsageError` if options do not go together."""
    if not args.plan:
        for name in _FOR_A_PLAN:
            value = getattr(args, name)
            if value is not None and value is not False:
                raise UsageError(f"--{name.replace('_', '-')} is for --plan")
        return
    for name in ("resume", "distributed"):
        if getattr(args, name):
            raise UsageError(f"--{name} is not for --plan")
    for name in ("latency", "write_bandwidth", "write_latency"):
        if getattr(args, name) is not None and args.bandwidth is None:
            raise UsageError(f"--{name.replace('_', '-')} is for an estimate of the time, which also needs --bandwidth")


def report(args: argparse.Namespace, output: Printer, plan: ConversionPlan) -> int:
    """Print a plan."""
    time = None
    speeds = {
        "bandwidth": args.bandwidth,
        "latency": args.latency or 0.0,
        "write_bandwidth": args.bandwidth if args.write_bandwidth is None else args.write_bandwidth,
        "write_latency": (args.latency or 0.0) if args.write_latency is None else args.write_latency,
    }
    if args.bandwidth is not None:
        time = plan.estimate(**speeds)
    if args.json:
        document = json.loads(plan.to_json())
        if time is not None:
            times = {"seconds": time.seconds, "slowest": time.slowest, "processes": time.processes}
            document["estimate"] = speeds | times
        output.json(document)
        return 0
    output.facts(_facts(plan, time))
    decoded = " decoded"
    read, written = decoded * plan.from_orbax, decoded * plan.to_orbax
    output.table(
        (
            "process",
            f"read{read}",
            "over-read",
            "reads" if not plan.from_orbax else "chunks read",
            f"written{written}",
            "writes" if not plan.to_orbax else "chunks written",
            "batches",
            "memory",
            *(["time"] if time is not None else []),
        ),
        (
            (
                number,
                Size(cost.read_bytes),
                cost.over_read,
                cost.read_requests,
                Size(cost.written_bytes),
                cost.write_requests,
                len(cost.batches),
                Size(cost.staging_bytes),
                *([Seconds(time.processes[number])] if time is not None else []),
            )
            for number, cost in enumerate(plan.processes)
        ),
    )
    if args.files:
        _files(plan, output)
    return 0


def _facts(plan: ConversionPlan, time: TimeEstimate | None) -> list[tuple[str, Cell]]:
    facts: list[tuple[str, Cell]] = [("path", plan.path), ("processes", len(plan.processes))]
    facts += [("bytes", Size(plan.total_bytes))]
    if plan.source_bytes is not None:
        facts += [("source files", Size(plan.source_bytes))]
    if plan.to_orbax:
        sizes = [array.chunk_bytes for array in plan.arrays]
        facts += [("arrays", len(plan.arrays)), ("chunks", plan.num_chunks)]
        facts += [("largest chunk, decoded", Size(max(sizes, default=0)))]
    else:
        facts += [("files", len(plan.files)), ("bytes of files", Size(sum(file.nbytes for file in plan.files)))]
    if time is not None:
        facts += [("estimated time", Seconds(time.seconds)), ("slowest process", time.slowest)]
    return facts


def _files(plan: ConversionPlan, output: Printer) -> None:
    """Print what each process reads and writes of each file; of Orbax, the arrays that are made instead."""
    if not plan.from_orbax:
        files_read(output, "reads", [cost.reads for cost in plan.processes])
    if plan.to_orbax:
        items = any(array.item is not None for array in plan.arrays)
        output.table(
            (*(["item"] if items else []), "array", "dtype", "shape", "chunk", "chunks", "chunk bytes"),
            (
                (
                    *([array.item or ""] if items else []),
                    array.name,
                    array.dtype,
                    shape_text(array.shape),
                    shape_text(array.chunk_shape),
                    array.num_chunks,
                    Size(array.chunk_bytes),
                )
                for array in plan.arrays
            ),
        )
    else:
        output.table(
            ("process", "file", "written", "writes"),
            (
                (number, posixpath.basename(file.file), Size(file.written_bytes), file.num_requests)
                for number, cost in enumerate(plan.processes)
                for file in cost.writes
            ),
        )
