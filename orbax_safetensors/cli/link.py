"""`link`: safetensors files as a checkpoint of Orbax, where they are."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from orbax_safetensors import LinkPlan, link, plan_link
from orbax_safetensors.cli.arguments import add_family, family_facts, parse_bytes, parse_count, refuse, variant
from orbax_safetensors.cli.long_run import add_run_arguments, begin, report
from orbax_safetensors.cli.parser import Parser
from orbax_safetensors.cli.partition import add_mesh, given_spec
from orbax_safetensors.cli.plan_tables import orbax_over_reads, orbax_processes
from orbax_safetensors.cli.tables import Facts, Printer, Seconds, Size
from orbax_safetensors.streaming.cutting import MEMORY_BYTES

# argparse leaves these texts as they are.
_DESCRIPTION = """\
Makes .safetensors files a checkpoint of Orbax by writing an index of them.
Orbax restores the arrays from the files as they are, without this package.
Arrays that are scaled, cast or decoded are computed, and written beside the
index."""

_EPILOG = """\
Without DESTINATION, writes the index beside the files. A DESTINATION that is
an item of a step, as ROOT/0/state, also gets the step's record. The files
must not change afterwards. orbax-safetensors plan --help explains --spec.

examples:
  orbax-safetensors link qwen3/ qwen3-maxtext/ --family maxtext
  orbax-safetensors link qwen3/ --plan --mesh fsdp=16 --spec 'mlp=fsdp'
"""


def add_parser(add: Callable[..., Parser]) -> Parser:
    """Return the parser of the command, which `add` has made."""
    parser = add(
        "link",
        help="make .safetensors files a checkpoint of Orbax",
        usage="%(prog)s SOURCE [DESTINATION] [OPTION]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("destination", metavar="DESTINATION", nargs="?")
    add_family(parser)
    add_mesh(parser)
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        default=MEMORY_BYTES,
        metavar="BYTES",
        help="memory for computed arrays, as 2GB (default: 2GiB)",
    )
    parser.add_argument("--hard-links", action="store_true", help="make hard links rather than symbolic ones")
    parser.add_argument("--plan", action="store_true", help="dry run: only print what would be written")
    parser.add_argument(
        "--processes", type=parse_count, metavar="N", help="with --plan: processes of the restore (default: 1)"
    )
    add_run_arguments(parser)
    return parser


def run(args: argparse.Namespace, output: Printer) -> int:
    """Link `args.source` and print what was written, or what would be."""
    arguments: dict[str, Any] = {
        "family": args.family,
        "variant": variant(args),
        "mesh": args.mesh,
        "spec": given_spec(args.spec, args.mesh),
        "memory_bytes": args.memory,
    }
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
    return 0


def _print_computed(plan: LinkPlan, output: Printer) -> None:
    """Print the arrays to compute: on a terminal arrays whose names differ in numbers alone are one line."""
    rows = output.joined((array for array in plan.arrays if array.made is not None), attrgetter("made"))
    output.table(
        ("arrays to compute", "bytes", "because"),
        ((text, Size(sum(array.nbytes for array in arrays)), arrays[0].made or "") for text, arrays in rows),
    )
