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

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.checkpoint.open import open_checkpoint, stored_arrays
from orbax_safetensors.cli import plan_orbax
from orbax_safetensors.cli.family import FAMILY_HELP, add_family, full_name, switches_text, variant
from orbax_safetensors.cli.partition import (
    Axes,
    UsageError,
    assign,
    axes_text,
    mesh_text,
    parse_mesh,
    parse_rule,
    spread,
)
from orbax_safetensors.cli.plan_picture import draw_plan
from orbax_safetensors.cli.plan_tables import Facts, Scenario, comparison, details, saved
from orbax_safetensors.cli.tables import Output, clean
from orbax_safetensors.cli.units import parse_bandwidth, parse_count, parse_latency
from orbax_safetensors.cost.estimate import TimeEstimate, estimate, estimate_time
from orbax_safetensors.errors import StorageError
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.plan import distribution
from orbax_safetensors.save.plan import plan_save
from orbax_safetensors.storage.memory import no_collection
from orbax_safetensors.storage.paths import place

# Arrays that a warning lists before it says how many more there are.
_LISTED = 3

# Broken by hand at 79 columns: argparse leaves these texts as they are.
_DESCRIPTION = """\
Prints what restoring all of PATH on a mesh of devices costs every process:
bytes, requests, memory. With --family all leaves of a model's own tree are
restored, else the stored tensors. Reads headers only, and needs no devices.
PATH may be a checkpoint of Orbax, too: an item, a step, or steps."""

_EPILOG = (
    FAMILY_HELP
    + """
partitions:
  --spec REGEX=AXES gives a partition to the arrays in whose names REGEX is
  found (as by re.search); the first --spec that matches counts. Names are
  those of the stored tensors, with --family the paths of the leaves. AXES has
  an entry for each dimension, separated by commas: a mesh axis, several joined
  by +, or - (or nothing) where the dimension is not sharded. Dimensions at the
  end may be left out. Arrays that no --spec matches are replicated, and so,
  with a warning, are those of fewer dimensions than AXES. A --spec that is
  used for no array is an error.

  Without any --spec, every mesh axis in turn shards the first dimension whose
  shards so far it divides, or none. So all shards are even. With --family that
  is often the last dimension of the stored tensors, where it costs over-read.

examples:
  orbax-safetensors plan model/ --mesh data=2,model=4 --processes 2 \\
      --spec 'embed_tokens=data+model,-' --spec 'proj\\.weight$=model,data'
  orbax-safetensors plan model/ --mesh fsdp=8,tensor=4 --processes 4 \\
      --family maxtext --variant scan_layers=false \\
      --spec 'embedding=tensor,fsdp' --spec 'kernel$=fsdp,tensor'

columns:
  needed       bytes of the files that the process's shards hold, each once
  read         bytes that it asks storage for
  over-read    read / needed
  requests     storage operations
  staging      memory that it copies through
  destination  memory of its distinct shards
  time         with --bandwidth only: see below

  With several processes, a table has what each would read, and its devices
  receive, with SafetensorsOptions(cooperative=True), where that is less.

  A last table has the leaves for which all processes together read more than
  1.1 times the bytes that they need, because their shards are short runs in
  the files, those first that waste most. On a terminal it has ten rows, and
  leaves that differ in their numbers alone are one: layers_{0..35}.

  instead  AXES, as for --spec, with which the same mesh axes cut the leaf and
           least is read, all on one dimension if that will do; - where none
           that divides reads less
  then     read / needed of the leaf with them, planned like all the rest

several meshes:
  With --mesh more than once there is a row for each instead. Where processes
  differ, read, requests, memory and time are those of the process that has
  most, which need not be the same one. memory is staging and destination;
  over-read is that of all processes together.

checkpoints of Orbax:
  A process reads every chunk whole that a shard of its own touches, and again
  for each further shard. So read is of the chunks decoded: what compression
  saves is not known before, and the time takes them to be moved as they are.
  The last table has the leaves whose chunks make processes read more than 1.1
  times what they need, with the chunks that they have, and instead those with
  which nothing else is read. The command below it stores them so. It takes one
  --mesh, and no --family, --save, --files or --picture. Arrays that AXES do
  not divide are replicated, with a warning.

saving:
  With --save what is planned is a save of that tree, sharded like that, into
  new files with at most 5 GB of tensors each. written is what a process
  writes; where several hold the same shard, one of them does.
  Headers and the index, which the first process adds at the end, are not
  counted. --files has what each process writes into each file. Where PATH is
  on an object store, so is the save: processes write files of their own, and
  requests are the parts in which these go.

time:
  A process has --streams requests in flight. Each waits for --latency, then
  its bytes come at --bandwidth, which all requests of the process share. So
  it is done after latency + bytes / bandwidth, or, where the latency is what
  takes long, after the rounds in which its requests go, each a latency and
  the bytes of one request per stream: with one stream the sum of both. The
  slowest process counts. Reading headers, decoding and copies to accelerators
  are not in it; of a bandwidth that processes share, give the part of one.

with --json, one object:
  path               as given
  mesh               {axis: size}
  total_params       elements of all arrays
  total_bytes        bytes of all arrays in memory
  num_arrays         how many there are
  replicated_arrays  how many of them no axis cuts
  uneven_arrays      names of those that an axis does not divide: JAX has no
                     such arrays, and a restore is refused
  largest_shard      {params, nbytes} of the device that holds most
  smallest_shard     {params, nbytes} of the device that holds least
  processes          a list of {needed_bytes, read_bytes, over_read,
                     num_requests, staging_bytes, destination_bytes, files};
                     files is a list of {file, needed_bytes, read_bytes,
                     num_requests}
  cooperation        null with one process; else {num_arrays, direct,
                     cooperative}: leaves that devices could exchange, and two
                     lists of {read_bytes, num_requests, received_bytes}
  over_reads         a list of {name, needed_bytes, read_bytes, over_read,
                     instead}: all of the last table; instead is a list of
                     {axes, needed_bytes, read_bytes, over_read}, all that
                     was tried, the best first
  estimate           with --bandwidth only: {bandwidth, latency, streams,
                     seconds, slowest, processes}, in bytes and seconds;
                     processes has the seconds of each, slowest is the number
                     of the one whose they are
  family             with --family only: its whole name
  variant            the switches that were given, {name: value}

  With several meshes path, family and variant are joined by meshes, a list of
  objects with all the rest.

  Of a checkpoint of Orbax: path, mesh, total_bytes, total_chunks, num_arrays,
  file_bytes, null on an object store, processes, a list of {needed_bytes,
  read_bytes, over_read, num_chunks}, over_reads, a list of {name, shape,
  chunk_shape, shard_shape, needed_bytes, read_bytes, over_read, num_chunks},
  estimate, and reshard, the command that ends these, or null.

  With --save: path, mesh, estimate, family and variant, files, a list of
  {file, nbytes}, and processes, a list of {written_bytes, num_requests,
  files}, where files is a list of {file, written_bytes, num_requests}.
"""
)


def add_parser(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of the command; `add` is that of the whole command line."""
    parser = add("plan", help="what a restore on a mesh will cost", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("path", metavar="PATH")
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        action="append",
        required=True,
        metavar="AXIS=SIZE,...",
        help="as in data=2,model=4; repeat it to compare several",
    )
    parser.add_argument(
        "--processes",
        type=parse_count,
        action="append",
        metavar="N",
        help="processes that the devices are dealt to, evenly and in mesh order (default: 1); once, or for each --mesh",
    )
    parser.add_argument(
        "--spec",
        type=parse_rule,
        action="append",
        default=[],
        metavar="REGEX=AXES",
        help="how arrays of these names are sharded; see below; may be repeated",
    )
    add_family(parser)
    parser.add_argument("--files", action="store_true", help="also print what each process reads of each file")
    parser.add_argument(
        "--picture", metavar="FILE", help="also draw which process reads which bytes of each file, as an HTML page"
    )
    parser.add_argument("--save", action="store_true", help="plan a save of that tree instead; see below")
    parser.add_argument(
        "--bandwidth",
        type=parse_bandwidth,
        metavar="SPEED",
        help="estimate the time: what storage gives each process, as 2GB/s or 25Gbit/s",
    )
    parser.add_argument(
        "--latency", type=parse_latency, metavar="TIME", help="from a request to its first byte, as 10ms (default: 0s)"
    )
    parser.add_argument(
        "--streams",
        type=parse_count,
        metavar="N",
        help="requests that a process has in flight at once (default: as many as a restore on this machine)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


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
    output: Output,
) -> int:
    """Prints what saving the tree costs."""
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
    asked = {"bandwidth": args.bandwidth, "latency": args.latency or 0.0, "streams": streams}
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
    arrays = stored_arrays(checkpoint)
    shapes = {name: array.shape for name, array in arrays.items()}
    axes = _axes(shapes, mesh, args)
    found = distribution(checkpoint, _target(arrays, axes, mesh), count, options)
    plan = found.plan(compared=True)
    time = None
    if args.bandwidth is not None:
        time = estimate_time(plan, bandwidth=args.bandwidth, latency=args.latency or 0.0, streams=found.pace.requests)
    return Scenario(mesh, shapes, axes, found, plan, time)


def _axes(shapes: Mapping[str, tuple[int, ...]], mesh: dict[str, int], args: argparse.Namespace) -> dict[str, Axes]:
    """The mesh axes that shard every array."""
    if args.spec:
        return assign(shapes, args.spec, mesh)
    return {name: spread(shape, mesh) for name, shape in shapes.items()}


def _document(scenario: Scenario, args: argparse.Namespace) -> dict[str, Any]:
    """All that `--json` says of one mesh."""
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
