"""`reshard`: a checkpoint stored anew in the format that it has, as suits another mesh."""

from __future__ import annotations

import argparse

from orbax_safetensors import reshard
from orbax_safetensors.cli.arguments import refuse
from orbax_safetensors.cli.convert import common, report_conversion
from orbax_safetensors.cli.long_run import begin
from orbax_safetensors.cli.tables import Printer


def run(args: argparse.Namespace, output: Printer) -> int:
    """Store `args.source` anew and print what was done."""
    if args.mesh is not None:
        refuse(args, ("max_file_bytes",), "is not for a --mesh, whose devices have a file each")
    arguments = common(args)
    if args.max_file_bytes is not None:
        arguments["max_file_bytes"] = args.max_file_bytes
    begin(args)
    return report_conversion(args, output, reshard, arguments)
