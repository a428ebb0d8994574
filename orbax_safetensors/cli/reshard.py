"""`reshard`: a checkpoint stored anew in the format that it has, as suits another mesh."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from orbax_safetensors import reshard
from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.cli.arguments import parse_bytes, refuse
from orbax_safetensors.cli.convert import add_common_arguments, common, report_conversion
from orbax_safetensors.cli.long_run import begin
from orbax_safetensors.cli.parser import Parser
from orbax_safetensors.cli.tables import Printer
from orbax_safetensors.devices.agreement import new_key, same_arguments, together
from orbax_safetensors.format.layout import MAX_FILE_BYTES
from orbax_safetensors.storage.paths import absolute_path

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
    begin(args)
    # In all processes or in none, as each may find something else, or have other options.
    if together(
        new_key("job"),
        lambda: is_orbax(absolute_path(args.source)),
        lambda found: repr((found, args.max_file_bytes)),
        check=same_arguments,
    ):
        refuse(args, ("max_file_bytes",), "is for safetensors, and SOURCE is a checkpoint of Orbax")
    arguments["max_file_bytes"] = MAX_FILE_BYTES if args.max_file_bytes is None else args.max_file_bytes
    return report_conversion(args, output, reshard, arguments)
