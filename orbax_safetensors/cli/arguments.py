"""What options mean: sizes, speeds, times, families and their switches, as they are written on a command line."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from orbax_safetensors import Checkpoint
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.cli.tables import Facts
from orbax_safetensors.format import strict_json
from orbax_safetensors.mapping import registry

_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = re.compile(r"([0-9]{1,18})(\.[0-9]+)? ?([kMGT]?|[KMGT]i)B?")
_LATENCY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(us|µs|ms|s)")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# As text these would count as true, all of them.
_MISSPELT = {"true", "false", "null", "none", "yes", "no", "on", "off"}


class UsageError(argparse.ArgumentTypeError):
    """The command line is invalid."""


def refuse(args: argparse.Namespace, options: Iterable[str], reason: str) -> None:
    """Raise `UsageError`, which says the option and the reason, if one of these options is set."""
    for option in options:
        value = getattr(args, option)
        if value is not None and value is not False and value != []:
            raise UsageError(f"--{option.replace('_', '-')} {reason}")


def parse_bytes(text: str) -> int:
    """Parse `2GB`, `512MiB` or `1000000` as a number of bytes."""
    if nbytes := _nbytes(text):
        return nbytes
    raise UsageError(f"expected a number of bytes above 0, as in 2GB or 512MiB, found {text!r}")


def parse_bandwidth(text: str) -> float:
    """Parse `2GB/s` or `500MiB/s` as bytes per second."""
    if text.endswith("/s") and (nbytes := _nbytes(text.removesuffix("/s"))):
        return float(nbytes)
    raise UsageError(f"expected bytes per second above 0, as in 2GB/s or 500MiB/s, found {text!r}")


def _nbytes(text: str) -> int:
    """Return a number of bytes; 0 if the text is not one."""
    match = _BYTES.fullmatch(text)
    if match is None:
        return 0
    # The integer apart from the fraction, so that no digit of it is lost.
    return int(match[1]) * _PREFIXES[match[3]] + int(float(match[2] or 0) * _PREFIXES[match[3]])


def parse_latency(text: str) -> float:
    """Parse `10ms`, `200us` or `0.01s` as seconds."""
    match = _LATENCY.fullmatch(text)
    if match is not None and isfinite(value := float(match[1]) * _SECONDS[match[2]]):
        return value
    raise UsageError(f"expected a time as in 10ms, 200us or 0.01s, found {text!r}")


def parse_count(text: str) -> int:
    """Parse a number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"expected a positive number, found {text!r}")
    return int(text)


def parse_switch(text: str) -> tuple[str, Any]:
    """Parse `scan_layers=false` as name and value. A value that is neither a JSON literal nor an object is text."""
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value:
        raise UsageError(f"expected KEY=VALUE as in scan_layers=false, found {text!r}")
    if _LITERAL.fullmatch(value):
        return name, json.loads(value)
    if value.lstrip().startswith("{"):
        try:
            return name, strict_json.loads(value.encode())
        except ValueError as error:
            raise UsageError(f"expected a JSON object for {name}: {error}") from error
    if value.lower() in _MISSPELT:
        raise UsageError(f"expected true, false or null in {text!r}, found {value!r}")
    return name, value


def add_family(parser: argparse.ArgumentParser) -> None:
    """Add `--family` and `--variant`."""
    parser.add_argument("--family", metavar="NAME", help="a model's own tree, as maxtext or maxtext.qwen3")
    parser.add_argument(
        "--variant",
        type=parse_switch,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a switch of the family, as scan_layers=false; repeatable",
    )


def variant(args: argparse.Namespace) -> dict[str, Any]:
    """Return all switches of a command line, which are those of its family."""
    switches: dict[str, Any] = {}
    for name, value in args.variant:
        if name in switches:
            raise UsageError(f"--variant {name} is passed twice")
        switches[name] = value
    if switches and args.family is None:
        raise UsageError("--variant needs a --family")
    return switches


def full_name(checkpoint: Checkpoint, name: str) -> str:
    """Return the name of the family that `checkpoint` was opened with."""
    family = registry.find(name, read_config(checkpoint))
    return name if family is None else family.name


def family_facts(name: str | None, switches: Mapping[str, Any]) -> Facts:
    """Return what is printed of the family that was used: nothing without one."""
    return [] if name is None else [("family", f"{name} {switches_text(switches)}".strip())]


def switches_text(switches: Mapping[str, Any]) -> str:
    """Return switches as `--variant` takes them."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in switches.items()
    )
