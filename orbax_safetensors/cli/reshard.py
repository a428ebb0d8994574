"""`reshard`: a checkpoint stored anew in the format that it has, as suits another mesh."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from orbax_safetensors import reshard
from orbax_safetensors.cli.arguments import parse_bytes, refuse
from orbax_safetensors.cli.convert import add_common_arguments, common, report_conversion
from orbax_safetensors.cli.long_run import begin
from orbax_safetensors.cli.parser import Parser
from orbax_safetensors.cli.tables import Printer

# argparse leaves these texts as they are.
_DESCRIPTION = """\
Rewrites a checkpoint in its format, Orbax or safetensors, so that a restore on
another mesh reads whole chunks or ranges."""

_EPILOG = """\
Safetensors become one file for each device of the mesh; without --mesh, they
are laid out anew. orbax-safetensors plan --help explains --spec.

examples:
  orbax-safetensors reshard maxtext/ for-16/ --mesh fsdp=16 \\
      --spec 'kernel$=fsdp' --spec 'embedding=fsdp'
  orbax-safetensors reshard model/ fewer/ --max-file-bytes 20GB
"""


def add_parser(add: Callable[..., Parser]) -> Parser:
    """Return the parser of the command, which `add` has made."""
    parser = add(
        "reshard",
        help="rewrite a checkpoint for another mesh",
        usage="%(prog)s SOURCE DESTINATION [OPTION]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("destination", metavar="DESTINATION")
    parser.add_argument(
        "--max-file-bytes",
        type=parse_bytes,
        metavar="BYTES",
        help="largest safetensors file, without --mesh (default: 5GB)",
    )
    add_common_arguments(parser)
    return parser


def run(args: argparse.Namespace, output: Printer) -> int:
    """Store `args.source` anew and print what was done."""
    if args.mesh is not None:
        refuse(args, ("max_file_bytes",), "is not for a --mesh, whose devices have a file each")
    arguments = common(args)
    if args.max_file_bytes is not None:
        arguments["max_file_bytes"] = args.max_file_bytes
    begin(args)
    return report_conversion(args, output, reshard, arguments)
