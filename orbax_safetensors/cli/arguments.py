"""What arguments mean, as they are written on a command line: sizes, speeds, times, meshes, rules, switches."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, NamedTuple

from orbax_safetensors import TensorMismatchError
from orbax_safetensors.format import strict_json

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


class Rule(NamedTuple):
    """One `--spec`: arrays in whose names `regex` is found are sharded by `spec`. `text` is as it was written."""

    text: str
    regex: str
    spec: tuple[str | tuple[str, ...] | None, ...]


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


def parse_page(text: str) -> str:
    """Return the name of a file that is to be a page, by its ending."""
    if not text.endswith((".html", ".svg")):
        raise UsageError(f"expected a name that ends in .html or .svg, found {text!r}")
    return text


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


def parse_mesh(text: str) -> dict[str, int]:
    """Parse `data=2,model=4` as axis sizes by name."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"expected NAME=SIZE,... as in data=2,model=4, found {text!r}")
        if name in mesh:
            raise UsageError(f"the axis {name!r} is passed twice in {text!r}")
        mesh[name] = int(size)
    return mesh


def parse_rule(text: str) -> Rule:
    """Parse `REGEX=AXES`. The regex may hold `=`, the axes may not."""
    regex, equals, axes = text.rpartition("=")
    if not equals:
        raise UsageError(f"expected REGEX=AXES as in 'kernel$=data,model', found {text!r}")
    parts = [() if part in ("", "-") else tuple(part.split("+")) for part in axes.split(",")] if axes else []
    if not all(axis.isidentifier() for part in parts for axis in part):
        raise UsageError(f"expected for every dimension -, AXIS or AXIS+AXIS in {axes!r} of {text!r}")
    return Rule(text, regex, tuple(part[0] if len(part) == 1 else part or None for part in parts))


def parse_regex(text: str) -> re.Pattern[str]:
    """Parse a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"{text!r} is not a regular expression: {error}") from error


def parse_depth(text: str) -> int:
    """Parse a number of parts of a name."""
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"expected a number of parts of at least 1, found {text!r}")
    return int(text)


def parse_step(text: str) -> int:
    """Parse the number of a step."""
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"expected the number of a step, found {text!r}")
    return int(text)


def parse_cast(text: str) -> tuple[str | None, str]:
    """Parse `bfloat16` or `REGEX=bfloat16`: return the regex, None if there is none, and the dtype."""
    from orbax_safetensors.devices.casts import Casts  # imports JAX

    regex, equals, dtype = text.rpartition("=")
    try:
        Casts({regex: dtype} if equals else dtype)
    except TensorMismatchError as error:
        raise UsageError(f"expected DTYPE or REGEX=DTYPE as in 'norm=float32', found {text!r}: {error}") from error
    return (regex if equals else None), dtype


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


def switches_text(switches: Mapping[str, Any]) -> str:
    """Return switches as `--variant` takes them, and an object, which is a whole config, as `{...}`."""
    return " ".join(f"{name}={_switch_text(value)}" for name, value in switches.items())


def _switch_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{...}"
    return value if isinstance(value, str) else json.dumps(value)
