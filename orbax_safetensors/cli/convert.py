"""`convert`: checkpoints from safetensors to Orbax and back; and what `reshard` has in common with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from orbax_safetensors import Conversion, Link, TensorMismatchError, convert, plan_convert
from orbax_safetensors.cli import cluster, convert_plan, family
from orbax_safetensors.cli.partition import UsageError, add_spec, mesh_text, parse_mesh
from orbax_safetensors.cli.progress import Reporter
from orbax_safetensors.cli.tables import Cell, Printer, Seconds, Size
from orbax_safetensors.cli.units import parse_bandwidth, parse_bytes, parse_count, parse_latency
from orbax_safetensors.streaming.casts import Casts
from orbax_safetensors.streaming.pipeline import MEMORY_BYTES

# Options that mean something in one direction only.
_TO_ORBAX = {"mesh": "--mesh", "spec": "--spec", "step": "--step", "no_compression": "--no-compression"}
_TO_SAFETENSORS = {"config": "--config"}

# argparse leaves these texts as they are.
_DESCRIPTION = """\
Makes an Orbax checkpoint of safetensors files, or safetensors files of an
Orbax checkpoint (an item, a step, or steps, of which the latest is taken), in
bounded memory for models of any size."""

_EPILOG = """\
To Orbax, makes DESTINATION/STEP/items. orbax-safetensors plan --help explains
--spec. See docs/converting.md.

examples:
  orbax-safetensors convert qwen3/ maxtext/ --to orbax --family maxtext
  orbax-safetensors convert maxtext/ tuned/ --to safetensors --family maxtext \\
      --config qwen3/ --dtype bfloat16
"""

Facts = list[tuple[str, Cell]]
_Done = TypeVar("_Done", Conversion, Link)


def parse_step(text: str) -> int:
    """Parse the number of a step."""
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"expected the number of a step, found {text!r}")
    return int(text)


def parse_cast(text: str) -> tuple[str | None, str]:
    """Parse `bfloat16` or `REGEX=bfloat16`: return the regex, None if there is none, and the dtype."""
    regex, equals, dtype = text.rpartition("=")
    try:
        Casts({regex: dtype} if equals else dtype)
    except TensorMismatchError as error:
        raise UsageError(f"expected DTYPE or REGEX=DTYPE as in 'norm=float32', found {text!r}: {error}") from error
    return (regex if equals else None), dtype


def add_parser(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return the parser of the command, which `add` has made."""
    parser = add(
        "convert",
        help="make an Orbax checkpoint of safetensors files, or back",
        usage="%(prog)s SOURCE DESTINATION --to FORMAT [OPTION]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("destination", metavar="DESTINATION")
    parser.add_argument(
        "--to",
        required=True,
        choices=("orbax", "safetensors"),
        metavar="FORMAT",
        help="what to make: orbax or safetensors",
    )
    family.add_family(parser)
    parser.add_argument(
        "--config",
        metavar="PATH",
        help="to safetensors: a config.json, or a directory with one and a tokenizer",
    )
    parser.add_argument(
        "--dtype",
        type=parse_cast,
        action="append",
        default=[],
        metavar="[REGEX=]DTYPE",
        help="cast to it, as bfloat16 or 'norm=float32'; repeatable",
    )
    parser.add_argument("--step", type=parse_step, metavar="N", help="to Orbax: the number of the step (default: 0)")
    add_common_arguments(parser)
    return parser


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how arrays will be sharded."""
    parser.add_argument(
        "--mesh", type=parse_mesh, metavar="AXIS=SIZE,...", help="mesh of the devices that will restore it, as fsdp=16"
    )
    add_spec(parser)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `convert` and `reshard` share."""
    add_mesh(parser)
    parser.add_argument("--no-compression", action="store_true", help="to Orbax: store chunks as they are")
    parser.add_argument(
        "--memory", type=parse_bytes, metavar="BYTES", help="memory for bytes on their way, as 2GB (default: 2GiB)"
    )
    parser.add_argument("--plan", action="store_true", help="only print what it would cost")
    parser.add_argument(
        "--processes", type=parse_count, metavar="N", help="with --plan: processes that share the work (default: 1)"
    )
    parser.add_argument("--files", action="store_true", help="with --plan: also print each file or array")
    parser.add_argument(
        "--bandwidth",
        type=parse_bandwidth,
        metavar="SPEED",
        help="with --plan: of storage for each process, as 2GB/s",
    )
    parser.add_argument(
        "--latency", type=parse_latency, metavar="TIME", help="time to the first byte of a request (default: 0s)"
    )
    parser.add_argument(
        "--write-bandwidth", type=parse_bandwidth, metavar="SPEED", help="of writes (default: as of reads)"
    )
    parser.add_argument("--write-latency", type=parse_latency, metavar="TIME", help="of writes (default: as of reads)")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run of this command")
    parser.add_argument(
        "--distributed", action="store_true", help="run as one of several processes, by jax.distributed"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, output: Printer) -> int:
    """Convert `args.source` and print what was done, or what would be."""
    for_one = _TO_SAFETENSORS if args.to == "orbax" else _TO_ORBAX
    for name, flag in for_one.items():
        value = getattr(args, name)
        if value is not None and value is not False and value != []:
            raise UsageError(f"{flag} is not for --to {args.to}")
    arguments: dict[str, Any] = {
        "family": args.family,
        "variant": family.variant(args),
        "config": args.config,
        "dtype": _dtype(args.dtype),
        "step": args.step or 0,
        **common(args),
    }
    convert_plan.check(args)
    if args.plan:
        arguments.pop("resume")
        plan = plan_convert(args.source, args.destination, to=args.to, process_count=args.processes or 1, **arguments)
        return convert_plan.report(args, output, plan)
    cluster.begin(args)
    return report(
        args,
        output,
        lambda progress: convert(args.source, args.destination, to=args.to, progress=progress, **arguments),
        conversion_facts,
    )


def common(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the command line says of the arguments that `convert` and `reshard` share."""
    return {
        "mesh": args.mesh,
        "spec": given_spec(args),
        "compression": not args.no_compression,
        "memory_bytes": MEMORY_BYTES if args.memory is None else args.memory,
        "resume": args.resume,
    }


def conversion_facts(done: Conversion) -> Facts:
    """Return what is printed of a conversion."""
    return [
        ("path", done.path),
        ("bytes", Size(done.nbytes)),
        *family.facts(done.family, done.variant),
        ("time", Seconds(done.seconds)),
        ("peak memory", Size(done.peak_bytes)),
        ("requests", done.requests),
    ]


def report(
    args: argparse.Namespace, output: Printer, call: Callable[[Reporter], _Done], facts: Callable[[_Done], Facts]
) -> int:
    """Run `call`, say on stderr how far it is, and print what was done; process 0 alone says and prints."""
    first, processes = jax.process_index() == 0, jax.process_count()
    label = args.command if processes == 1 else f"{args.command}, process 0 of {processes}"
    reporter = Reporter(label, sys.stderr if first else None)
    stops = cluster.Stops()
    try:
        with stops, reporter:
            done: _Done = call(reporter)
    except Exception:
        if stops.signal is None:
            raise
        if first and reporter.begun:
            print("interrupted: the same command with --resume goes on from here", file=sys.stderr)
        return 128 + stops.signal  # what a shell says of a program that a signal has ended
    if not first:
        return 0
    if args.json:
        output.json(done.to_json() | {"processes": processes})
        return 0
    shared: Facts = [("processes", processes)] if processes > 1 else []
    output.facts([*facts(done), *shared])
    return 0


def given_spec(args: argparse.Namespace) -> Mapping[str, Any] | None:
    """Return the rules of `--spec` as the functions take them."""
    spec: dict[str, Any] = {}
    for rule in args.spec:
        if args.mesh is None:
            raise UsageError("--spec names the axes of a --mesh; also pass --mesh")
        for axis in (axis for entry in rule.axes for axis in entry):
            if axis not in args.mesh:
                raise UsageError(f"--spec {rule.text!r}: the mesh has no axis {axis!r}, it is {mesh_text(args.mesh)}")
        if rule.pattern.pattern in spec:
            raise UsageError(f"--spec {rule.text!r}: is passed twice")
        spec[rule.pattern.pattern] = tuple(entry[0] if len(entry) == 1 else entry or None for entry in rule.axes)
    return spec or None


def _dtype(casts: list[tuple[str | None, str]]) -> str | Mapping[str, str] | None:
    """Return what all of `--dtype` say, as `convert` takes it."""
    if len(casts) == 1 and casts[0][0] is None:
        return casts[0][1]
    by_pattern: dict[str, str] = {}
    for regex, dtype in casts:
        if regex is None or regex in by_pattern:
            raise UsageError("--dtype is either one DTYPE, or REGEX=DTYPE for each REGEX")
        by_pattern[regex] = dtype
    return by_pattern or None
