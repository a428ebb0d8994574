"""The demo's picture: a page that shows, to scale, which bytes of each file were read by which process.

The page is complete in itself: no scripts, fonts or images from elsewhere.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from html import escape
from math import prod
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.cli.byte_map import amounts, owners
from orbax_safetensors.cli.page import PAGE
from orbax_safetensors.cli.partition import axes_text, spread
from orbax_safetensors.cli.tables import clean, human_bytes, shape_text

# Rows that all files together are wrapped into, and the size of one in units of the drawing.
_ROWS = 56
_WIDTH, _HEIGHT, _PITCH = 1000.0, 12.0, 14.0
_MARGIN = 64.0  # at the left, for the offsets of every so many rows
_LABELLED = 8
_EDGE_WIDTH = 6.0  # tensors that are narrower get no line where they begin

# What may own a byte, the name of its colour, and what it means; 1 and 2 are the processes, as bits.
_HEADER = -1
_OWNERS: tuple[tuple[int, str, str], ...] = (
    (1, "first", "process 0 only"),
    (2, "second", "process 1 only"),
    (3, "both", "both processes"),
    (_HEADER, "header", "neither: the header, which each process reads first to find the tensors"),
    (0, "neither", "neither: data that no shard holds"),
)


def draw(
    checkpoint: Checkpoint, reports: Sequence[Mapping[str, Any]], faults: Sequence[str], mesh: Mapping[str, int]
) -> str:
    """The page for what the two processes of `reports` read of `checkpoint`, sharded over `mesh`.

    `faults` are what went wrong, a line each; without them the page says that all bits are equal.
    """
    sizes = [file.header.file_bytes for file in checkpoint.files]
    row_bytes = -(-sum(sizes) // _ROWS)
    regions = [_regions(checkpoint, number, reports) for number in range(len(sizes))]
    total = _sum([amounts(own, 0, size) for own, size in zip(regions, sizes, strict=True)])
    tensors = _tensors(checkpoint, regions, mesh)
    shards = sum(report["shards"] for report in reports)
    verdict = "<br>".join(escape(clean(fault)) for fault in faults) or (
        f"All bits are equal: each of {shards:,} shards was compared with what the <code>safetensors</code> package "
        "reads."
    )
    data: dict[str, Any] = {"row_bytes": row_bytes, "width": _WIDTH, "height": _HEIGHT, "pitch": _PITCH}
    data |= {"sizes": sizes, "tensors": tensors}
    fields = {
        "title": escape(clean(checkpoint.path)),
        "verdict_class": "bad" if faults else "good",
        "verdict": verdict,
        "arrays": f"{len(checkpoint.tensors):,}",
        "devices": str(prod(mesh.values())),
        "row": human_bytes(row_bytes),
        "processes": "".join(_process(report, sum(sizes)) for report in reports),
        "legend": "".join(_legend(*owner, total, sum(sizes)) for owner in _OWNERS if owner[0] or total[0]),
        "files": "".join(_file(checkpoint, number, own, row_bytes) for number, own in enumerate(regions)),
        "tensors": "".join(_tensor(tensor) for tensor in tensors),
        # `<` would let a tensor's name end the script.
        "data": json.dumps(data).replace("<", "\\u003c"),
    }
    # In one pass: what is filled in may itself look like a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: fields[place[1]], PAGE)


def _regions(checkpoint: Checkpoint, number: int, reports: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, int]]:
    """A file cut where its owners change."""
    header = checkpoint.files[number].header
    readers = [np.array(report["ranges"].get(str(number), []), np.int64).reshape(-1, 2) for report in reports]
    cut = owners(readers, header.file_bytes)
    return [
        (max(begin, low), min(end, high), owner if low else _HEADER)
        for low, high in ((0, header.data_start), (header.data_start, header.file_bytes))
        for begin, end, owner in cut
        if max(begin, low) < min(end, high)
    ]


def _sum(parts: Sequence[Mapping[int, int]]) -> dict[int, int]:
    return {owner: sum(part.get(owner, 0) for part in parts) for owner, _, _ in _OWNERS}


def _tensors(
    checkpoint: Checkpoint, regions: Sequence[Sequence[tuple[int, int, int]]], mesh: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Every tensor, where it lies, and how many of its bytes each owner has."""
    out = []
    for name, tensor in checkpoint.tensors.items():
        location = checkpoint.location(name)
        file, begin, end = location.file, location.begin, location.begin + tensor.nbytes
        out.append(
            {
                "name": clean(name),
                "dtype": tensor.stored_dtype.name,
                "shape": shape_text(tensor.stored_shape),
                "axes": axes_text(spread(tensor.shape, mesh)) or "replicated",
                "file": file,
                "begin": begin,
                "end": end,
                "owners": [amounts(regions[file], begin, end).get(owner, 0) for owner in (1, 2, 3)],
            }
        )
    return out


def _process(report: Mapping[str, Any], nbytes: int) -> str:
    cells = (
        f"{report['devices']}",
        f"{report['shards']:,}",
        *(f"{report[key]:,}" for key in ("needed_bytes", "planned_bytes", "measured_bytes")),
        f"{report['measured_bytes'] / nbytes:.2%}",
    )
    colour = _OWNERS[report["process"]][1]
    name = f'<td class="left"><span class="swatch {colour}"></span>{report["process"]}</td>'
    return f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


def _legend(owner: int, colour: str, meaning: str, total: Mapping[int, int], nbytes: int) -> str:
    amount = f"{total[owner]:,} bytes, {total[owner] / nbytes:.2%}"
    return f'<li><span class="swatch {colour}"></span>{meaning} <span class="quiet">{amount}</span></li>\n'


def _file(checkpoint: Checkpoint, number: int, regions: Sequence[tuple[int, int, int]], row_bytes: int) -> str:
    """The map of one file."""
    file = checkpoint.files[number]
    nbytes = file.header.file_bytes
    rows = -(-nbytes // row_bytes)
    paths = []
    for owner, colour, _ in _OWNERS:
        if drawn := "".join(_rectangles(begin, end, row_bytes) for begin, end, of in regions if of == owner):
            paths.append(f'<path class="{colour}" d="{drawn}"/>')
    edges = "".join(
        _edge(file.header.data_start + entry.begin, row_bytes)
        for entry in file.header.tensors.values()
        if entry.nbytes * _WIDTH > _EDGE_WIDTH * row_bytes
    )
    labels = "".join(
        f'<text x="-8" y="{row * _PITCH + _HEIGHT - 2:g}">{human_bytes(row * row_bytes)}</text>'
        for row in range(0, rows, _LABELLED)
    )
    name = escape(clean(posixpath.basename(file.path)))
    return (
        f'<h2>{name} <span class="quiet">{nbytes:,} bytes</span></h2>\n'
        f'<svg viewBox="{-_MARGIN:g} -1 {_MARGIN + _WIDTH + 1:g} {rows * _PITCH + 1:g}" role="img" '
        f'aria-label="Map of the bytes of {name}">{labels}{"".join(paths)}<path class="edges" d="{edges}"/>'
        '<path class="chosen"/></svg>\n'
    )


def _rectangles(begin: int, end: int, row_bytes: int) -> str:
    """`[begin, end)` as part of an SVG path, one rectangle for the rest of each row."""
    out = []
    while begin < end:
        row, start = divmod(begin, row_bytes)
        stop = min(end, (row + 1) * row_bytes)
        x, width = start / row_bytes * _WIDTH, (stop - begin) / row_bytes * _WIDTH
        out.append(f"M{x:.7g} {row * _PITCH:g}h{width:.7g}v{_HEIGHT:g}h{-width:.7g}z")
        begin = stop
    return "".join(out)


def _edge(offset: int, row_bytes: int) -> str:
    row, start = divmod(offset, row_bytes)
    return f"M{start / row_bytes * _WIDTH:.7g} {row * _PITCH:g}v{_HEIGHT:g}"


def _tensor(tensor: Mapping[str, Any]) -> str:
    words = (tensor["dtype"], tensor["shape"], tensor["axes"])
    numbers = (tensor["end"] - tensor["begin"], *tensor["owners"])
    return (
        f'<tr><td class="left name">{escape(tensor["name"])}</td>'
        + "".join(f'<td class="left">{word}</td>' for word in words)
        + "".join(f"<td>{number:,}</td>" for number in numbers)
        + "</tr>\n"
    )
