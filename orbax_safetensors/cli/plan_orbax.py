"""`plan` of a checkpoint of Orbax: how many chunks each process of a restore reads, and what of them it needs."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import asdict
from math import prod

from orbax_safetensors import TimeEstimate
from orbax_safetensors.cli.braces import in_braces
from orbax_safetensors.cli.partition import Axes, UsageError, mesh_text, spread
from orbax_safetensors.cli.tables import Cell, Printer, Seconds, Size, shape_text
from orbax_safetensors.cost.estimate import estimate
from orbax_safetensors.cost.orbax_restore import OrbaxLeafOverRead, OrbaxRestorePlan, plan_orbax_restore
from orbax_safetensors.devices.partition import Partition, partition
from orbax_safetensors.devices.rules import check_used
from orbax_safetensors.orbax_store import OrbaxCheckpoint, open_orbax
from orbax_safetensors.orbax_store.directories import requests_at_once
from orbax_safetensors.orbax_store.leaf import ARRAYS

# Leaves that a terminal shows of those that force over-read.
_WORST = 10


def run(args: argparse.Namespace, count: int, output: Printer) -> int:
    """Print the plan for restoring all of `args.path` on the mesh in `count` processes."""
    checkpoint = open_orbax(args.path)
    for option in ("family", "variant", "save", "files", "picture"):
        if getattr(args, option):
            raise UsageError(f"--{option} is for safetensors, and PATH is a checkpoint of Orbax")
    if len(args.mesh) > 1:
        raise UsageError("a checkpoint of Orbax is planned for one --mesh")
    (mesh,) = args.mesh
    plan = plan_orbax_restore(checkpoint, _partition(checkpoint, mesh, args), count)
    streams = args.streams or requests_at_once(checkpoint.path)
    time = None
    if args.bandwidth is not None:
        reads = [(cost.read_bytes, cost.num_chunks) for cost in plan.processes]
        time = estimate(reads, args.bandwidth, args.latency or 0.0, streams)
    reshard = _reshard(args)
    if args.json:
        document = {"path": checkpoint.path, "mesh": mesh} | json.loads(plan.to_json())
        document["reshard"] = reshard if plan.over_reads else None
        if time is not None:
            speeds = {"bandwidth": args.bandwidth, "latency": args.latency or 0.0, "streams": streams}
            document["estimate"] = speeds | asdict(time)
        output.json(document)
        return 0
    _print(checkpoint, plan, time, mesh, output)
    if plan.over_reads:
        over_reads(plan, output)
        output.line("")
        output.line("Stored anew in such chunks, each process reads what it needs:")
        output.line(reshard)
    return 0


def _partition(checkpoint: OrbaxCheckpoint, mesh: dict[str, int], args: argparse.Namespace) -> Partition:
    """Return the partition of the `--spec`; without any, that of a plan of safetensors."""
    shapes = {name: leaf.shape for name, leaf in checkpoint.leaves.items() if leaf.kind in ARRAYS}
    if args.spec:
        check_used("spec", [rule.pattern for rule in args.spec], shapes)  # of two that are alike, too
        return partition(mesh, {rule.pattern.pattern: _spec(rule.axes) for rule in args.spec})
    names: dict[Axes, list[str]] = {}
    for name, shape in shapes.items():
        names.setdefault(spread(shape, mesh), []).append(re.escape(name))
    return partition(mesh, {f"^(?:{'|'.join(group)})$": _spec(axes) for axes, group in names.items()})


def _spec(axes: Axes) -> tuple[str | tuple[str, ...] | None, ...]:
    return tuple(entry[0] if len(entry) == 1 else entry or None for entry in axes)


def _reshard(args: argparse.Namespace) -> str:
    """Return the command that ends the over-read."""
    specs = [f"--spec {shlex.quote(rule.text)}" for rule in args.spec] or ["--spec REGEX=AXES"]
    return " ".join(
        ["orbax-safetensors reshard", shlex.quote(args.path), "DESTINATION --mesh", mesh_text(args.mesh[0]), *specs]
    )


def _print(
    checkpoint: OrbaxCheckpoint,
    plan: OrbaxRestorePlan,
    time: TimeEstimate | None,
    mesh: dict[str, int],
    output: Printer,
) -> None:
    facts: list[tuple[str, Cell]] = [
        ("path", checkpoint.path),
        ("mesh", mesh_text(mesh)),
        ("devices", prod(mesh.values())),
        ("processes", len(plan.processes)),
        ("arrays", plan.num_arrays),
        ("chunks", plan.total_chunks),
        ("bytes", Size(plan.total_bytes)),
    ]
    if plan.file_bytes is not None:
        facts += [("bytes of files", Size(plan.file_bytes))]
    if time is not None:
        facts += [("estimated time", Seconds(time.seconds)), ("slowest process", time.slowest)]
    output.facts(facts)
    output.table(
        ("process", "needed", "read decoded", "over-read", "chunks", *(["time"] if time is not None else [])),
        (
            (
                number,
                Size(cost.needed_bytes),
                Size(cost.read_bytes),
                cost.over_read,
                cost.num_chunks,
                *([Seconds(time.processes[number])] if time is not None else []),
            )
            for number, cost in enumerate(plan.processes)
        ),
    )


def over_reads(plan: OrbaxRestorePlan, output: Printer) -> None:
    """Print the worst leaves: on a terminal grouped, if shapes are equal too, and only some; elsewhere all."""
    leaves = {leaf.name: leaf for leaf in plan.over_reads}
    rows: list[tuple[str, list[OrbaxLeafOverRead]]] = []
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, leaf in leaves.items():
        key = (leaf.shape, leaf.chunk_shape, leaf.shard_shape) if output.for_people else (name,)
        alike.setdefault(key, []).append(name)
    for group in alike.values():
        rows += [(text, [leaves[name] for name in names]) for text, names in in_braces(group)]
    rows.sort(key=lambda row: sum(leaf.needed_bytes - leaf.read_bytes for leaf in row[1]))
    more = len(rows) - _WORST if output.for_people else 0
    output.table(
        ("leaf", "needed", "read decoded", "over-read", "chunks", "chunk", "instead"),
        (
            (
                text,
                Size(needed := sum(leaf.needed_bytes for leaf in group)),
                Size(read := sum(leaf.read_bytes for leaf in group)),
                read / needed,
                sum(leaf.num_chunks for leaf in group),
                shape_text(group[0].chunk_shape),
                shape_text(group[0].shard_shape),
            )
            for text, group in rows[: _WORST if more > 0 else None]
        ),
    )
    if more > 0:
        output.line(f" and {more:,} more; --json has all")
