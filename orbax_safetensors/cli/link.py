"""`link`: safetensors files as a checkpoint of Orbax, where they are."""

from __future__ import annotations

import argparse
import json
from operator import attrgetter
from typing import Any

from orbax_safetensors import LinkPlan, link, plan_link
from orbax_safetensors.cli.arguments import refuse, variant
from orbax_safetensors.cli.family_facts import family_facts
from orbax_safetensors.cli.long_run import begin, report
from orbax_safetensors.cli.partition import given_spec
from orbax_safetensors.cli.plan_tables import orbax_over_reads, orbax_processes
from orbax_safetensors.cli.tables import Facts, Printer, Seconds, Size


def run(args: argparse.Namespace, output: Printer) -> int:
    """Link `args.source` and print what was written, or what would be."""
    arguments: dict[str, Any] = {
        "family": args.family,
        "variant": variant(args),
        "mesh": args.mesh,
        "spec": given_spec(args.spec, args.mesh),
    }
    if args.memory is not None:
        arguments["memory_bytes"] = args.memory
    if args.plan:
        refuse(args, ("resume", "hard_links", "distributed"), "is not for --plan")
        plan = plan_link(args.source, args.destination, process_count=args.processes or 1, **arguments)
        return _print_plan(plan, args, output)
    refuse(args, ("processes",), "is for --plan")
    begin(args)
    return report(
        args,
        output,
        lambda progress: link(
            args.source,
            args.destination,
            hard_links=args.hard_links,
            resume=args.resume,
            progress=progress,
            **arguments,
        ),
        lambda done: [
            ("path", done.path),
            ("arrays", done.num_arrays),
            ("chunks", done.num_chunks),
            ("linked", Size(done.linked_bytes)),
            ("computed", Size(done.made_bytes)),
            *family_facts(done.family, done.variant),
            ("time", Seconds(done.seconds)),
            ("peak memory", Size(done.peak_bytes)),
        ],
    )


def _print_plan(plan: LinkPlan, args: argparse.Namespace, output: Printer) -> int:
    if args.json:
        output.json(json.loads(plan.to_json()))
        return 0
    facts: Facts = [
        ("path", plan.path),
        ("arrays", len(plan.arrays)),
        ("chunks", plan.num_chunks),
        ("linked", Size(plan.linked_bytes)),
        ("computed", Size(plan.made_bytes)),
        ("index", Size(plan.metadata_bytes)),
    ]
    output.facts(facts)
    if plan.restore is not None:
        orbax_processes(plan.restore, "read", None, output)
    if plan.made_bytes:
        _print_computed(plan, output)
    if plan.restore is not None and plan.restore.over_reads:
        orbax_over_reads(plan.restore, output)
        output.line("")
        output.line(
            "Orbax reads whole chunks, and shards need parts of these. SafetensorsHandler reads only the parts, and "
            "reshard stores the arrays in chunks that fit the shards."
        )
    output.line("")
    output.line("nothing was written")
    return 0


def _print_computed(plan: LinkPlan, output: Printer) -> None:
    """Print the arrays to compute: on a terminal arrays whose names differ in numbers alone are one line."""
    rows = output.joined((array for array in plan.arrays if array.made is not None), attrgetter("made"))
    output.table(
        ("arrays to compute", "bytes", "because"),
        ((text, Size(sum(array.nbytes for array in arrays)), arrays[0].made or "") for text, arrays in rows),
    )
