"""Numbers, sizes, speeds and times as they are written on a command line."""

from __future__ import annotations

import re
from math import isfinite

from orbax_safetensors.cli.partition import UsageError

_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = re.compile(r"([0-9]+)(\.[0-9]+)? ?([kMGT]?|[KMGT]i)B?")
# Bits are written out, because Gb/s is taken for either.
_BITS = {"bit/s": 8.0, "bps": 8.0, "B/s": 1.0, "B": 1.0}
_BANDWIDTH = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]?|[KMGT]i)(bit/s|bps|B/s|B)")
_LATENCY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(us|µs|ms|s)")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bytes(text: str) -> int:
    """Parse `2GB`, `512MiB` or `1000000` as a number of bytes."""
    match = _BYTES.fullmatch(text)
    if match is not None:
        # The integer apart from the fraction, so that no digit of it is lost.
        nbytes = int(match[1]) * _PREFIXES[match[3]] + int(float(match[2] or 0) * _PREFIXES[match[3]])
        if nbytes > 0:
            return nbytes
    raise UsageError(f"expected a number of bytes above 0, as in 2GB or 512MiB, found {text!r}")


def parse_bandwidth(text: str) -> float:
    """Parse `2GB/s`, `500MiB/s` or `25Gbit/s` as bytes per second."""
    match = _BANDWIDTH.fullmatch(text)
    if match is not None:
        value = float(match[1]) * _PREFIXES[match[2]] / _BITS[match[3]]
        if isfinite(value) and value > 0:
            return value
    raise UsageError(f"expected bytes or bits per second above 0, as in 2GB/s, 500MiB/s or 25Gbit/s, found {text!r}")


def parse_latency(text: str) -> float:
    """Parse `10ms`, `200us` or `0.01s` as seconds."""
    match = _LATENCY.fullmatch(text)
    if match is not None and isfinite(value := float(match[1]) * _SECONDS[match[2]]):
        return value
    raise UsageError(f"expected a time as in 10ms, 200us or 0.01s, found {text!r}")


def human_seconds(seconds: float) -> str:
    """Return `seconds` with about three digits, as `350 ms`, `12.3 s`, `4 min 10 s` or `2 h 05 min`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {rest:02} min"


def parse_count(text: str) -> int:
    """Parse a number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"expected a positive number, found {text!r}")
    return int(text)
