"""`convert`: checkpoints from safetensors to Orbax and back; and what `reshard` has in common with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from orbax_safetensors import Conversion, TensorMismatchError, convert
from orbax_safetensors.cli.arguments import (
    UsageError,
    add_family,
    family_facts,
    parse_bytes,
    refuse,
    variant,
)
from orbax_safetensors.cli.long_run import add_run_arguments, begin, report
from orbax_safetensors.cli.parser import Parser
from orbax_safetensors.cli.partition import add_mesh, given_spec
from orbax_safetensors.cli.tables import Printer, Seconds, Size
from orbax_safetensors.convert.convert_request import FORMATS
from orbax_safetensors.devices.casts import Casts
from orbax_safetensors.streaming.cutting import MEMORY_BYTES

# argparse leaves these texts as they are.
_DESCRIPTION = """\
Makes an Orbax checkpoint of safetensors files, or safetensors files of an
Orbax checkpoint (an item, a step, or the latest of steps), in bounded memory."""

_EPILOG = """\
To Orbax, makes DESTINATION/STEP/items. orbax-safetensors plan --help explains
--spec.

examples:
  orbax-safetensors convert qwen3/ maxtext/ --to orbax --family maxtext
  orbax-safetensors convert maxtext/ tuned/ --to safetensors --family maxtext \\
      --config qwen3/ --dtype bfloat16
"""


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


def add_parser(add: Callable[..., Parser]) -> Parser:
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
        choices=tuple(FORMATS),
        metavar="FORMAT",
        help=f"what to make: {' or '.join(FORMATS)}",
    )
    add_family(parser)
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
    add_common_arguments(parser)
    return parser


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `convert` and `reshard` share."""
    add_mesh(parser)
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        default=MEMORY_BYTES,
        metavar="BYTES",
        help="memory for bytes on their way, as 2GB (default: 2GiB)",
    )
    add_run_arguments(parser)


def run(args: argparse.Namespace, output: Printer) -> int:
    """Convert `args.source` and print what was done."""
    for other in FORMATS.keys() - {args.to}:
        refuse(args, [option for option in FORMATS[other] if option in args], f"is not for --to {args.to}")
    arguments: dict[str, Any] = {
        "to": args.to,
        "family": args.family,
        "variant": variant(args),
        "config": args.config,
        "dtype": _dtype(args.dtype),
        "step": args.step or 0,
        **common(args),
    }
    begin(args)
    return report_conversion(args, output, convert, arguments)


def common(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the options that `convert` and `reshard` share say of their arguments."""
    return {
        "mesh": args.mesh,
        "spec": given_spec(args.spec, args.mesh),
        "memory_bytes": args.memory,
    }


def report_conversion(
    args: argparse.Namespace, output: Printer, convert: Callable[..., Conversion], arguments: Mapping[str, Any]
) -> int:
    """Convert and print what was done."""
    return report(
        args,
        output,
        lambda progress: convert(args.source, args.destination, resume=args.resume, progress=progress, **arguments),
        lambda done: [
            ("path", done.path),
            ("bytes", Size(done.nbytes)),
            *family_facts(done.family, done.variant),
            ("time", Seconds(done.seconds)),
            ("peak memory", Size(done.peak_bytes)),
            ("requests", done.requests),
        ],
    )


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
