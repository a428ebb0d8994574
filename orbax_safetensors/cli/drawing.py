"""A drawing of bytes: bands of cells, for a terminal, a page of HTML, or as an SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from orbax_safetensors.cli import palette

if TYPE_CHECKING:
    from rich.text import Text

# Cells of the longest band, which fit a terminal of 80 columns beside the names of processes.
MOST_CELLS = 64

# Of a terminal without colours: from little to much.
_SHADES = "░▒▓█"
_LETTERS = {"stored": "·", "over": "x"}
# How opaque the palest cell is.
_PALEST = 0.3

# Of an SVG, in its units: the height of a row, and the widths of a cell and of a character of 13 units.
_ROW, _CELL, _CHARACTER = 20, 7, 7.9
_MARGIN = 16
_SVG_STYLE = """\
text { font: 13px ui-monospace, Menlo, "DejaVu Sans Mono", monospace; fill: var(--ink); white-space: pre; }
.soft { fill: var(--soft); }
.ground { fill: var(--ground); }
g { shape-rendering: crispEdges; }
"""


class DrawnCell(NamedTuple):
    """What a process does with a part of the stored bytes.

    Attributes:
      meaning: a name of the palette: `stored` if the process leaves them, `moved` if it needs what it reads, or `over`.
      strength: from 0, little of the part, to 1, all of it.
    """

    meaning: str
    strength: float = 1.0


class CellRow(NamedTuple):
    """A line of cells, with its name."""

    name: str
    cells: list[DrawnCell]


class Band(NamedTuple):
    """The stored bytes of leaves, with a row for each process. Its caption is printable."""

    caption: str
    rows: list[CellRow]


class Drawing(NamedTuple):
    """All bands, what their cells mean, and remarks on them, which stand above the bands."""

    bands: list[Band]
    legend: list[CellRow]
    notes: list[str]

    def text(self) -> Text:
        """Return the drawing for a terminal. It needs no colours: each meaning has characters of its own."""
        from rich.text import Text

        out = Text()
        for row in self.legend:
            out.append(" ")
            _append(out, row.cells)
            out.append(f" {row.name}\n")
        out.append("".join(f" {note}\n" for note in self.notes))
        for band in self.bands:
            out.append(f"\n {band.caption}\n")
            for row in band.rows:
                out.append(f" {row.name} ", "dim")
                _append(out, row.cells)
                out.append("\n")
        out.rstrip()
        return out

    def html(self) -> str:
        """Return the drawing as HTML that fits any width. Its style is `palette.style()` and that of the page."""
        bands = (
            f"<figure>\n<figcaption>{escape(band.caption)}</figcaption>\n{_html_rows(band.rows, MOST_CELLS)}</figure>\n"
            for band in self.bands
        )
        legend = _html_rows(self.legend, max((len(row.cells) for row in self.legend), default=0))
        notes = escape(" ".join(self.notes))
        return f'<div class="key">\n<div class="legend">\n{legend}</div>\n<p>{notes}</p>\n</div>\n{"".join(bands)}'

    def svg(self, title: str) -> str:
        """Return the drawing as an SVG below its title, complete in itself."""
        lines: list[str] = []
        margin, longest = _MARGIN, 0.0
        y = float(margin)

        def write(x: float, text: str, kind: str = "") -> None:
            nonlocal longest
            lines.append(f'<text{kind} x="{x:g}" y="{y + 14:g}">{escape(text)}</text>')
            longest = max(longest, x + _CHARACTER * len(text))

        def draw(x: float, cells: Sequence[DrawnCell]) -> None:
            lines.append(f'<g transform="translate({x:g} {y:g}) scale({_CELL} {_ROW})">{"".join(_rects(cells))}</g>')

        write(margin, title)
        y += 1.5 * _ROW
        for row in self.legend:
            draw(margin, row.cells)
            write(margin + _CELL * (len(row.cells) + 1), row.name)
            y += 1.25 * _ROW
        for note in self.notes:
            write(margin, note)
            y += _ROW
        for band in self.bands:
            y += _ROW / 2
            write(margin, band.caption)
            y += _ROW
            for row in band.rows:
                write(margin, row.name, ' class="soft"')
                draw(margin + _CHARACTER * (len(row.name) + 1), row.cells)
                y += _ROW
        names = max((len(row.name) for band in self.bands for row in band.rows), default=0)
        width = max(longest, margin + _CHARACTER * (names + 1) + _CELL * MOST_CELLS) + margin
        size = f"{width:.0f} {y + margin:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" aria-labelledby="title">\n'
            f'<title id="title">{escape(title)}</title>\n<style>\n{palette.style()}{_SVG_STYLE}</style>\n'
            f'<rect class="ground" width="100%" height="100%" rx="8"/>\n' + "\n".join(lines) + "\n</svg>\n"
        )


def _append(out: Text, cells: Sequence[DrawnCell]) -> None:
    """Append cells as characters."""
    for meaning, run in groupby(cells, lambda cell: cell.meaning):
        text = "".join(_LETTERS.get(meaning) or _SHADES[min(int(cell.strength * 4), 3)] for cell in run)
        out.append(text, palette.TERMINAL[meaning])


def _html_rows(rows: Sequence[CellRow], cells: int) -> str:
    return "".join(
        f'<div class="row"><span>{escape(row.name)}</span><svg viewBox="0 0 {cells} 1" preserveAspectRatio="none" '
        f'aria-hidden="true">{"".join(_rects(row.cells))}</svg></div>\n'
        for row in rows
    )


def _rects(cells: Sequence[DrawnCell]) -> Iterator[str]:
    """Yield rectangles of one unit of height and of a unit of width a cell, over what stays where it is."""
    yield f'<rect class="stored" width="{len(cells)}" height="1"/>'
    at = 0
    for cell, run in groupby(cells):
        count = len(list(run))
        if cell.meaning != "stored":
            opacity = _PALEST + (1 - _PALEST) * cell.strength
            yield f'<rect class="{cell.meaning}" x="{at}" width="{count}" height="1" fill-opacity="{opacity:.3g}"/>'
        at += count
