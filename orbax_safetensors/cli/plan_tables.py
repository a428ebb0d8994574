"""What `plan` prints: one mesh in detail, or several side by side."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from orbax_safetensors import RestorePlan, SavePlan, TimeEstimate
from orbax_safetensors.cli.braces import in_braces
from orbax_safetensors.cli.partition import Axes, axes_text, mesh_text, shards
from orbax_safetensors.cli.tables import Cell, Printer, Seconds, Size
from orbax_safetensors.cost.advice import Instead
from orbax_safetensors.cost.figures import FileReads, OverRead, Reads
from orbax_safetensors.cost.restore import ProcessCost
from orbax_safetensors.restore.plan import Distribution

# Leaves that a terminal shows of those whose sharding makes processes read more.
_WORST = 10


@dataclass(frozen=True)
class Scenario:
    """The checkpoint on one mesh.

    Attributes:
      mesh: axis sizes by name.
      shapes, axes: of every array, and how the mesh shards it.
      distribution, plan: the restore, and what it costs.
      estimate: how long it takes, if storage was described.
    """

    mesh: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, Axes]
    distribution: Distribution
    plan: RestorePlan
    estimate: TimeEstimate | None

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return prod(self.mesh.values())

    @property
    def replicated(self) -> int:
        """How many arrays no axis cuts."""
        return sum(prod(shards(axes, self.mesh)) == 1 for axes in self.axes.values())

    @cached_property
    def uneven(self) -> list[str]:
        """Names of the arrays that an axis does not divide."""
        return [name for name, shape in self.shapes.items() if not _even(shape, self.axes[name], self.mesh)]


def _even(shape: tuple[int, ...], axes: Axes, mesh: Mapping[str, int]) -> bool:
    return all(size % count == 0 for size, count in zip(shape, shards(axes, mesh), strict=False))


Facts = Sequence[tuple[str, Cell]]


def details(scenario: Scenario, tree: Facts, output: Printer, *, files: bool) -> None:
    """Print all there is to say of one mesh; `tree` are facts about the tree that is restored."""
    plan, time = scenario.plan, scenario.estimate
    largest, smallest = plan.largest_shard, plan.smallest_shard
    facts: list[tuple[str, Cell]] = [
        *tree,
        ("mesh", mesh_text(scenario.mesh)),
        ("devices", scenario.devices),
        ("processes", len(plan.processes)),
        ("arrays", plan.num_arrays),
        ("replicated arrays", scenario.replicated),
        ("parameters", plan.total_params),
        ("bytes", Size(plan.total_bytes)),
        ("requests to open", plan.open_requests),
    ]
    if plan.open_requests != plan.open_requests_without_record:
        facts.append(("without a record of headers", plan.open_requests_without_record))
    if largest == smallest and not scenario.uneven:
        facts += [("shards", "even"), ("bytes per device", Size(largest.nbytes))]
    else:
        facts += [
            ("shards", "uneven"),
            ("most bytes per device", Size(largest.nbytes)),
            ("fewest bytes per device", Size(smallest.nbytes)),
        ]
    if time is not None:
        facts += [("estimated time", Seconds(time.seconds)), ("slowest process", time.slowest)]
    output.facts(facts)
    output.table(
        (
            "process",
            "needed",
            "read",
            "over-read",
            "requests",
            "staging",
            "destination",
            *(["time"] if time is not None else []),
        ),
        (
            (
                number,
                Size(cost.needed_bytes),
                Size(cost.read_bytes),
                cost.over_read,
                cost.num_requests,
                Size(cost.staging_bytes),
                Size(cost.destination_bytes),
                *([Seconds(time.processes[number])] if time is not None else []),
            )
            for number, cost in enumerate(plan.processes)
        ),
    )
    if files:
        files_read(output, "requests", [process.files for process in plan.processes])
    _together([scenario], output)
    if plan.over_reads:
        _over_reads(scenario, output)


def saved(
    mesh: Mapping[str, int], plan: SavePlan, time: TimeEstimate | None, tree: Facts, output: Printer, *, files: bool
) -> None:
    """Print what a save writes: the files, and what each process writes into them."""
    facts: list[tuple[str, Cell]] = [
        *tree,
        ("mesh", mesh_text(mesh)),
        ("devices", prod(mesh.values())),
        ("processes", len(plan.processes)),
        ("files", len(plan.files)),
        ("bytes", Size(sum(file.nbytes for file in plan.files))),
    ]
    if time is not None:
        facts += [("estimated time", Seconds(time.seconds)), ("slowest process", time.slowest)]
    output.facts(facts)
    output.table(
        ("process", "written", "requests", "files", *(["time"] if time is not None else [])),
        (
            (
                number,
                Size(cost.written_bytes),
                cost.num_requests,
                len(cost.files),
                *([Seconds(time.processes[number])] if time is not None else []),
            )
            for number, cost in enumerate(plan.processes)
        ),
    )
    if files:
        output.table(
            ("process", "file", "written", "requests"),
            (
                (number, file.file, Size(file.written_bytes), file.num_requests)
                for number, cost in enumerate(plan.processes)
                for file in cost.files
            ),
        )


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
    _together(scenarios, output)


def _compared(scenario: Scenario) -> list[Cell]:
    processes = scenario.plan.processes
    row: list[Cell] = [
        mesh_text(scenario.mesh),
        scenario.devices,
        len(processes),
        Size(scenario.plan.largest_shard.nbytes),
        Size(max(cost.read_bytes for cost in processes)),
        Reads.total(processes).over_read,
        max(cost.num_requests for cost in processes),
        Size(max(map(_memory, processes))),
    ]
    return [*row, Seconds(scenario.estimate.seconds)] if scenario.estimate is not None else row


def _together(scenarios: Sequence[Scenario], output: Printer) -> None:
    """Print what `cooperative=True` reads, if that is less: for each process, or of several meshes the most of any."""
    rows: list[list[Cell]] = []
    for scenario in scenarios:
        cooperation = scenario.plan.cooperation
        if cooperation is None or not cooperation.num_arrays:
            continue
        costs = [
            (number, *cost) for number, cost in enumerate(zip(cooperation.direct, cooperation.cooperative, strict=True))
        ]
        if len(scenarios) > 1:
            costs = [max(costs, key=lambda cost: cost[1].read_bytes - cost[2].read_bytes)]
        for number, direct, together in costs:
            row: list[Cell] = [number if len(scenarios) == 1 else mesh_text(scenario.mesh), cooperation.num_arrays]
            row += [Size(direct.read_bytes), direct.num_requests]
            rows.append([*row, Size(together.read_bytes), together.num_requests, Size(together.received_bytes)])
    if rows:
        first = "process" if len(scenarios) == 1 else "mesh"
        output.table(
            (
                first,
                "exchanged arrays",
                "read alone",
                "requests alone",
                "read together",
                "requests together",
                "received",
            ),
            rows,
        )


def _memory(cost: ProcessCost) -> int:
    return cost.staging_bytes + cost.destination_bytes


def files_read(output: Printer, requests: str, processes: Sequence[Sequence[FileReads]]) -> None:
    """Print a table of what each process reads of each file; `requests` is the head of that column."""
    output.table(
        ("process", "file", "needed", "read", "over-read", requests),
        (
            (
                number,
                posixpath.basename(cost.file),
                Size(cost.needed_bytes),
                Size(cost.read_bytes),
                cost.over_read,
                cost.num_requests,
            )
            for number, files in enumerate(processes)
            for cost in files
        ),
    )


@dataclass(frozen=True)
class Worst(OverRead):
    """Leaves for which more is read than needed, and the partition that would waste less, if there is one."""

    text: str
    needed_bytes: int
    read_bytes: int
    instead: Instead | None

    @property
    def axes(self) -> str:
        """The better partition as `--spec` takes it."""
        return "-" if self.instead is None else axes_text(self.instead.axes)


def worst_leaves(scenario: Scenario, *, grouped: bool) -> list[Worst]:
    """Return leaves for which more is read than needed, those first that waste most.

    With `grouped`, those that differ in their numbers alone are one.
    """
    leaves = {leaf.name: leaf for leaf in scenario.plan.over_reads}
    others = scenario.distribution.instead(scenario.plan)
    out = []
    for text, names in in_braces(leaves) if grouped else [(name, [name]) for name in leaves]:
        reads = Reads.total(leaves[name] for name in names)
        best = _best([others[name] for name in names])
        # What saves nothing is no advice.
        saves = best is not None and best.over_read < reads.over_read
        out.append(Worst(text, reads.needed_bytes, reads.read_bytes, best if saves else None))
    return sorted(out, key=lambda row: row.needed_bytes - row.read_bytes)


def _over_reads(scenario: Scenario, output: Printer) -> None:
    """Print the worst leaves: on a terminal grouped and only some, elsewhere all."""
    rows = worst_leaves(scenario, grouped=output.for_people)
    more = len(rows) - _WORST if output.for_people else 0
    digits = ".2f" if output.for_people else ".6g"
    output.table(
        ("leaf", "needed", "read", "over-read", "instead", "then"),
        (
            (
                row.text,
                Size(row.needed_bytes),
                Size(row.read_bytes),
                row.over_read,
                row.axes,
                "-" if row.instead is None else f"{row.instead.over_read:{digits}}",
            )
            for row in rows[: _WORST if more > 0 else None]
        ),
    )
    if more > 0:
        output.line(f" and {more:,} more; --json has all")


def _best(choices: Sequence[Sequence[Instead]]) -> Instead | None:
    """Return the partition that all of some leaves can have and that reads least; sums over the leaves."""
    sums: dict[Axes, list[Instead]] = {}
    for leaf in choices:
        for choice in leaf:
            sums.setdefault(choice.axes, []).append(choice)
    totals = ((axes, Reads.total(same)) for axes, same in sums.items() if len(same) == len(choices))
    possible = [Instead(axes, reads.needed_bytes, reads.read_bytes) for axes, reads in totals]
    return min(possible, key=lambda choice: choice.over_read, default=None)
