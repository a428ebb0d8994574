"""A page in a file: what a command prints and draws, as HTML that is complete in itself, or the drawing as an SVG."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path

from orbax_safetensors import StorageError
from orbax_safetensors.cli import palette
from orbax_safetensors.cli.drawing import Drawing
from orbax_safetensors.cli.tables import Cell, Printer, for_people
from orbax_safetensors.errors import printable
from orbax_safetensors.storage.paths import as_text

_STYLE = """\
body { background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 60rem; overflow-wrap: anywhere; padding: 0.5rem 1rem 2rem; }
h1 { font-size: 1.4rem; line-height: 1.3; }
table { border-collapse: collapse; display: block; font-size: 0.8rem; margin: 1rem 0; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--stored); padding: 0.2rem 0.35rem; text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: normal; }
th, td:not(:first-child) { overflow-wrap: normal; }
.number { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap; }
td small { color: var(--soft); display: block; }
figure { margin: 1rem 0; }
figcaption, .row, td:first-child { font-family: ui-monospace, Menlo, "DejaVu Sans Mono", monospace; font-size: 0.8rem; }
.row { align-items: center; display: flex; gap: 0.6rem; }
.row span { color: var(--soft); white-space: pre; }
.row svg { flex: 1; height: 20px; shape-rendering: crispEdges; }
.key { align-items: flex-start; display: flex; flex-wrap: wrap; gap: 0 2rem; }
.key > * { flex: 1 1 20rem; margin: 0.4rem 0; }
.legend .row { flex-direction: row-reverse; font-family: inherit; font-size: 0.9rem; margin: 0.4rem 0; }
.legend .row span { flex: 1; white-space: normal; }
.legend .row svg { flex: none; width: 5rem; }
"""


class Page(Printer):
    """A page with a title, light or dark as its reader's browser is, and whole on a narrow screen."""

    def __init__(self, path: str, title: str) -> None:
        """Begin a page for the file `path`; raise `StorageError` if its directory does not exist."""
        super().__init__(io.StringIO())
        self.path = Path(as_text(path))
        if not self.path.absolute().parent.is_dir():
            raise StorageError(f"{self.path}: there is no directory to write it to")
        self.is_svg = self.path.suffix == ".svg"
        self._title = printable(title)
        self._body: list[str] = []
        self._drawing: Drawing | None = None

    @property
    def for_people(self) -> bool:
        """True: a page is read by people."""
        return True

    def line(self, text: str) -> None:
        """Add a paragraph."""
        self._body.append(f"<p>{escape(printable(text))}</p>")

    def legend(self, text: str) -> None:
        """Add a paragraph below a table."""
        self.line(text)

    def drawing(self, drawing: Drawing) -> None:
        """Add a drawing. An SVG has the last one alone."""
        self._drawing = drawing
        self._body.append(drawing.html())

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[Cell]], notes: Iterable[Sequence[str]] | None = None
    ) -> None:
        """Add a table. `notes` are lines of text for each row, which stand below its first cell."""
        rows = list(rows)
        more = [()] * len(rows) if notes is None else list(notes)
        headings = columns if notes is None else columns[:-1]
        cells = [_cell("th", heading, cell) for heading, cell in zip_longest(headings, rows[0] if rows else ())]
        self._body += ["<table>", f"<tr>{''.join(cells)}</tr>"]
        for row, lines in zip(rows, more, strict=True):
            small = "".join(f"<small>{escape(printable(line))}</small>" for line in lines)
            cells = [_cell("td", for_people(cell), cell, "" if at else small) for at, cell in enumerate(row)]
            self._body.append(f"<tr>{''.join(cells)}</tr>")
        self._body.append("</table>")

    def facts(self, pairs: Sequence[tuple[str, Cell]]) -> None:
        """Add a table of names with a value each."""
        rows = (f"<tr><th>{escape(name)}</th>{_cell('td', for_people(value), '')}</tr>" for name, value in pairs)
        self._body += ["<table>", *rows, "</table>"]

    def write(self) -> None:
        """Write the page to its file."""
        text = self._html() if self._drawing is None or not self.is_svg else self._drawing.svg(self._title)
        self.path.write_text(text, encoding="utf-8")

    def _html(self) -> str:
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self._title)}</title>\n<style>\n{palette.style()}{_STYLE}</style>\n</head>\n"
            f"<body>\n<h1>{escape(self._title)}</h1>\n" + "\n".join(self._body) + "\n</body>\n</html>\n"
        )


def _cell(tag: str, text: str, value: Cell | None, more: str = "") -> str:
    kind = ' class="number"' if isinstance(value, int | float) else ""
    return f"<{tag}{kind}>{escape(text)}{more}</{tag}>"
