"""`plan --picture`: a page in which every file is a box, with a row for each process and the bytes from left to right.

The page is complete in itself: no scripts, fonts or images from elsewhere. It stays at about a megabyte,
because long stretches of files, and neighbouring processes, are put together where there are many.
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

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.cli.heat_page import PAGE
from orbax_safetensors.cli.partition import mesh_text
from orbax_safetensors.cli.plan_tables import Scenario, worst_leaves
from orbax_safetensors.cli.tables import clean, human_bytes
from orbax_safetensors.cli.units import human_seconds
from orbax_safetensors.cost.heat import heat

# Rows of a box, stretches of the longest file where every file has a line of its own, and of all files where not.
_ROWS = 64
_LONGEST, _ALL = 512, 2048
# Up to so many files have a line of their own.
_LINES = 8
# Heights of a row and of a box, in pixels.
_ROW_HEIGHTS, _BOX_HEIGHT = (2, 18), 128
# What stands for all bytes of a stretch. Twice as many still fit in 16 bits: scales can be read more than once.
_UNIT = 2**15
_WORST = 20


def draw(scenario: Scenario, family: str | None) -> str:
    """The page for one mesh; `family` is that of the tree that is restored."""
    planned, plan = scenario.planned, scenario.plan
    checkpoint, processes = planned.checkpoint, planned.process_count
    cuts = _cuts(checkpoint)
    found = heat(
        planned.leaves,
        checkpoint.location,
        cuts,
        process_count=processes,
        max_gap_bytes=planned.pace.max_gap_bytes,
    )
    rows = _rows(processes)
    sizes = np.concatenate([np.diff(own) for own in cuts])
    first = np.cumsum([0, *(len(own) - 1 for own in cuts)]).tolist()
    names = [clean(posixpath.basename(file.path)) for file in checkpoint.files]
    lines = len(cuts) <= _LINES
    longest = max(file.header.file_bytes for file in checkpoint.files)
    data: dict[str, Any] = {
        "unit": _UNIT,
        "least": 1 / (2 * processes),
        "rows": rows,
        "files": [
            {"name": name, "first": at, "cuts": own.tolist()} for name, at, own in zip(names, first, cuts, strict=False)
        ],
        "tensors": _tensors(checkpoint, cuts),
        "read": _packed(found.read, rows, sizes),
        "needed": _packed(found.needed, rows, sizes),
    }
    needed = sum(cost.needed_bytes for cost in plan.processes)
    read = sum(cost.read_bytes for cost in plan.processes)
    facts = [
        *([] if family is None else [("family", family)]),
        ("mesh", mesh_text(scenario.mesh)),
        ("devices", f"{scenario.devices:,}"),
        ("processes", f"{processes:,}"),
        ("read by the process that reads most", human_bytes(max(cost.read_bytes for cost in plan.processes))),
        ("read by all of them", human_bytes(read)),
        ("over-read", f"{read / needed if needed else 1:.2f}"),
    ]
    if scenario.estimate is not None:
        facts.append(("estimated time", human_seconds(scenario.estimate.seconds)))
    low, high = _ROW_HEIGHTS
    fields = {
        "title": escape(clean(checkpoint.path)),
        "summary": f"What {processes:,} {'processes' if processes > 1 else 'process'} would read to restore "
        f"{plan.num_arrays:,} arrays, sharded over {scenario.devices:,} devices.",
        "facts": "".join(
            f'<tr><td class="left">{escape(name)}</td><td>{escape(clean(text))}</td></tr>\n' for name, text in facts
        ),
        "least": f"1/{2 * processes:,}",
        "widths": ", to scale" if lines else "",
        "rows": "" if len(rows) == processes else f", {rows[0][1] + 1:,} or so in a row",
        "height": str(len(rows) * min(max(_BOX_HEIGHT // len(rows), low), high)),
        "cell": "100%" if lines else "6.5rem",
        "heading": f"{len(names):,} files, {human_bytes(sum(file.header.file_bytes for file in checkpoint.files))}",
        "files": "".join(
            _file(name, short, file.header.file_bytes, file.header.file_bytes / longest if lines else 1)
            for name, short, file in zip(names, names if lines else _short(names), checkpoint.files, strict=True)
        ),
        "leaves": _leaves(scenario),
        # `<` would let a tensor's name end the script.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    # In one pass: what is filled in may itself look like a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: fields[place[1]], PAGE)


def _cuts(checkpoint: Checkpoint) -> list[np.ndarray]:
    """For each file the offsets between which its stretches lie, all about equally long, from the first data byte."""
    sizes = [file.header.file_bytes for file in checkpoint.files]
    stretch = max(sizes) / _LONGEST if len(sizes) <= _LINES else sum(sizes) / _ALL
    out = []
    for file in checkpoint.files:
        begin, end = file.header.data_start, max(file.header.file_bytes, file.header.data_start + 1)
        count = min(max(round(file.header.file_bytes / stretch), 1), end - begin)
        out.append(np.linspace(begin, end, count + 1).astype(np.int64))
    return out


def _rows(processes: int) -> list[tuple[int, int]]:
    """The first and the last process of every row."""
    step = -(-processes // _ROWS)
    return [(low, min(low + step, processes) - 1) for low in range(0, processes, step)]


def _packed(amounts: np.ndarray, rows: Sequence[tuple[int, int]], sizes: np.ndarray) -> str:
    """Bytes by process and stretch as shares of the stretches by row, the mean over its processes, in base64."""
    means = np.stack([amounts[low : high + 1].mean(axis=0) for low, high in rows]) / sizes
    # What is read at all must not be rounded to nothing.
    units = np.where(means > 0, np.clip(np.round(means * _UNIT), 1, 2**16 - 1), 0)
    return base64.b64encode(units.astype("<u2").tobytes()).decode()


def _tensors(checkpoint: Checkpoint, cuts: Sequence[np.ndarray]) -> list[tuple[str, str, int]]:
    """For every stretch the first and the last tensor with bytes in it, and how many there are."""
    out: list[tuple[str, str, int]] = []
    for file, own in zip(checkpoint.files, cuts, strict=True):
        entries = [(entry.begin, entry.end, name) for name, entry in file.header.tensors.items() if entry.nbytes]
        entries.sort()
        begin, end = (file.header.data_start + np.array([one[at] for one in entries], np.int64) for at in (0, 1))
        first = np.searchsorted(end, own[:-1], "right").tolist()
        stop = np.searchsorted(begin, own[1:], "left").tolist()
        for low, high in zip(first, stop, strict=True):
            none = low >= high
            out.append(("", "", 0) if none else (clean(entries[low][2]), clean(entries[high - 1][2]), high - low))
    return out


def _short(names: Sequence[str]) -> list[str]:
    """What tells names apart: without what all begin and end with, but for digits."""
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


def _leaves(scenario: Scenario) -> str:
    """The leaves that cost most over-read, and what would cost less."""
    rows = worst_leaves(scenario, grouped=True)
    if not rows:
        return ""
    cells = "".join(
        f'<tr><td class="left name">{escape(clean(row.text))}</td><td>{human_bytes(row.needed)}</td>'
        f"<td>{human_bytes(row.read)}</td><td>{row.over_read:.2f}</td>"
        + (
            "<td></td><td></td></tr>\n"
            if row.instead is None
            else f'<td class="left">{escape(row.axes)}</td><td>{row.instead.over_read:.2f}</td></tr>\n'
        )
        for row in rows[:_WORST]
    )
    more = f'<p class="quiet">and {len(rows) - _WORST:,} more</p>' if len(rows) > _WORST else ""
    return (
        '<h2>Leaves that are read badly, and a partition that is not</h2>\n<div class="scroll"><table>\n'
        '<thead><tr><th class="left">leaf</th><th>needed</th><th>read</th><th>over-read</th>'
        f'<th class="left">instead</th><th>then</th></tr></thead>\n<tbody>{cells}</tbody></table></div>{more}\n'
    )
