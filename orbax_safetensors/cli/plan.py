"""`plan`: what a restore on a mesh will cost every process. The mesh is abstract: no device is needed, none started."""

from __future__ import annotations

import argparse
import json
import posixpath
import sys
from collections.abc import Mapping
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from orbax_safetensors import api
from orbax_safetensors.cli.braces import in_braces
from orbax_safetensors.cli.family import full_name, switches_text, variant
from orbax_safetensors.cli.partition import Axes, UsageError, assign, axes_text, shards, spread
from orbax_safetensors.cli.tables import Output, Size, clean
from orbax_safetensors.plan.report import RestorePlan

# Arrays that a warning lists before it says how many more there are.
_LISTED = 3
# Leaves that a terminal shows of those whose sharding makes processes read more.
_WORST = 10


def run(args: argparse.Namespace, output: Output) -> int:
    """Prints the plan for restoring all of `args.path` on `args.mesh`."""
    mesh: dict[str, int] = args.mesh
    devices = prod(mesh.values())
    if devices % args.processes:
        raise UsageError(f"{devices} devices cannot be dealt to {args.processes} processes evenly")
    switches = variant(args)
    checkpoint = api.open_checkpoint(args.path, family=args.family, variant=switches)
    arrays = api.stored_arrays(checkpoint)
    shapes = {name: array.shape for name, array in arrays.items()}
    if args.spec:
        axes = assign(shapes, args.spec, mesh)
    else:
        axes = {name: spread(shape, mesh) for name, shape in shapes.items()}
    target = _target(arrays, axes, mesh)
    plan = api.plan_restore(args.path, target, family=args.family, variant=switches, process_count=args.processes)
    family = None if args.family is None else full_name(checkpoint, args.family)
    replicated = sum(prod(shards(own, mesh)) == 1 for own in axes.values())
    uneven = [name for name, shape in shapes.items() if not _even(shape, axes[name], mesh)]
    if args.json:
        document = {"path": args.path, "mesh": mesh, "replicated_arrays": replicated, "uneven_arrays": uneven}
        if family is not None:
            document |= {"family": family, "variant": switches}
        output.json(document | json.loads(plan.to_json()))
        return 0
    _print(plan, family, switches, mesh, replicated, uneven, output)
    if args.files:
        _print_files(plan, output)
    if plan.over_reads:
        _print_over_reads(plan, output)
    if uneven:
        output.flush()
        print(f"warning: {_refusal(uneven, shapes, axes)}", file=sys.stderr)
    return 0


def _target(
    arrays: Mapping[str, jax.ShapeDtypeStruct], axes: Mapping[str, Axes], mesh: Mapping[str, int]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The tree that is planned for: every stored array, sharded by its axes."""
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    # Few partitions are distinct, and to the plan arrays that share one sharding are cheap.
    shardings = {
        own: NamedSharding(abstract, PartitionSpec(*(entry or None for entry in own))) for own in set(axes.values())
    }
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=shardings[axes[name]])
        for name, array in arrays.items()
    }


def _even(shape: tuple[int, ...], axes: Axes, mesh: Mapping[str, int]) -> bool:
    return all(size % count == 0 for size, count in zip(shape, shards(axes, mesh), strict=False))


def _refusal(uneven: list[str], shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, Axes]) -> str:
    named = [f"{name!r} of shape {shapes[name]} by {axes_text(axes[name])}" for name in uneven[:_LISTED]]
    more = f" and {len(uneven) - _LISTED:,} more" if len(uneven) > _LISTED else ""
    return clean(f"JAX has no arrays with shards of unequal size, so a restore is refused: {', '.join(named)}{more}")


def _print(
    plan: RestorePlan,
    family: str | None,
    switches: dict[str, Any],
    mesh: Mapping[str, int],
    replicated: int,
    uneven: list[str],
    output: Output,
) -> None:
    devices = prod(mesh.values())
    largest, smallest = plan.largest_shard, plan.smallest_shard
    facts: list[tuple[str, Any]] = [
        *([] if family is None else [("family", f"{family} {switches_text(switches)}".strip())]),
        ("mesh", ",".join(f"{axis}={size}" for axis, size in mesh.items())),
        ("devices", devices),
        ("processes", len(plan.processes)),
        ("arrays", plan.num_arrays),
        ("replicated arrays", replicated),
        ("parameters", plan.total_params),
        ("bytes", Size(plan.total_bytes)),
    ]
    if largest == smallest and not uneven:
        facts += [("shards", "even"), ("bytes per device", Size(largest.nbytes))]
    else:
        facts += [
            ("shards", "uneven"),
            ("most bytes per device", Size(largest.nbytes)),
            ("fewest bytes per device", Size(smallest.nbytes)),
        ]
    output.facts(facts)
    output.table(
        ("process", "needed", "read", "over-read", "requests", "staging", "destination"),
        (
            (
                number,
                Size(cost.needed_bytes),
                Size(cost.read_bytes),
                cost.over_read,
                cost.num_requests,
                Size(cost.staging_bytes),
                Size(cost.destination_bytes),
            )
            for number, cost in enumerate(plan.processes)
        ),
    )


def _print_files(plan: RestorePlan, output: Output) -> None:
    output.table(
        ("process", "file", "needed", "read", "over-read", "requests"),
        (
            (
                number,
                posixpath.basename(cost.file),
                Size(cost.needed_bytes),
                Size(cost.read_bytes),
                cost.read_bytes / cost.needed_bytes if cost.needed_bytes else 1.0,
                cost.num_requests,
            )
            for number, process in enumerate(plan.processes)
            for cost in process.files
        ),
    )


def _print_over_reads(plan: RestorePlan, output: Output) -> None:
    """Leaves for which more is read than needed, those first that waste most.

    On a terminal those that differ in their numbers alone are one, and the worst are shown.
    """
    rows = [(leaf.name, leaf.needed_bytes, leaf.read_bytes) for leaf in plan.over_reads]
    more = 0
    if output.for_people:
        leaves = {leaf.name: leaf for leaf in plan.over_reads}
        rows = [
            (text, sum(leaves[name].needed_bytes for name in names), sum(leaves[name].read_bytes for name in names))
            for text, names in in_braces(leaves)
        ]
        rows.sort(key=lambda row: row[1] - row[2])
        more = len(rows) - _WORST
    output.table(
        ("leaf", "needed", "read", "over-read"),
        (
            (name, Size(needed), Size(read), read / needed)
            for name, needed, read in rows[: _WORST if more > 0 else None]
        ),
    )
    if more > 0:
        output.line(f" and {more:,} more; --json has all")
