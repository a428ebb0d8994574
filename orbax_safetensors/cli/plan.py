"""`plan`: what a restore on a mesh will cost every process. The mesh is abstract: no device is needed, none started."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from orbax_safetensors import api
from orbax_safetensors.checkpoint import Checkpoint
from orbax_safetensors.cli import plan_orbax
from orbax_safetensors.cli.family import full_name, switches_text, variant
from orbax_safetensors.cli.partition import Axes, UsageError, assign, axes_text, mesh_text, spread
from orbax_safetensors.cli.plan_tables import Facts, Scenario, comparison, details, saved
from orbax_safetensors.cli.tables import Output, clean
from orbax_safetensors.conversions import is_orbax, place
from orbax_safetensors.errors import StorageError
from orbax_safetensors.io.store import Pace
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.plan.estimate import TimeEstimate, estimate, estimate_time
from orbax_safetensors.planning import no_collection, planned
from orbax_safetensors.save_planning import plan_save

# Arrays that a warning lists before it says how many more there are.
_LISTED = 3


def run(args: argparse.Namespace, output: Output) -> int:
    """Prints the plan for restoring all of `args.path` on each of `args.mesh`."""
    counts = _process_counts(args)
    if args.latency is not None and args.bandwidth is None:
        raise UsageError("--latency is for an estimate of the time, which also needs --bandwidth")
    if is_orbax(place(args.path)):
        return plan_orbax.run(args, counts[0], output)
    for option in ("files", "picture", "save"):
        if getattr(args, option) and len(args.mesh) > 1:
            raise UsageError(f"--{option} is for one --mesh")
    if args.save and args.picture is not None:
        raise UsageError("--picture is of a restore, and --save asks for a save")
    if args.picture is not None and not Path(args.picture).absolute().parent.is_dir():
        raise StorageError(f"{args.picture}: there is no directory to write it to")
    switches = variant(args)
    options = SafetensorsOptions() if args.streams is None else SafetensorsOptions(threads=args.streams)
    with no_collection():
        checkpoint = api.open_checkpoint(args.path, family=args.family, variant=switches)
        scenarios = [
            _scenario(checkpoint, mesh, count, args, options) for mesh, count in zip(args.mesh, counts, strict=True)
        ]
        family = None if args.family is None else full_name(checkpoint, args.family)
        tree = [] if family is None else [("family", f"{family} {switches_text(switches)}".strip())]
        if args.save:
            return _run_save(scenarios[0], tree, args, switches, output)
        if args.picture is not None:
            from orbax_safetensors.cli.heat_map import draw  # only who asks for a picture waits for it

            page = draw(scenarios[0], tree[0][1] if tree else None)
            Path(args.picture).write_text(page, encoding="utf-8")
        if args.json:
            named = {} if family is None else {"family": family, "variant": switches}
            plans = [_document(scenario, args) for scenario in scenarios]
            output.json({"path": checkpoint.path} | (plans[0] if len(plans) == 1 else {"meshes": plans}) | named)
            return 0
        if len(scenarios) == 1:
            details(scenarios[0], tree, output, files=args.files)
        else:
            comparison(scenarios, tree, output)
    if args.picture is not None:
        output.line("")
        output.line(f"Which bytes each process reads: {args.picture}")
    output.flush()
    for scenario in scenarios:
        if scenario.uneven:
            where = f"{mesh_text(scenario.mesh)}: " if len(scenarios) > 1 else ""
            print(f"warning: {where}{_refusal(scenario)}", file=sys.stderr)
    return 0


def _run_save(
    scenario: Scenario, tree: Facts, args: argparse.Namespace, switches: dict[str, Any], output: Output
) -> int:
    """Prints what saving the tree costs."""
    plan = plan_save(scenario.planned, args.family, switches)
    time = None
    if args.bandwidth is not None:
        writes = [(cost.written_bytes, cost.num_requests) for cost in plan.processes]
        time = estimate(writes, args.bandwidth, args.latency or 0.0, scenario.planned.pace.requests)
    if args.json:
        document: dict[str, Any] = {"path": scenario.planned.checkpoint.path, "mesh": scenario.mesh} | asdict(plan)
        if time is not None:
            document["estimate"] = _estimate_document(time, args, scenario.planned.pace)
        if args.family is not None:
            document |= {"family": full_name(scenario.planned.checkpoint, args.family), "variant": switches}
        output.json(document)
    else:
        saved(scenario, plan, time, tree, output, files=args.files)
    return 0


def _estimate_document(time: TimeEstimate, args: argparse.Namespace, pace: Pace) -> dict[str, Any]:
    asked = {"bandwidth": args.bandwidth, "latency": args.latency or 0.0, "streams": pace.requests}
    return asked | asdict(time)


def _process_counts(args: argparse.Namespace) -> list[int]:
    """The number of processes for each mesh."""
    counts: list[int] = args.processes or [1]
    if len(counts) == 1:
        counts = counts * len(args.mesh)
    if len(counts) != len(args.mesh):
        raise UsageError(f"{len(args.mesh)} --mesh and {len(counts)} --processes: give one for all, or one for each")
    for mesh, count in zip(args.mesh, counts, strict=True):
        if (devices := prod(mesh.values())) % count:
            raise UsageError(f"{devices} devices cannot be dealt to {count} processes evenly")
    return counts


def _scenario(
    checkpoint: Checkpoint, mesh: dict[str, int], count: int, args: argparse.Namespace, options: SafetensorsOptions
) -> Scenario:
    arrays = api.stored_arrays(checkpoint)
    shapes = {name: array.shape for name, array in arrays.items()}
    if args.spec:
        axes = assign(shapes, args.spec, mesh)
    else:
        axes = {name: spread(shape, mesh) for name, shape in shapes.items()}
    found = planned(checkpoint, _target(arrays, axes, mesh), count, options)
    plan = found.plan(compared=True)
    time = None
    if args.bandwidth is not None:
        time = estimate_time(plan, bandwidth=args.bandwidth, latency=args.latency or 0.0, streams=found.pace.requests)
    return Scenario(mesh, shapes, axes, found, plan, time)


def _document(scenario: Scenario, args: argparse.Namespace) -> dict[str, Any]:
    """All that `--json` says of one mesh."""
    plan = scenario.plan
    document: dict[str, Any] = {"mesh": scenario.mesh, "replicated_arrays": scenario.replicated}
    document |= {"uneven_arrays": scenario.uneven} | json.loads(plan.to_json())
    instead = scenario.planned.instead(plan)
    for leaf in document["over_reads"]:
        leaf["instead"] = [
            asdict(other) | {"axes": axes_text(other.axes), "over_read": other.over_read}
            for other in instead[leaf["name"]]
        ]
    if (time := scenario.estimate) is not None:
        document["estimate"] = _estimate_document(time, args, scenario.planned.pace)
    return document


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


def _refusal(scenario: Scenario) -> str:
    uneven, shapes, axes = scenario.uneven, scenario.shapes, scenario.axes
    named = [f"{name!r} of shape {shapes[name]} by {axes_text(axes[name])}" for name in uneven[:_LISTED]]
    more = f" and {len(uneven) - _LISTED:,} more" if len(uneven) > _LISTED else ""
    return clean(f"JAX has no arrays with shards of unequal size, so a restore is refused: {', '.join(named)}{more}")
