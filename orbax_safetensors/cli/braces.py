"""Many names that differ in their numbers alone, as one text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile("([0-9]+)")


def in_braces(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return `names` as a shell's braces write them, `layers.{0..35}.weight` or `layers.{1..35..2}.weight`.

    Each text comes with the names that it stands for: all that differ in their numbers alone. Where the braces would
    stand for other names as well, it is the first of them and how many more there are. Names are distinct.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        alike.setdefault(tuple(_NUMBER.split(name)[::2]), []).append(name)
    return [(_text(texts, group), group) for texts, group in alike.items()]


def _text(between: Sequence[str], names: Sequence[str]) -> str:
    """Return names that have the same text `between` their numbers."""
    count, written = 1, between[0]
    numbers = zip(*(_NUMBER.split(name)[1::2] for name in names), strict=True)
    for column, text in zip(numbers, between[1:], strict=True):
        distinct = set(column)
        values = sorted(map(int, distinct))
        step = values[1] - values[0] if len(values) > 1 else 1
        if len(values) == 1:
            written += column[0] + text
        elif step and distinct == set(map(str, range(values[0], values[-1] + 1, step))):
            written += f"{{{values[0]}..{values[-1]}{f'..{step}' if step > 1 else ''}}}{text}"
            count *= len(values)
        else:  # `01`, or gaps that are not alike
            count = 0
    # Distinct names, each with its numbers in the ranges, are all that the braces stand for if they are as many.
    return written if count == len(names) else f"{names[0]} +{len(names) - 1:,}"
