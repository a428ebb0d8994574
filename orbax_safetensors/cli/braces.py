"""Names in braces: one text for all names that differ in their numbers alone, as those of layers do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

_NUMBER = re.compile("([0-9]+)")
# Longer numbers are not those of layers or experts. Python refuses to read those of some thousand digits.
_DIGITS = 18


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
