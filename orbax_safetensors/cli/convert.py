"""`convert`: checkpoints from safetensors to Orbax and back; and what `reshard` has in common with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from orbax_safetensors.cli import cluster, convert_plan, family
from orbax_safetensors.cli.partition import UsageError, mesh_text
from orbax_safetensors.cli.progress import Reporter
from orbax_safetensors.cli.tables import Cell, Output, Seconds, Size
from orbax_safetensors.conversions import MEMORY_BYTES
from orbax_safetensors.convert import Conversion, convert
from orbax_safetensors.convert_planning import plan_convert
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.streaming.casts import Casts

# Options that mean something in one direction only.
_TO_ORBAX = {"mesh": "--mesh", "spec": "--spec", "step": "--step", "no_compression": "--no-compression"}
_TO_SAFETENSORS = {"config": "--config"}

Call = Callable[[Reporter], Conversion]


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
        args, output, lambda progress: convert(args.source, args.destination, to=args.to, progress=progress, **asked)
    )


def common(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the arguments that `convert` and `reshard` share."""
    return {
        "mesh": args.mesh,
        "spec": _spec(args),
        "compression": not args.no_compression,
        "memory_bytes": MEMORY_BYTES if args.memory is None else args.memory,
        "resume": args.resume,
    }


def report(args: argparse.Namespace, output: Output, call: Call) -> int:
    """Does it, says on stderr how far it is, and prints what was done; process 0 alone says and prints."""
    first, processes = jax.process_index() == 0, jax.process_count()
    label = args.command if processes == 1 else f"{args.command}, process 0 of {processes}"
    reporter = Reporter(label, sys.stderr if first else None)
    stops = cluster.Stops()
    try:
        with stops, reporter:
            done = call(reporter)
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
    facts: list[tuple[str, Cell]] = [
        ("path", done.path),
        ("bytes", Size(done.nbytes)),
        ("time", Seconds(done.seconds)),
        ("peak memory", Size(done.peak_bytes)),
        ("requests", done.requests),
    ]
    output.facts([*facts, ("processes", processes)] if processes > 1 else facts)
    return 0


def _spec(args: argparse.Namespace) -> Mapping[str, Any] | None:
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
