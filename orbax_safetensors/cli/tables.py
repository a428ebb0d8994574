"""Output for people and for programs: tables with rich on a terminal, tab-separated lines in a pipe.

In a pipe nothing is shortened, wrapped, coloured or drawn, and numbers are exact. Text that comes from files is shown
with everything escaped that a terminal would act upon.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from orbax_safetensors.cli.braces import in_braces
from orbax_safetensors.errors import printable
from orbax_safetensors.format.amounts import human_bytes, human_seconds

if TYPE_CHECKING:
    from orbax_safetensors.cli.drawing import Drawing

# Rows that a terminal has of a table of the worst.
_WORST = 10


class Size(int):
    """A number of bytes."""


class Share(float):
    """A part of a whole, from 0 to 1."""


class Seconds(float):
    """A time."""


Cell = str | int | float
Facts = list[tuple[str, Cell]]
_Entry = TypeVar("_Entry")


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as JSON writes it, without spaces."""
    return "[" + ",".join(map(str, shape)) + "]"


def for_people(cell: Cell) -> str:
    """Return a cell of a table as people read it, escaped."""
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


class Printer:
    """Where a command prints its results: blocks, with an empty line between them."""

    def __init__(self, stream: TextIO) -> None:
        """What is printed is made for people if `stream` is a terminal, for programs elsewhere."""
        self._stream = stream
        self._blocks = 0
        self._console: Any = None
        if stream.isatty():
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

    def legend(self, text: str) -> None:
        """Print for people what the headings of the table above mean."""
        if self._console is not None:
            from rich.text import Text

            self._console.print(Text(f" {text}", "dim"))

    def drawing(self, drawing: Drawing) -> None:
        """Print a drawing; in a pipe nothing is drawn."""
        if self._console is not None:
            self._space()
            self._console.print(drawing.text(), soft_wrap=True)

    def json(self, document: object) -> None:
        """Print a JSON document, on one line in a pipe and indented on a terminal."""
        print(json.dumps(document, indent=2 if self._console else None), file=self._stream)

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[Cell]], notes: Iterable[Sequence[str]] | None = None
    ) -> None:
        """Print a table with a line of headings. Columns that begin with a number are aligned to the right.

        `notes` are lines of text for each row: on a terminal they stand below its first cell, elsewhere they are the
        last of the `columns`.
        """
        self._space()
        if self._console is not None:
            from orbax_safetensors.cli.drawn_table import drawn_table

            columns, rows = list(columns), list(rows)
            heading = [] if notes is None else [columns.pop()]
            lines = [[]] * len(rows) if notes is None else [list(map(printable, note)) for note in notes]
            numbers = [isinstance(cell, int | float) for cell in (rows[0] if rows else columns)]
            texts = [[for_people(cell) for cell in row] for row in rows]
            self._console.print(drawn_table(self._console, columns, numbers, texts, [heading, *lines]))
            return
        if notes is not None:
            rows = ((*row, ", ".join(lines)) for row, lines in zip(rows, notes, strict=True))
        self._stream.write("\t".join(columns) + "\n")
        self._stream.writelines("\t".join(map(_for_programs, row)) + "\n" for row in rows)

    def worst(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table whose first rows matter most: a terminal has only these, and how many more there are."""
        more = len(rows) - _WORST if self.for_people else 0
        self.table(columns, rows[:_WORST] if more > 0 else rows)
        if more > 0:
            self.line(f" and {more:,} more; --json has all")

    def joined(
        self,
        entries: Iterable[_Entry],
        key: Callable[[_Entry], Hashable] = lambda entry: None,
        *,
        name: Callable[[_Entry], str] = attrgetter("name"),
    ) -> list[tuple[str, list[_Entry]]]:
        """Return the name of each row of a table, and the entries that it stands for: one in a pipe.

        On a terminal, entries that have the same key, and whose names differ in their numbers alone, are one row.
        """
        if not self.for_people:
            return [(name(entry), [entry]) for entry in entries]
        groups: dict[Hashable, dict[str, _Entry]] = {}
        for entry in entries:
            groups.setdefault(key(entry), {})[name(entry)] = entry
        return [(text, [group[one] for one in names]) for group in groups.values() for text, names in in_braces(group)]

    def facts(self, pairs: Sequence[tuple[str, Cell]]) -> None:
        """Print names with a value each, one to a line."""
        self._space()
        if self._console is None:
            self._stream.writelines(f"{name}\t{_for_programs(value)}\n" for name, value in pairs)
            return
        from rich.text import Text

        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            self._console.print(Text.assemble(f" {name:{width}}  ", (for_people(value), "bold")), soft_wrap=True)

    def _space(self) -> None:
        if self._blocks:
            self._text("")
        self._blocks += 1

    def _text(self, text: str) -> None:
        if self._console is None:
            print(text, file=self._stream)
        else:
            from rich.text import Text

            self._console.print(Text(text), soft_wrap=True)
