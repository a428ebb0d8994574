"""A table as rich draws it: nothing is cut off. If names leave too little room, each has a line of its own.

Only terminals and pages import this, because rich takes a tenth of a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, JustifyMethod
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Where a text that is too long goes on in the next line; the dots of `{0..35}` stay together.
_BREAK = re.compile(r"(?<=[./, ])(?<!\.\.)(?!\.)")
# Columns of a name that is cut at its dots; with less, a name has a line of its own.
_LEAST_NAME = 32
_INDENT = "  "
_GAP = "  "  # between columns


class _Lines:
    """Lines of a cell. What is too long for its column goes on after a dot, comma, slash or space, further in."""

    def __init__(self, lines: Sequence[tuple[str, str]]) -> None:
        """Each line is a text and its style."""
        self._lines = lines

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max((cell_len(text) for text, _ in self._lines), default=0))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for text, style in self._lines:
            indent = text[: len(text) - len(text.lstrip())]
            line, room = indent, max(options.max_width - len(indent + _INDENT), 1)
            for part in _BREAK.split(text.lstrip()):
                for piece in chop_cells(part, room):
                    if line.strip() and cell_len((line + piece).rstrip()) > options.max_width:
                        yield Text(line, style)
                        line = indent + _INDENT
                    line += piece
            yield Text(line, style)


def drawn_table(
    console: Console,
    columns: Sequence[str],
    are_numbers: Sequence[bool],
    rows: Sequence[Sequence[str]],
    notes: Sequence[Sequence[str]],
) -> Table:
    """Return the table for a console; the headings and each row have lines of `notes` below their first cell."""
    # A line for each word, because a number is rarely as wide as its heading.
    columns = [name.replace(" ", "\n") if number else name for name, number in zip(columns, are_numbers, strict=True)]
    cells_of = list(zip(columns, *rows, strict=True))
    widths = [max(cell_len(line) for cell in cells for line in cell.split("\n")) for cells in cells_of]
    first = max([widths[0], *(len(_INDENT) + cell_len(line) for lines in notes for line in lines)])
    justify: list[JustifyMethod] = ["right" if number else "left" for number in are_numbers]
    heading, *entries = zip([columns, *rows], notes, strict=True)

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True)
    if are_numbers[0] or min(first, _LEAST_NAME) + sum(widths[1:]) + 2 * len(widths) <= console.width:
        table.add_column(_cell(columns[0], heading[1]), justify=justify[0])
        for name, side, number in zip(columns[1:], justify[1:], are_numbers[1:], strict=True):
            table.add_column(name, justify=side, no_wrap=number)
        for row, lines in entries:
            table.add_row(_cell(row[0], lines), *map(_cell, row[1:]))
        return table

    def below(row: Sequence[str], lines: Sequence[str]) -> Group:
        if not any(row[1:]):
            return Group(_cell(row[0], lines))
        cells = Table.grid()
        for width, side in zip(widths[1:], justify[1:], strict=True):
            cells.add_column(width=width, justify=side)
            cells.add_column(width=len(_GAP))  # not padding, which versions of rich count differently
        cells.add_row(*[part for text in row[1:] for part in (_cell(text), _GAP)])
        return Group(_cell(row[0]), Padding(cells, (0, 0, 0, len(_INDENT))), _Lines(_indented(lines)))

    table.add_column(below(*heading))
    for entry in entries:
        table.add_row(below(*entry))
    return table


def _cell(text: str, notes: Sequence[str] = ()) -> _Lines:
    return _Lines([*((line, "") for line in text.split("\n")), *_indented(notes)])


def _indented(notes: Sequence[str]) -> list[tuple[str, str]]:
    return [(_INDENT + note, "dim") for note in notes]
