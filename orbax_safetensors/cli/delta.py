"""`delta`: what changed between two saved checkpoints, published for running engines. No device is started."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict

from orbax_safetensors import SafetensorsOptions, delta
from orbax_safetensors.cli.long_run import Reporter
from orbax_safetensors.cli.parser import Parser
from orbax_safetensors.cli.tables import Printer, Seconds, Share, Size

# argparse leaves this text as it is.
_DESCRIPTION = """\
Publishes what changed from OLD to NEW, two checkpoints with the same tensors,
as the directory weight_v000042 below PUBLISH, which appears once it is whole.
Engines that hold OLD then hold NEW. Experimental: engines define the layout,
and may change it.

A version that exists, or that does not follow the latest one, is refused."""


def add_parser(add: Callable[..., Parser]) -> Parser:
    """Return the parser of the command, which `add` has made."""
    parser = add("delta", help="publish what changed to running engines", description=_DESCRIPTION)
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("publish", metavar="PUBLISH")
    parser.add_argument("--version", type=int, required=True, metavar="N", help="number of the new version")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace, output: Printer) -> int:
    """Publish the delta and print what was published."""
    with Reporter(args.command, sys.stderr) as reporter:
        options = SafetensorsOptions(progress=reporter)
        done = delta(args.old, args.new, args.publish, version=args.version, options=options)
    if args.json:
        output.json(asdict(done))
        return 0
    output.facts(
        [
            ("path", done.path),
            ("changed tensors", done.changed_tensors),
            ("tensors", done.tensors),
            ("changed elements", done.changed_elements),
            ("share of elements", Share(done.changed_elements / max(1, done.elements))),
            ("delta", Size(done.delta_bytes)),
            ("share of model", Share(done.delta_bytes / max(1, done.model_bytes))),
            ("model", Size(done.model_bytes)),
            ("time", Seconds(done.seconds)),
        ]
    )
    return 0
