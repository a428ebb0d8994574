"""`convert`: checkpoints from safetensors to Orbax and back; and what `reshard` has in common with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from orbax_safetensors.cli import cluster, convert_plan, family
from orbax_safetensors.cli.partition import UsageError, mesh_text, parse_mesh, parse_rule
from orbax_safetensors.cli.progress import Reporter
from orbax_safetensors.cli.tables import Cell, Output, Seconds, Size
from orbax_safetensors.cli.units import parse_bandwidth, parse_bytes, parse_count, parse_latency
from orbax_safetensors.convert.plan import plan_convert
from orbax_safetensors.convert.request import MEMORY_BYTES
from orbax_safetensors.convert.run import Conversion, convert
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.link.run import Link
from orbax_safetensors.streaming.casts import Casts

# Options that mean something in one direction only.
_TO_ORBAX = {"mesh": "--mesh", "spec": "--spec", "step": "--step", "no_compression": "--no-compression"}
_TO_SAFETENSORS = {"config": "--config"}

# Broken by hand at 79 columns: argparse leaves these texts as they are.
_DESCRIPTION = """\
Makes an Orbax checkpoint of safetensors files, or safetensors files of an
Orbax checkpoint, in bounded memory whatever the size of the model."""

PARTITIONS_HELP = """\
partitions:
  --mesh has the axes of the mesh of devices that will restore the arrays; no
  device is needed. --spec REGEX=AXES says how the arrays are sharded in whose
  names REGEX is found (as by re.search); the first --spec that matches counts.
  AXES has an entry for each dimension, separated by commas: a mesh axis,
  several joined by +, or - (or nothing) where the dimension is not sharded.
  Dimensions at the end may be left out. Arrays that no --spec matches are not
  sharded. Arrays whose dimensions AXES do not divide, or that have fewer, are
  left whole with a warning. A --spec that fits no array is an error. Names are
  those that orbax-safetensors plan prints for the same SOURCE and --family.
"""

RUN_HELP = """\
plan:
  With --plan nothing is made, and no array is read. What is printed is what
  the same command without --plan, in --processes, would do, cut into the same
  tiles and dealt alike; where it would fail before it begins, so does a plan.

    read       bytes that the process asks SOURCE for, in so many reads, and
               over-read, read for each byte that is needed
    written    bytes that it writes, in so many writes, but for headers,
               indexes and metadata
    batches    tiles go in batches, one read while another is written
    memory     of the two batches and what is made of them at most
    time       with --bandwidth only

  Of a checkpoint of Orbax, reads and writes are of chunks, and bytes are
  those of the chunks decoded: what compression saves is known afterwards.
  What its files have together is among the facts, except on an object store.
  --files has what each process reads and writes of each file of safetensors,
  and the arrays and chunks that are made. The time is that for --bandwidth
  and --latency of reads, and --write-bandwidth and --write-latency of writes,
  as for orbax-safetensors plan; decoding, casts and syncs are not in it.

  With --json, one object:
    path          what would be made
    total_bytes   bytes of all arrays that are written, not compressed
    source_bytes  of all files of SOURCE, null on an object store of Orbax
    from_orbax, to_orbax  whether bytes read, or written, are decoded ones
    processes     a list of {nbytes, needed_bytes, read_bytes, over_read,
                  read_requests, written_bytes, write_requests, num_tiles,
                  staging_bytes, num_batches, reads, writes}; reads has
                  {file, needed_bytes, read_bytes, num_requests} for each
                  file, writes {file, written_bytes, num_requests}
    files         a list of {file, nbytes} that would be made
    arrays        a list of {name, item, dtype, shape, chunk_shape,
                  num_chunks, chunk_bytes} that would be made; name is that
                  for --spec, item null where there are not several
    estimate      with --bandwidth only: {bandwidth, latency, write_bandwidth,
                  write_latency, seconds, slowest, processes}

memory:
  --memory is for bytes on their way; the rest of the process, some hundred
  megabytes, is not in it.

several hosts:
  With --distributed the same command is started once on each host, and each
  moves its part. jax.distributed.initialize() has to find the others by
  itself, as it does on Cloud TPUs and under Slurm, Kubernetes and Open MPI.
  All hosts see SOURCE and DESTINATION under the same paths. Process 0 says
  how far it is, and its figures are of its own part. Where one process fails
  or is stopped, all of them end.

resume:
  Until all is done, nothing has the name of DESTINATION that opens. What a
  killed, failed or interrupted run has left is taken up by the same command
  with --resume, and deleted by one without.

output:
  On a terminal stderr has a bar, elsewhere a line every five seconds. Then
  stdout has what was done, with --json as one object:
    path        what was made: the directory of the step, or of the files
    nbytes      bytes of arrays that this run has written, not compressed
    seconds     how long it took
    peak_bytes  the most memory that the process had
    requests    reads and writes of storage
    processes   how many there were

exit status:
  0  all is done
  1  something is wrong with SOURCE or DESTINATION, or with what is asked of it
  2  something is wrong with the command line
  130  interrupted by Ctrl-C; 143 by SIGTERM
"""

_EPILOG = (
    """\
SOURCE is a .safetensors file, a directory with such files, or a checkpoint of
Orbax: the directory of an item, of a step, or of steps, whose latest is taken.
DESTINATION is for Orbax a directory of steps, of which STEP/items is made, and
for safetensors a directory that is not there yet.

families:
  --family makes a model's own tree of the stored tensors, or the other way
  round: maxtext, or one as maxtext.qwen3. --to orbax takes the architecture
  from the config.json beside the files, --to safetensors from --config.
  --variant sets a switch, as scan_layers=false; to safetensors scan_layers is
  taken from the checkpoint where MaxText has written it there. Without a
  family, names stay as they are.

dtypes:
  --dtype DTYPE casts all arrays of floating point, --dtype REGEX=DTYPE those
  in whose names REGEX is found; the first that matches counts. Names are those
  of tensors, or to Orbax the same as for --spec. Other arrays keep their
  dtype. A REGEX that is used for no array of floating point is an error.
  Without --dtype every bit stays as it is, but for what a family has to
  compute.

"""
    + PARTITIONS_HELP
    + """
examples:
  orbax-safetensors convert qwen3/ maxtext/ --to orbax --family maxtext \\
      --mesh fsdp=16 --spec 'kernel$=fsdp' --spec 'embedding=fsdp'
  orbax-safetensors convert maxtext/ tuned/ --to safetensors --family maxtext \\
      --config qwen3/ --dtype bfloat16

"""
    + RUN_HELP
)

Facts = list[tuple[str, Cell]]
_Done = TypeVar("_Done", Conversion, Link)


def parse_step(text: str) -> int:
    """The number of a step."""
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"expected the number of a step, found {text!r}")
    return int(text)


def parse_cast(text: str) -> tuple[str | None, str]:
    """`bfloat16` or `REGEX=bfloat16`: the regex, None where there is none, and the dtype."""
    regex, equals, dtype = text.rpartition("=")
    try:
        Casts({regex: dtype} if equals else dtype)
    except TensorMismatchError as error:
        raise UsageError(f"expected DTYPE or REGEX=DTYPE as in 'norm=float32', found {text!r}: {error}") from error
    return (regex if equals else None), dtype


def add_parser(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of the command; `add` is that of the whole command line."""
    parser = add(
        "convert",
        help="make an Orbax checkpoint of safetensors files, or back",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("destination", metavar="DESTINATION")
    parser.add_argument("--to", required=True, choices=("orbax", "safetensors"), help="what to make")
    family.add_family(parser)
    parser.add_argument(
        "--config",
        metavar="PATH",
        help="to safetensors: a config.json to write, or a directory with one and a tokenizer's files, all copied",
    )
    parser.add_argument(
        "--dtype",
        type=parse_cast,
        action="append",
        default=[],
        metavar="[REGEX=]DTYPE",
        help="to cast to, as bfloat16 or 'norm=float32'; with REGEX may be repeated",
    )
    parser.add_argument("--step", type=parse_step, metavar="N", help="to Orbax: the number of the step (default: 0)")
    add_common_arguments(parser)
    return parser


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how arrays will be sharded."""
    parser.add_argument(
        "--mesh", type=parse_mesh, metavar="AXIS=SIZE,...", help="that will restore it, as fsdp=16; see below"
    )
    parser.add_argument(
        "--spec",
        type=parse_rule,
        action="append",
        default=[],
        metavar="REGEX=AXES",
        help="how arrays of these names are sharded; see below; may be repeated",
    )


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `convert` and `reshard` share."""
    add_mesh(parser)
    parser.add_argument("--no-compression", action="store_true", help="to Orbax: chunks are stored as they are")
    parser.add_argument(
        "--memory", type=parse_bytes, metavar="BYTES", help="for bytes on their way, as 2GB (default: 2GiB)"
    )
    parser.add_argument("--plan", action="store_true", help="only print what it would cost; see below")
    parser.add_argument(
        "--processes", type=parse_count, metavar="N", help="of a plan: processes that share the work (default: 1)"
    )
    parser.add_argument("--files", action="store_true", help="of a plan: also print it for each file or array")
    parser.add_argument(
        "--bandwidth",
        type=parse_bandwidth,
        metavar="SPEED",
        help="of a plan: estimate the time; what storage gives each process, as 2GB/s or 25Gbit/s",
    )
    parser.add_argument(
        "--latency", type=parse_latency, metavar="TIME", help="from a request to its first byte (default: 0s)"
    )
    parser.add_argument(
        "--write-bandwidth", type=parse_bandwidth, metavar="SPEED", help="of writes (default: that of reads)"
    )
    parser.add_argument(
        "--write-latency", type=parse_latency, metavar="TIME", help="of writes (default: that of reads)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what such a command has left unfinished")
    parser.add_argument(
        "--distributed", action="store_true", help="be one process of several: call jax.distributed.initialize()"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, output: Output) -> int:
    """Converts `args.source` and prints what was done, or what would be."""
    for_one = _TO_SAFETENSORS if args.to == "orbax" else _TO_ORBAX
    for name, flag in for_one.items():
        value = getattr(args, name)
        if value is not None and value is not False and value != []:
            raise UsageError(f"{flag} is not for --to {args.to}")
    asked: dict[str, Any] = {
        "family": args.family,
        "variant": family.variant(args),
        "config": args.config,
        "dtype": _dtype(args.dtype),
        "step": args.step or 0,
        **common(args),
    }
    convert_plan.check(args)
    if args.plan:
        asked.pop("resume")
        plan = plan_convert(args.source, args.destination, to=args.to, process_count=args.processes or 1, **asked)
        return convert_plan.report(args, output, plan)
    cluster.begin(args)
    return report(
        args,
        output,
        lambda progress: convert(args.source, args.destination, to=args.to, progress=progress, **asked),
        conversion_facts,
    )


def common(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the arguments that `convert` and `reshard` share."""
    return {
        "mesh": args.mesh,
        "spec": given_spec(args),
        "compression": not args.no_compression,
        "memory_bytes": MEMORY_BYTES if args.memory is None else args.memory,
        "resume": args.resume,
    }


def conversion_facts(done: Conversion) -> Facts:
    """What is printed of a conversion."""
    return [
        ("path", done.path),
        ("bytes", Size(done.nbytes)),
        ("time", Seconds(done.seconds)),
        ("peak memory", Size(done.peak_bytes)),
        ("requests", done.requests),
    ]


def report(
    args: argparse.Namespace, output: Output, call: Callable[[Reporter], _Done], facts: Callable[[_Done], Facts]
) -> int:
    """Does it, says on stderr how far it is, and prints what was done; process 0 alone says and prints."""
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
    """The rules of `--spec` as the functions take them."""
    spec: dict[str, Any] = {}
    for rule in args.spec:
        if args.mesh is None:
            raise UsageError("--spec names the axes of a --mesh, and there is none")
        for axis in (axis for entry in rule.axes for axis in entry):
            if axis not in args.mesh:
                raise UsageError(f"--spec {rule.text!r}: the mesh has no axis {axis!r}, it is {mesh_text(args.mesh)}")
        if rule.pattern.pattern in spec:
            raise UsageError(f"--spec {rule.text!r}: is there twice")
        spec[rule.pattern.pattern] = tuple(entry[0] if len(entry) == 1 else entry or None for entry in rule.axes)
    return spec or None


def _dtype(casts: list[tuple[str | None, str]]) -> str | Mapping[str, str] | None:
    """What all of `--dtype` say, as `convert` takes it."""
    if len(casts) == 1 and casts[0][0] is None:
        return casts[0][1]
    by_pattern: dict[str, str] = {}
    for regex, dtype in casts:
        if regex is None or regex in by_pattern:
            raise UsageError("--dtype is either one DTYPE, or REGEX=DTYPE for each REGEX")
        by_pattern[regex] = dtype
    return by_pattern or None
