"""A page in which every file is a box, with a row for each process and the bytes from left to right.

The page is complete in itself: no scripts, fonts or images from elsewhere. It stays at about a megabyte,
because long stretches of files, and neighbouring processes, are put together if there are many.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from orbax_safetensors import Checkpoint
from orbax_safetensors.cli.heat_page import PAGE
from orbax_safetensors.cli.tables import human_bytes
from orbax_safetensors.cost.heat import Heat
from orbax_safetensors.errors import printable

# Rows of a box, stretches of the longest file if every file has a line of its own, and of all files if not.
_ROWS = 64
_LONGEST, _ALL = 512, 2048
# Up to so many files have a line of their own.
_LINES = 8
# Heights of a row and of a box, in pixels.
_ROW_HEIGHTS, _BOX_HEIGHT = (2, 18), 128
# What stands for all bytes of a stretch. Twice as many still fit in 16 bits: scales can be read more than once.
_UNIT = 2**15


def draw(
    checkpoint: Checkpoint,
    heat: Heat,
    *,
    summary: str,
    facts: Sequence[tuple[str, str]],
    verdict: str = "",
    leaves: str = "",
) -> str:
    """Return the page for what processes read between the `stretches` of the files.

    `summary` and `facts` are text; `verdict` and `leaves` are HTML, above and below the boxes.
    """
    cuts, processes = stretches(checkpoint), len(heat.read)
    rows = _rows(processes)
    sizes = np.concatenate([np.diff(cut) for cut in cuts])
    first = np.cumsum([0, *(len(cut) - 1 for cut in cuts)]).tolist()
    names = [printable(posixpath.basename(file.path)) for file in checkpoint.files]
    lines = len(cuts) <= _LINES
    longest = max(file.header.file_bytes for file in checkpoint.files)
    data: dict[str, Any] = {
        "unit": _UNIT,
        "least": 1 / (2 * processes),
        "rows": rows,
        "files": [
            {"name": name, "first": at, "cuts": cut.tolist()} for name, at, cut in zip(names, first, cuts, strict=False)
        ],
        "tensors": _tensors(checkpoint, cuts),
        "read": _packed(heat.read, rows, sizes),
        "needed": _packed(heat.needed, rows, sizes),
    }
    low, high = _ROW_HEIGHTS
    fields = {
        "title": escape(printable(checkpoint.path)),
        "summary": escape(summary),
        "verdict": verdict,
        "facts": "".join(
            f'<tr><td class="left">{escape(name)}</td><td>{escape(printable(text))}</td></tr>\n' for name, text in facts
        ),
        "least": f"1/{2 * processes:,}",
        "widths": ", to scale" if lines else "",
        "rows": "" if len(rows) == processes else f", {rows[0][1] + 1:,} or so in a row",
        "height": str(len(rows) * min(max(_BOX_HEIGHT // len(rows), low), high)),
        "cell": "100%" if lines else "6.5rem",
        "heading": f"{len(names):,} {'files' if len(names) > 1 else 'file'}, "
        + human_bytes(sum(file.header.file_bytes for file in checkpoint.files)),
        "files": "".join(
            _file(name, short, file.header.file_bytes, file.header.file_bytes / longest if lines else 1)
            for name, short, file in zip(names, names if lines else _short(names), checkpoint.files, strict=True)
        ),
        "leaves": leaves,
        # `<` would let a tensor's name end the script.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    # In one pass: what is filled in may itself look like a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: fields[place[1]], PAGE)


def stretches(checkpoint: Checkpoint) -> list[np.ndarray]:
    """Return for each file the offsets that cut it into stretches, all about equally long, from the first data byte."""
    sizes = [file.header.file_bytes for file in checkpoint.files]
    stretch = max(sizes) / _LONGEST if len(sizes) <= _LINES else sum(sizes) / _ALL
    out = []
    for file in checkpoint.files:
        begin, end = file.header.data_start, max(file.header.file_bytes, file.header.data_start + 1)
        count = min(max(round(file.header.file_bytes / stretch), 1), end - begin)
        out.append(np.linspace(begin, end, count + 1).astype(np.int64))
    return out


def _rows(processes: int) -> list[tuple[int, int]]:
    """Return the first and the last process of every row."""
    step = -(-processes // _ROWS)
    return [(low, min(low + step, processes) - 1) for low in range(0, processes, step)]


def _packed(amounts: np.ndarray, rows: Sequence[tuple[int, int]], sizes: np.ndarray) -> str:
    """Pack bytes by process and stretch as shares of the stretches by row, the mean over its processes, in base64."""
    means = np.stack([amounts[low : high + 1].mean(axis=0) for low, high in rows]) / sizes
    # What is read at all must not be rounded to nothing.
    units = np.where(means > 0, np.clip(np.round(means * _UNIT), 1, 2**16 - 1), 0)
    return base64.b64encode(units.astype("<u2").tobytes()).decode()


def _tensors(checkpoint: Checkpoint, cuts: Sequence[np.ndarray]) -> list[tuple[str, str, int]]:
    """Return for every stretch the first and the last tensor with bytes in it, and how many there are."""
    out: list[tuple[str, str, int]] = []
    for file, cut in zip(checkpoint.files, cuts, strict=True):
        entries = [(entry.begin, entry.end, name) for name, entry in file.header.tensors.items() if entry.nbytes]
        entries.sort()
        begin, end = (file.header.data_start + np.array([entry[at] for entry in entries], np.int64) for at in (0, 1))
        first = np.searchsorted(end, cut[:-1], "right").tolist()
        stop = np.searchsorted(begin, cut[1:], "left").tolist()
        for low, high in zip(first, stop, strict=True):
            none = low >= high
            out.append(
                ("", "", 0) if none else (printable(entries[low][2]), printable(entries[high - 1][2]), high - low)
            )
    return out


def _short(names: Sequence[str]) -> list[str]:
    """Return what tells names apart: without what all begin and end with, except digits."""
    before = len(posixpath.commonprefix(names).rstrip("0123456789"))
    after = len(posixpath.commonprefix([name[:before:-1] for name in names]).rstrip("0123456789"))
    return [name[before : len(name) - after] or name for name in names]


def _file(name: str, caption: str, nbytes: int, width: float) -> str:
    return (
        f'<figure><figcaption title="{escape(name)}">{escape(caption)} <span class="quiet">{human_bytes(nbytes)}</span>'
        "</figcaption>"
        f'<canvas role="img" aria-label="Reads of {escape(name)} by process" style="width:{100 * width:.4g}%"></canvas>'
        "</figure>\n"
    )
