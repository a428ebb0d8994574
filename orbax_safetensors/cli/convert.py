"""`convert`: checkpoints from safetensors to Orbax and back; and what `reshard` has in common with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from orbax_safetensors import Conversion, convert
from orbax_safetensors.cli.arguments import UsageError, refuse, variant
from orbax_safetensors.cli.family_facts import family_facts
from orbax_safetensors.cli.long_run import begin, report
from orbax_safetensors.cli.partition import given_spec
from orbax_safetensors.cli.tables import Printer, Seconds, Size
from orbax_safetensors.convert.convert_request import FORMATS


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
    memory = {} if args.memory is None else {"memory_bytes": args.memory}
    return {"mesh": args.mesh, "spec": given_spec(args.spec, args.mesh), **memory}


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
