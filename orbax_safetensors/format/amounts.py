"""Bytes and seconds as people read them."""

from __future__ import annotations

import humanize


def human_bytes(nbytes: int) -> str:
    """Return `nbytes` with a binary unit, as `86.7 MiB`."""
    return humanize.naturalsize(nbytes, binary=True)


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
