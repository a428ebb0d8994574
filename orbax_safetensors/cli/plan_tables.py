"""What plans print: of restores, on one mesh in detail or on several side by side, and of saves."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from orbax_safetensors import RestorePlan, SavePlan, TimeEstimate
from orbax_safetensors.cli.partition import axes_text, mesh_text
from orbax_safetensors.cli.tables import Cell, Facts, Printer, Seconds, Size, shape_text
from orbax_safetensors.devices.sharding import Axes
from orbax_safetensors.orbax_store.restore_plan import OrbaxLeafOverRead, OrbaxRestorePlan
from orbax_safetensors.restore.advice import CheaperSharding
from orbax_safetensors.restore.cost import LeafReads, ProcessCost
from orbax_safetensors.restore.plan import PlannedRestore
from orbax_safetensors.transfer.figures import Reads

_OverRead = TypeVar("_OverRead", LeafReads, OrbaxLeafOverRead)


@dataclass(frozen=True)
class Scenario:
    """The checkpoint on one mesh.

    Attributes:
      mesh: axis sizes by name.
      replicated: how many arrays no axis cuts.
      restore, plan: the restore, and what it costs.
      estimate: how long it takes, if storage was described.
    """

    mesh: Mapping[str, int]
    replicated: int
    restore: PlannedRestore
    plan: RestorePlan
    estimate: TimeEstimate | None


def details(scenario: Scenario, tree: Facts, output: Printer, *, files: bool) -> None:
    """Print all there is to say of one mesh; `tree` are facts about the tree that is restored."""
    plan, time = scenario.plan, scenario.estimate
    facts = [
        *tree,
        *_mesh_facts(scenario.mesh),
        *_process_facts(plan.process_count, [cost.process for cost in plan.processes]),
        ("arrays", plan.num_arrays),
        ("replicated arrays", scenario.replicated),
        ("parameters", plan.total_params),
        ("bytes", Size(plan.total_bytes)),
        ("bytes per device", Size(plan.largest_shard.nbytes)),
        *[(each.way, Size(each.nbytes)) for each in plan.ways],
        ("requests to open", plan.open_requests),
        *_time_facts(time),
    ]
    output.facts(facts)
    _processes(
        output,
        ("process", "needed", "read", "over-read", "requests", "memory for reading", "memory for arrays"),
        [
            (
                cost.process,
                Size(cost.needed_bytes),
                Size(cost.read_bytes),
                cost.over_read,
                cost.num_requests,
                Size(cost.staging_bytes),
                Size(cost.destination_bytes),
            )
            for cost in plan.processes
        ],
        time,
    )
    output.legend("needed: bytes of its shards in the files; over-read: read / needed")
    if files:
        _files_read(plan.processes, output)
    if plan.most_requests:
        _most_requests(plan.most_requests, output)
    if plan.over_reads:
        _over_reads(scenario, output)


def comparison(scenarios: Sequence[Scenario], tree: Facts, output: Printer) -> None:
    """Print a row for each mesh. If processes differ, the one that has most counts."""
    plan = scenarios[0].plan
    output.facts(
        [*tree, ("arrays", plan.num_arrays), ("parameters", plan.total_params), ("bytes", Size(plan.total_bytes))]
    )
    with_time = scenarios[0].estimate is not None
    output.table(
        (
            "mesh",
            "devices",
            "processes",
            "per device",
            "read",
            "over-read",
            "requests",
            "memory",
            *(["time"] if with_time else []),
        ),
        [_compared(scenario) for scenario in scenarios],
    )


def _compared(scenario: Scenario) -> list[Cell]:
    processes = scenario.plan.processes
    row: list[Cell] = [
        mesh_text(scenario.mesh),
        prod(scenario.mesh.values()),
        scenario.plan.process_count,
        Size(scenario.plan.largest_shard.nbytes),
        Size(max(cost.read_bytes for cost in processes)),
        Reads.total(processes).over_read,
        max(cost.num_requests for cost in processes),
        Size(max(cost.staging_bytes + cost.destination_bytes for cost in processes)),
    ]
    return [*row, Seconds(scenario.estimate.seconds)] if scenario.estimate is not None else row


def saved(
    mesh: Mapping[str, int], plan: SavePlan, time: TimeEstimate | None, tree: Facts, output: Printer, *, files: bool
) -> None:
    """Print what a save writes: the files, and what each process writes into them."""
    output.facts(
        [
            *tree,
            *_mesh_facts(mesh),
            *_process_facts(plan.process_count, [cost.process for cost in plan.processes]),
            ("files", len(plan.files)),
            ("bytes", Size(sum(file.nbytes for file in plan.files))),
            *_time_facts(time),
        ]
    )
    _processes(
        output,
        ("process", "written", "requests", "files"),
        [(cost.process, Size(cost.written_bytes), cost.num_requests, len(cost.files)) for cost in plan.processes],
        time,
    )
    if files:
        output.table(
            ("process", "file", "written", "requests"),
            (
                (cost.process, posixpath.basename(file.file), Size(file.written_bytes), file.num_requests)
                for cost in plan.processes
                for file in cost.files
            ),
        )


def orbax_restore(
    path: str, mesh: Mapping[str, int], plan: OrbaxRestorePlan, time: TimeEstimate | None, output: Printer
) -> None:
    """Print how many chunks of an Orbax checkpoint each process reads, and what of them it needs."""
    facts = [
        ("path", path),
        *_mesh_facts(mesh),
        ("processes", len(plan.processes)),
        ("arrays", plan.num_arrays),
        ("chunks", plan.total_chunks),
        ("bytes", Size(plan.total_bytes)),
    ]
    if plan.file_bytes is not None:
        facts += [("bytes of files", Size(plan.file_bytes))]
    output.facts([*facts, *_time_facts(time)])
    orbax_processes(plan, "read decoded", time, output)


def orbax_processes(plan: OrbaxRestorePlan, read: str, time: TimeEstimate | None, output: Printer) -> None:
    """Print what each process of a restore by Orbax reads; `read` is the head of the column of bytes."""
    _processes(
        output,
        ("process", "needed", read, "over-read", "chunks"),
        [
            (process, Size(cost.needed_bytes), Size(cost.read_bytes), cost.over_read, cost.num_chunks)
            for process, cost in enumerate(plan.processes)
        ],
        time,
    )


def orbax_over_reads(plan: OrbaxRestorePlan, output: Printer) -> None:
    """Print the leaves whose chunks waste most, and the chunks that would waste nothing."""
    rows = output.joined(plan.over_reads, lambda leaf: (leaf.shape, leaf.chunk_shape, leaf.shard_shape))
    output.worst(
        ("leaf", "needed", "read decoded", "over-read", "chunks", "chunk", "instead"),
        [
            (
                text,
                Size(reads.needed_bytes),
                Size(reads.read_bytes),
                reads.over_read,
                sum(leaf.num_chunks for leaf in leaves),
                shape_text(leaves[0].chunk_shape),
                shape_text(leaves[0].shard_shape),
            )
            for text, leaves, reads in _most_wasteful(rows)
        ],
    )
    output.legend("chunk: as stored; instead: a chunk that fits the shards")


def _mesh_facts(mesh: Mapping[str, int]) -> Facts:
    return [("mesh", mesh_text(mesh)), ("devices", prod(mesh.values()))]


def _process_facts(process_count: int, shown: Sequence[int]) -> Facts:
    """Return how many processes there are, and which of them a plan has."""
    facts: Facts = [("processes", process_count)]
    if len(shown) < process_count:
        facts.append(("processes shown", ", ".join(map(str, shown))))
    return facts


def _time_facts(time: TimeEstimate | None) -> Facts:
    return [] if time is None else [("estimated time", Seconds(time.seconds)), ("slowest process", time.slowest)]


def _processes(
    output: Printer, columns: Sequence[str], rows: Sequence[Sequence[Cell]], time: TimeEstimate | None
) -> None:
    """Print a row for each process, with its estimated time if there is one."""
    if time is not None:
        columns = [*columns, "time"]
        rows = [[*row, Seconds(seconds)] for row, seconds in zip(rows, time.processes, strict=True)]
    output.table(columns, rows)


def _files_read(processes: Sequence[ProcessCost], output: Printer) -> None:
    """Print what each process reads of each file."""
    output.table(
        ("process", "file", "needed", "read", "over-read", "requests"),
        (
            (
                cost.process,
                posixpath.basename(file.file),
                Size(file.needed_bytes),
                Size(file.read_bytes),
                file.over_read,
                file.num_requests,
            )
            for cost in processes
            for file in cost.files
        ),
    )


def _over_reads(scenario: Scenario, output: Printer) -> None:
    """Print the leaves that waste most, and the partition that would waste less, if there is one."""
    others = scenario.restore.cheaper_shardings(scenario.plan)
    digits = ".2f" if output.for_people else ".6g"
    rows: list[tuple[Cell, ...]] = []
    for text, leaves, reads in _most_wasteful(output.joined(scenario.plan.over_reads)):
        best = _best([others[leaf.name] for leaf in leaves])
        # A partition that reads as much is not worth a line.
        advice = ("-", "-")
        if best is not None and best.over_read < reads.over_read:
            advice = axes_text(best.axes), f"{best.over_read:{digits}}"
        rows.append((text, Size(reads.needed_bytes), Size(reads.read_bytes), reads.over_read, *advice))
    output.worst(("leaf", "needed", "read", "over-read", "instead", "then"), rows)
    output.legend("instead: AXES for --spec that read less; then: the over-read with them")


def _most_wasteful(rows: Iterable[tuple[str, list[_OverRead]]]) -> list[tuple[str, list[_OverRead], Reads]]:
    """Return rows of leaves with the sums of their reads, those first that waste most."""
    summed = [(text, leaves, Reads.total(leaves)) for text, leaves in rows]
    return sorted(summed, key=lambda row: row[2].needed_bytes - row[2].read_bytes)


def _best(choices: Sequence[Sequence[CheaperSharding]]) -> CheaperSharding | None:
    """Return the partition that all of some leaves can have and that reads least; sums over the leaves."""
    sums: dict[Axes, list[CheaperSharding]] = {}
    for leaf in choices:
        for choice in leaf:
            sums.setdefault(choice.axes, []).append(choice)
    totals = ((axes, Reads.total(same)) for axes, same in sums.items() if len(same) == len(choices))
    possible = [CheaperSharding(axes, reads.needed_bytes, reads.read_bytes) for axes, reads in totals]
    return min(possible, key=lambda choice: choice.over_read, default=None)


def _most_requests(leaves: Sequence[LeafReads], output: Printer) -> None:
    """Print the leaves that make most of the requests."""
    output.table(
        ("leaf", "requests", "read", "bytes per request"),
        (
            (leaf.name, leaf.num_requests, Size(leaf.read_bytes), Size(leaf.read_bytes // leaf.num_requests))
            for leaf in leaves
        ),
    )
