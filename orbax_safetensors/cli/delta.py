"""`delta`: what changed between two saved checkpoints, published for running engines. No device is started."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from orbax_safetensors import SafetensorsOptions, delta
from orbax_safetensors.cli.reporter import Reporter
from orbax_safetensors.cli.tables import Printer, Seconds, Share, Size


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
