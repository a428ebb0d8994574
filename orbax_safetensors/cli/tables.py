"""Output for people and for programs: tables with rich on a terminal or a page, tab-separated lines in a pipe.

In a pipe nothing is shortened, wrapped, coloured or drawn, and numbers are exact. Text that comes from files is shown
with everything escaped that a terminal would act upon.
"""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from orbax_safetensors import StorageError
from orbax_safetensors.errors import printable
from orbax_safetensors.format.amounts import human_bytes, human_seconds
from orbax_safetensors.storage.paths import as_text

# Spaces between the columns of a listing.
_GAP = 2
_PAGE_COLUMNS = 120
# Rows that a terminal has of a table of the worst.
_WORST = 10
_NUMBER = re.compile("([0-9]+)")
# Longer numbers are not those of layers or experts. Python refuses to read those of some thousand digits.
_DIGITS = 18


class Size(int):
    """A number of bytes."""


class Share(float):
    """A part of a whole, from 0 to 1."""


class Seconds(float):
    """A time."""


Cell = str | int | float
Facts = list[tuple[str, Cell]]


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as JSON writes it, without spaces."""
    return "[" + ",".join(map(str, shape)) + "]"


def in_braces(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return `names` as a shell's braces write them, `layers.{0..35}.weight` or `layers.{1..35..2}.weight`.

    Each text comes with the names that it stands for: all that differ in their numbers alone. Where the braces would
    stand for other names as well, it is the first of them and how many more there are. Names are distinct.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(tuple(_NUMBER.split(name)[::2]), []).append(name)
    return [(_braced(texts, group), group) for texts, group in groups.items()]


def _braced(between: Sequence[str], names: Sequence[str]) -> str:
    """Return names that have the same text `between` their numbers."""
    count, written = 1, between[0]
    numbers = zip(*(_NUMBER.split(name)[1::2] for name in names), strict=True)
    for column, text in zip(numbers, between[1:], strict=True):
        distinct = set(column)
        if len(distinct) == 1:
            written += column[0] + text
            continue
        values = sorted(int(number) for number in distinct if len(number) <= _DIGITS)
        steps = {high - low for low, high in pairwise(values)}
        if distinct == set(map(str, values)) and len(steps) == 1:
            (step,) = steps
            written += f"{{{values[0]}..{values[-1]}{f'..{step}' if step > 1 else ''}}}{text}"
            count *= len(values)
        else:  # `01`, or gaps of several lengths
            count = 0
    # Distinct names, each with its numbers in the ranges, are all that the braces stand for if they are as many.
    return written if count == len(names) else f"{names[0]} +{len(names) - 1:,}"


def _for_people(cell: Cell) -> str:
    match cell:
        case Size():
            return human_bytes(cell)
        case Share():
            return f"{cell:.2%}"
        case Seconds():
            return human_seconds(cell)
        case float():
            return f"{cell:.2f}"
        case int():
            return f"{cell:,}"
    return printable(cell)


def _for_programs(cell: Cell) -> str:
    return printable(cell) if isinstance(cell, str) else f"{cell:.6g}" if isinstance(cell, float) else str(int(cell))


def _widths(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[int]:
    """Return how wide the columns of a table are, gaps included."""
    texts = [columns, *([_for_people(cell) for cell in row] for row in rows)]
    return [max(map(len, column)) + _GAP for column in zip(*texts, strict=True)]


def _narrowest(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[int]:
    """Return how wide the columns are if their headings have a line for each word."""
    return _widths([max(name.split(" "), key=len) for name in columns], rows)


class Printer:
    """Where a command prints its results: blocks, with an empty line between them."""

    def __init__(self, stream: TextIO, console: Any = None) -> None:
        """What is printed is made for people if `stream` is a terminal or of a `console`, for programs elsewhere."""
        self._stream = stream
        self._blocks = 0
        self._console = console
        if console is None and stream.isatty():
            from rich.console import Console  # costs a tenth of a second, which a pipe need not pay

            self._console = Console(file=stream, highlight=False)

    @property
    def for_people(self) -> bool:
        """Whether a person reads along, at a terminal."""
        return self._console is not None

    def line(self, text: str) -> None:
        """Print one line of text, control characters escaped; on a terminal it may wrap."""
        self._text(printable(text))
        self._blocks += 1

    def drawing(self, text: Any) -> None:
        """Print a drawing made with rich; in a pipe nothing is drawn."""
        if self._console is not None:
            self._space()
            self._console.print(text, soft_wrap=True)

    def json(self, document: object) -> None:
        """Print a JSON document, on one line in a pipe and indented on a terminal."""
        print(json.dumps(document, indent=2 if self._console else None), file=self._stream)

    def flush(self) -> None:
        """Write everything so far out, before another stream goes on."""
        self._stream.flush()

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
        """Print a table with a line of headings. Columns that begin with a number are aligned to the right.

        No name and no number is broken. If a terminal is too narrow for the table, headings wrap; then the longest
        names have lines of their own; and last, each cell has one, after its heading.
        """
        self._space()
        if self._console is None:
            self._stream.write("\t".join(columns) + "\n")
            self._stream.writelines("\t".join(map(_for_programs, row)) + "\n" for row in rows)
            return
        rows = list(rows)
        width, widths = self._console.width, _widths(columns, rows)
        if not rows or sum(_narrowest(columns, rows)) <= width:
            self._draw(columns, rows)
            return
        texts = [number for number, cell in enumerate(rows[0]) if isinstance(cell, str)]
        longest = max(texts, key=widths.__getitem__, default=0)
        if texts and sum(widths) - widths[longest] < width:
            first = [longest, *(number for number in range(len(columns)) if number != longest)]
            self._list([columns[number] for number in first], [[row[number] for number in first] for row in rows])
            return
        for number, row in enumerate(rows):
            if number:
                self._text("")
            self._facts(list(zip(columns, row, strict=True)))

    def comparison(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table of few rows, which a terminal that is too narrow has as columns, as many at a time as fit."""
        if self._console is None or sum(_narrowest(columns, rows)) <= self._console.width:
            self.table(columns, rows)
            return
        turned = list(zip(columns, *rows, strict=True))
        widths = [max(map(len, map(_for_people, column))) + _GAP for column in (columns, *rows)]
        first = 1
        while first < len(widths):
            stop = first + 1
            while stop < len(widths) and widths[0] + sum(widths[first : stop + 1]) <= self._console.width:
                stop += 1
            heading, *lines = [(str(line[0]), *line[first:stop]) for line in turned]
            self.table([str(cell) for cell in heading], lines)
            first = stop

    def worst(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table whose first rows matter most: a terminal has only these, and how many more there are."""
        more = len(rows) - _WORST if self.for_people else 0
        self.table(columns, rows[:_WORST] if more > 0 else rows)
        if more > 0:
            self.line(f" and {more:,} more; --json has all")

    def joined(self, names: Iterable[str]) -> list[tuple[str, list[str]]]:
        """Return names as rows of a table have them, `in_braces` on a terminal, each with the names it stands for."""
        return in_braces(names) if self.for_people else [(name, [name]) for name in names]

    def listing(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]], notes: Sequence[Sequence[str]]) -> None:
        """Print a table of rows with a long name, and with lines of text that belong to each, the `notes`.

        A terminal has the notes below their row, and a name that leaves no room for the row on a line of its own; lines
        that are too long for it wrap. Elsewhere the notes are the last of the `columns`.
        """
        if self._console is None:
            self.table(columns, ((*row, ", ".join(extra)) for row, extra in zip(rows, notes, strict=True)))
            return
        self._space()
        self._list(columns[:-1], rows, [columns[-1:], *notes])

    def facts(self, pairs: Sequence[tuple[str, Cell]]) -> None:
        """Print names with a value each, one to a line."""
        self._space()
        self._facts(pairs)

    def _facts(self, pairs: Sequence[tuple[str, Cell]]) -> None:
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            if self._console is None:
                self._stream.write(f"{name}\t{_for_programs(value)}\n")
            else:
                from rich.text import Text

                self._console.print(Text.assemble(f" {name:{width}}  ", (_for_people(value), "bold")), soft_wrap=True)

    def _list(
        self, columns: Sequence[str], rows: Sequence[Sequence[Cell]], notes: Sequence[Sequence[str]] | None = None
    ) -> None:
        texts = [columns, *([_for_people(cell) for cell in row] for row in rows)]
        widths = [width - _GAP for width in _widths(columns, rows)]
        right = [not isinstance(cell, str) for cell in rows[0]] if rows else [False] * len(widths)
        # What the other columns and a margin on both sides leave for names.
        room = max(min(widths[0], self._console.width - 2 - sum(_GAP + width for width in widths[1:])), 0)
        for number, (row, extra) in enumerate(zip(texts, notes or [()] * len(texts), strict=True)):
            style, note_style = ("", "dim") if number else ("bold", "bold")
            name = row[0]
            if len(name) > room:
                self._line(f" {name}", style)
                name = ""
            cells = [
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row[1:], widths[1:], right[1:], strict=True)
            ]
            self._line(f" {(' ' * _GAP).join((name.ljust(room), *cells))}", style)
            for note in extra:
                for line in textwrap.wrap(printable(note), self._console.width - 4, break_long_words=False):
                    self._line(f"   {line}", note_style)
            if not number:
                self._line(" " + "─" * (self._console.width - 2), "")

    def _line(self, text: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(text, style), soft_wrap=True)

    def _space(self) -> None:
        if self._blocks:
            self._text("")
        self._blocks += 1

    def _text(self, text: str) -> None:
        if self._console is None:
            print(text, file=self._stream)
        else:
            self._line(text, "")

    def _draw(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table whose headings wrap as far as the terminal's width asks for; nothing is cut off."""
        full, widths = _widths(columns, rows), _narrowest(columns, rows)
        for number, wanted in enumerate(full):
            room = max(self._console.width - sum(widths), 0)
            widths[number] += min(wanted - widths[number], room)
        right = [bool(rows) and not isinstance(cell, str) for cell in (rows[0] if rows else columns)]
        headings = [textwrap.wrap(name, width - _GAP) for name, width in zip(columns, widths, strict=True)]
        height = max(map(len, headings))
        headings = [[""] * (height - len(lines)) + lines for lines in headings]
        for line in zip(*headings, strict=True):
            self._row(line, widths, right, "bold")
        self._line("─" * sum(widths), "")
        for row in rows:
            self._row([_for_people(cell) for cell in row], widths, right, "")

    def _row(self, cells: Sequence[str], widths: Sequence[int], right: Sequence[bool], style: str) -> None:
        aligned = [
            cell.rjust(width - _GAP) if to_right else cell.ljust(width - _GAP)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ]
        self._line(f" {(' ' * _GAP).join(aligned)} ", style)


class Drawing:
    """A file for one drawing."""

    def __init__(self, path: str) -> None:
        """Raise `StorageError` if the directory of the file `path` does not exist."""
        self.path = Path(as_text(path))
        if not self.path.absolute().parent.is_dir():
            raise StorageError(f"{self.path}: there is no directory to write it to")

    def write(self, content: str) -> None:
        """Write the file."""
        self.path.write_text(content, encoding="utf-8")


class Page(Printer):
    """A page of HTML, complete in itself, that looks as a terminal does."""

    def __init__(self, path: str) -> None:
        """Begin a page for the file `path`; raise `StorageError` if its directory does not exist."""
        from rich.console import Console

        self._file = Drawing(path)
        self.path = self._file.path
        stream = io.StringIO()
        super().__init__(stream, Console(record=True, file=stream, width=_PAGE_COLUMNS, highlight=False))

    def write(self) -> None:
        """Write what has been printed to the file."""
        self._file.write(self._console.export_html())
