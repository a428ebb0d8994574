"""`plan`: what a restore on a mesh will cost every process. The mesh is abstract: no device is needed, none started."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh

from orbax_safetensors import Checkpoint, SafetensorsOptions, TimeEstimate, plan_save
from orbax_safetensors.checkpoint.config import CONFIG_NAME, read_config
from orbax_safetensors.checkpoint.family import mapped
from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.checkpoint.from_config import config_directory, read_for_plan
from orbax_safetensors.checkpoint.open import stored_arrays
from orbax_safetensors.cli.arguments import UsageError, refuse, variant
from orbax_safetensors.cli.family_facts import family_facts, full_name
from orbax_safetensors.cli.page import Page
from orbax_safetensors.cli.partition import axes_text, given_spec, mesh_text, spread
from orbax_safetensors.cli.picture import amounts, picture, stretches
from orbax_safetensors.cli.plan_tables import Scenario, comparison, details, orbax_over_reads, orbax_restore, saved
from orbax_safetensors.cli.tables import Facts, Printer
from orbax_safetensors.devices.partition import Partition, partition
from orbax_safetensors.orbax_store import OrbaxCheckpoint, open_orbax
from orbax_safetensors.orbax_store.directories import requests_at_once
from orbax_safetensors.orbax_store.leaf import ARRAYS
from orbax_safetensors.orbax_store.restore_plan import plan_orbax_restore
from orbax_safetensors.restore.match import match
from orbax_safetensors.restore.plan import PlannedRestore
from orbax_safetensors.restore.request import ShardingOf
from orbax_safetensors.restore.sharding_choice import choose_shardings
from orbax_safetensors.storage.paths import absolute_path, shown
from orbax_safetensors.storage.process_memory import no_collection
from orbax_safetensors.transfer.estimate import estimate


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print the plan for restoring all of `args.path` on each of `args.mesh`."""
    counts = _process_counts(args)
    if args.bandwidth is None:
        refuse(args, ("latency",), "is for an estimate of the time, which also needs --bandwidth")
    from_config = config_directory(args.path) is not None
    if not from_config and is_orbax(absolute_path(args.path)):
        return _run_orbax(args, counts[0], output)
    if len(args.mesh) > 1:
        refuse(args, ("files", "picture", "save"), "is for one --mesh")
    if args.save:
        refuse(args, ("picture",), "is of a restore, and --save asks for a save")
    page = None if args.picture is None else Page(args.picture, f"What each process reads of {shown(args.path)}")
    switches = variant(args)
    options = SafetensorsOptions() if args.streams is None else SafetensorsOptions(threads=args.streams)
    with no_collection():
        stored = read_for_plan(args.path, args.family, switches, None)
        checkpoint = mapped(stored, args.family, switches, complete=True, dequantize=True)
        family = None if args.family is None else full_name(checkpoint, args.family)
        tree = family_facts(family, switches)
        named = {} if family is None else {"family": family, "variant": switches, "from_config": from_config}
        if from_config:
            tree.append(("source", f"{CONFIG_NAME} alone"))
        if args.save:
            return _run_save(checkpoint, counts[0], args, options, tree, named, output)
        scenarios = [
            _scenario(checkpoint, mesh, count, args, options) for mesh, count in zip(args.mesh, counts, strict=True)
        ]
        if page is not None:
            _draw(scenarios[0], tree, page)
        if args.json:
            plans = [_document(scenario, args) for scenario in scenarios]
            output.json({"path": checkpoint.path} | (plans[0] if len(plans) == 1 else {"meshes": plans}) | named)
            return 0
        if len(scenarios) == 1:
            details(scenarios[0], tree, output, files=args.files)
        else:
            comparison(scenarios, tree, output)
    if page is not None:
        output.line("")
        output.line(f"Which bytes each process reads: {page.path}")
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
    plan = plan_save(
        checkpoint.path,
        _target(checkpoint, mesh, args, options),
        family=args.family,
        variant=variant(args),
        config=read_config(checkpoint),
        process_count=process_count,
        all_processes=args.all_processes,
        options=options,
    )
    writes = {cost.process: (cost.written_bytes, cost.num_requests) for cost in plan.processes}
    streams = checkpoint.request_limits(options).requests
    time = _estimate(writes, args, streams)
    if args.json:
        document = {"path": checkpoint.path, "mesh": mesh} | asdict(plan)
        output.json(document | _estimate_document(time, args, streams) | named)
    else:
        saved(mesh, plan, time, tree, output, files=args.files)
    return 0


def _run_orbax(args: argparse.Namespace, process_count: int, output: Printer) -> int:
    """Print the plan for restoring all arrays of a checkpoint of Orbax."""
    checkpoint = open_orbax(args.path)
    options = ("family", "variant", "save", "files", "picture")
    refuse(args, options, "is for safetensors, and PATH is a checkpoint of Orbax")
    if len(args.mesh) > 1:
        raise UsageError("a checkpoint of Orbax is planned for one --mesh")
    (mesh,) = args.mesh
    plan = plan_orbax_restore(checkpoint, _partition(checkpoint, mesh, args), process_count)
    reads = {process: (cost.read_bytes, cost.num_chunks) for process, cost in enumerate(plan.processes)}
    streams = args.streams or requests_at_once(checkpoint.path)
    time = _estimate(reads, args, streams)
    specs = [f"--spec {shlex.quote(rule.text)}" for rule in args.spec]
    command = ["orbax-safetensors reshard", shlex.quote(args.path), "DESTINATION --mesh", mesh_text(mesh), *specs]
    reshard = " ".join(command) if specs and plan.over_reads else None  # which needs the partition of the model
    if args.json:
        document = {"path": checkpoint.path, "mesh": mesh} | json.loads(plan.to_json())
        document["reshard"] = reshard
        output.json(document | _estimate_document(time, args, streams))
        return 0
    orbax_restore(checkpoint.path, mesh, plan, time, output)
    if plan.over_reads:
        orbax_over_reads(plan, output)
        output.line("")
        if reshard is None:
            output.line("Plan with the --spec of your model: reshard can then store each shard as a chunk.")
        else:
            output.line("Stored anew in such chunks, each process reads what it needs:")
            output.line(reshard)
    return 0


def _partition(checkpoint: OrbaxCheckpoint, mesh: dict[str, int], args: argparse.Namespace) -> Partition:
    """Return the partition of the `--spec`; without any, each axis in turn shards a dimension that it divides."""
    if args.spec:
        return partition(mesh, given_spec(args.spec, mesh))
    arrays = {name: leaf.shape for name, leaf in checkpoint.leaves.items() if leaf.kind in ARRAYS}
    return Partition(mesh, names={name: spread(shape, mesh) for name, shape in arrays.items()})


def _estimate(traffic: Mapping[int, tuple[int, int]], args: argparse.Namespace, streams: int) -> TimeEstimate | None:
    """Return how long the bytes and requests of each process take, None if nothing is known of the storage."""
    return None if args.bandwidth is None else estimate(traffic, args.bandwidth, args.latency or 0.0, streams)


def _estimate_document(time: TimeEstimate | None, args: argparse.Namespace, streams: int) -> dict[str, Any]:
    """Return what `--json` says of an estimate: nothing without one."""
    if time is None:
        return {}
    speeds = {"bandwidth": args.bandwidth, "latency": args.latency or 0.0, "streams": streams}
    return {"estimate": speeds | asdict(time)}


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
    target = _target(checkpoint, mesh, args, options)
    replicated = sum(leaf.sharding.is_fully_replicated for leaf in target.values())
    targets = match(checkpoint, target, None, partial=True).targets
    restored = PlannedRestore(checkpoint, targets, count, options, args.all_processes)
    plan = restored.plan()
    reads = {cost.process: (cost.read_bytes, cost.num_requests) for cost in plan.processes}
    return Scenario(mesh, replicated, restored, plan, _estimate(reads, args, restored.limits.requests))


def _draw(scenario: Scenario, tree: Facts, page: Page) -> None:
    """Write the picture of one mesh: which bytes processes read, in HTML above what the command prints."""
    restore = scenario.restore
    drawn = stretches(restore.checkpoint)
    reads = {process: amounts(restore.transfer(process), drawn) for process in restore.looked_at}
    page.drawing(picture(drawn, reads, restore.process_count))
    if not page.is_svg:  # which has the drawing alone
        details(scenario, tree, page, files=False)
    page.write()


def _target(
    checkpoint: Checkpoint, mesh: dict[str, int], args: argparse.Namespace, options: SafetensorsOptions
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the tree that is planned for: every stored array, sharded by `--spec`, or without any as reads least."""
    arrays = stored_arrays(checkpoint)
    if args.spec:
        given = partition(mesh, given_spec(args.spec, mesh))
        given.check((name, array.shape) for name, array in arrays.items())
        sharding_of: ShardingOf = given.sharding
    else:
        sharding_of = choose_shardings(checkpoint, AbstractMesh(tuple(mesh.values()), tuple(mesh)), options)
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding_of(name, array.shape))
        for name, array in arrays.items()
    }


def _document(scenario: Scenario, args: argparse.Namespace) -> dict[str, Any]:
    """Return all that `--json` says of one mesh."""
    plan = scenario.plan
    document: dict[str, Any] = {"mesh": scenario.mesh, "replicated_arrays": scenario.replicated}
    document |= json.loads(plan.to_json())
    shardings = scenario.restore.cheaper_shardings(plan)
    for leaf in document["over_reads"]:
        leaf["instead"] = [
            asdict(sharding) | {"axes": axes_text(sharding.axes), "over_read": sharding.over_read}
            for sharding in shardings[leaf["name"]]
        ]
    return document | _estimate_document(scenario.estimate, args, scenario.restore.limits.requests)
