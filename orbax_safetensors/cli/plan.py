"""`plan`: what a restore on a mesh will cost every process. The mesh is abstract: no device is needed, none started."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from orbax_safetensors import (
    Checkpoint,
    SafetensorsOptions,
    StorageError,
    TimeEstimate,
    estimate_time,
    open_checkpoint,
    plan_save,
)
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.checkpoint.open import stored_arrays
from orbax_safetensors.cli import plan_orbax
from orbax_safetensors.cli.family import add_family, full_name, switches_text, variant
from orbax_safetensors.cli.partition import (
    Axes,
    UsageError,
    add_spec,
    assign,
    axes_text,
    mesh_text,
    parse_mesh,
    spread,
)
from orbax_safetensors.cli.plan_picture import draw_plan
from orbax_safetensors.cli.plan_tables import Facts, Scenario, comparison, details, saved
from orbax_safetensors.cli.tables import Printer
from orbax_safetensors.cli.units import parse_bandwidth, parse_count, parse_latency
from orbax_safetensors.cost.estimate import estimate
from orbax_safetensors.errors import printable
from orbax_safetensors.restore.plan import distribution
from orbax_safetensors.storage.memory import no_collection
from orbax_safetensors.storage.paths import as_text, place

# Arrays that a warning lists before it says how many more there are.
_LISTED = 3

# argparse leaves these texts as they are.
_DESCRIPTION = """\
Prints what restoring all of PATH on a mesh of devices costs every process:
bytes, requests, memory. Reads headers only, and needs no devices."""

_EPILOG = """\
AXES has an entry for each dimension: a mesh axis, several joined by +, or -.
The first --spec whose REGEX is found in an array's name counts; other arrays
are replicated. Without any --spec, each axis shards a dimension it divides.

examples:
  orbax-safetensors plan model/ --mesh data=2,model=4 --processes 2 \\
      --spec 'embed_tokens=data+model,-' --spec 'proj\\.weight$=model,data'
  orbax-safetensors plan model/ --mesh fsdp=8 --mesh fsdp=4,tensor=2 \\
      --family maxtext --bandwidth 2GB/s --latency 10ms
"""


def add_parser(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return the parser of the command, which `add` has made."""
    parser = add(
        "plan",
        help="what a restore on a mesh will cost",
        usage="%(prog)s PATH --mesh AXIS=SIZE,... [OPTION]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("path", metavar="PATH")
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        action="append",
        required=True,
        metavar="AXIS=SIZE,...",
        help="mesh of devices, as data=2,model=4; repeat it to compare several",
    )
    parser.add_argument(
        "--processes",
        type=parse_count,
        action="append",
        metavar="N",
        help="processes that share the devices (default: 1); once or for each --mesh",
    )
    add_spec(parser)
    add_family(parser)
    parser.add_argument("--files", action="store_true", help="also print what each process reads of each file")
    parser.add_argument("--picture", metavar="FILE", help="also draw which process reads which bytes, as an HTML page")
    parser.add_argument("--save", action="store_true", help="plan a save of that tree instead")
    parser.add_argument(
        "--bandwidth",
        type=parse_bandwidth,
        metavar="SPEED",
        help="of storage for each process, as 2GB/s; adds estimated times",
    )
    parser.add_argument(
        "--latency",
        type=parse_latency,
        metavar="TIME",
        help="time to the first byte of a request (default: 0s)",
    )
    parser.add_argument(
        "--streams",
        type=parse_count,
        metavar="N",
        help="requests in flight at once (default: as in a restore here)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print the plan for restoring all of `args.path` on each of `args.mesh`."""
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
    if args.picture is not None:
        args.picture = as_text(args.picture)
        if not Path(args.picture).absolute().parent.is_dir():
            raise StorageError(f"{args.picture}: there is no directory to write it to")
    switches = variant(args)
    options = SafetensorsOptions() if args.streams is None else SafetensorsOptions(threads=args.streams)
    with no_collection():
        checkpoint = open_checkpoint(args.path, family=args.family, variant=switches)
        family = None if args.family is None else full_name(checkpoint, args.family)
        tree = [] if family is None else [("family", f"{family} {switches_text(switches)}".strip())]
        named = {} if family is None else {"family": family, "variant": switches}
        if args.save:
            return _run_save(checkpoint, counts[0], args, options, tree, named, output)
        scenarios = [
            _scenario(checkpoint, mesh, count, args, options) for mesh, count in zip(args.mesh, counts, strict=True)
        ]
        if args.picture is not None:
            page = draw_plan(scenarios[0], tree[0][1] if tree else None)
            Path(args.picture).write_text(page, encoding="utf-8")
        if args.json:
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
    checkpoint: Checkpoint,
    process_count: int,
    args: argparse.Namespace,
    options: SafetensorsOptions,
    tree: Facts,
    named: dict[str, Any],
    output: Printer,
) -> int:
    """Print what saving the tree costs."""
    (mesh,) = args.mesh
    arrays = stored_arrays(checkpoint)
    plan = plan_save(
        args.path,
        _target(arrays, _axes({name: array.shape for name, array in arrays.items()}, mesh, args), mesh),
        family=args.family,
        variant=variant(args),
        config=read_config(checkpoint),
        process_count=process_count,
        options=options,
    )
    time = None
    streams = checkpoint.store.cost.pace(options.threads, options.max_gap_bytes, options.in_flight_bytes).requests
    if args.bandwidth is not None:
        writes = [(cost.written_bytes, cost.num_requests) for cost in plan.processes]
        time = estimate(writes, args.bandwidth, args.latency or 0.0, streams)
    if args.json:
        document: dict[str, Any] = {"path": checkpoint.path, "mesh": mesh} | asdict(plan)
        if time is not None:
            document["estimate"] = _estimate_document(time, args, streams)
        output.json(document | named)
    else:
        saved(mesh, plan, time, tree, output, files=args.files)
    return 0


def _estimate_document(time: TimeEstimate, args: argparse.Namespace, streams: int) -> dict[str, Any]:
    speeds = {"bandwidth": args.bandwidth, "latency": args.latency or 0.0, "streams": streams}
    return speeds | asdict(time)


def _process_counts(args: argparse.Namespace) -> list[int]:
    """Return the number of processes for each mesh."""
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
    arrays = stored_arrays(checkpoint)
    shapes = {name: array.shape for name, array in arrays.items()}
    axes = _axes(shapes, mesh, args)
    restored = distribution(checkpoint, _target(arrays, axes, mesh), count, options)
    plan = restored.plan(compared=True)
    time = None
    if args.bandwidth is not None:
        time = estimate_time(
            plan, bandwidth=args.bandwidth, latency=args.latency or 0.0, streams=restored.pace.requests
        )
    return Scenario(mesh, shapes, axes, restored, plan, time)


def _axes(shapes: Mapping[str, tuple[int, ...]], mesh: dict[str, int], args: argparse.Namespace) -> dict[str, Axes]:
    """Return the mesh axes that shard every array."""
    if args.spec:
        return assign(shapes, args.spec, mesh)
    return {name: spread(shape, mesh) for name, shape in shapes.items()}


def _document(scenario: Scenario, args: argparse.Namespace) -> dict[str, Any]:
    """Return all that `--json` says of one mesh."""
    plan = scenario.plan
    document: dict[str, Any] = {"mesh": scenario.mesh, "replicated_arrays": scenario.replicated}
    document |= {"uneven_arrays": scenario.uneven} | json.loads(plan.to_json())
    instead = scenario.distribution.instead(plan)
    for leaf in document["over_reads"]:
        leaf["instead"] = [
            asdict(other) | {"axes": axes_text(other.axes), "over_read": other.over_read}
            for other in instead[leaf["name"]]
        ]
    if (time := scenario.estimate) is not None:
        document["estimate"] = _estimate_document(time, args, scenario.distribution.pace.requests)
    return document


def _target(
    arrays: Mapping[str, jax.ShapeDtypeStruct], axes: Mapping[str, Axes], mesh: Mapping[str, int]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the tree that is planned for: every stored array, sharded by its axes."""
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
    return printable(
        f"JAX has no arrays with shards of unequal size, so a restore is refused: {', '.join(named)}{more}"
    )
