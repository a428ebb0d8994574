"""`diff`: what tells two checkpoints apart, of whatever kind they are. No device is started."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from math import isfinite
from operator import attrgetter
from typing import Any

from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.cli.arguments import refuse, variant
from orbax_safetensors.cli.reporter import Reporter
from orbax_safetensors.cli.tables import Cell, Printer, shape_text
from orbax_safetensors.storage.paths import absolute_path
from orbax_safetensors.streaming.comparison import ArrayDifference, Comparison, compare
from orbax_safetensors.streaming.open_source import open_source
from orbax_safetensors.streaming.tiles import TileSource

# For the tiles of both checkpoints; each source has as much for its reads.
_MEMORY_BYTES = 2**30


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print what tells `args.first` and `args.second` apart; return 1 if anything does."""
    switches = variant(args)
    paths = args.first, args.second
    of_orbax = [is_orbax(absolute_path(path)) for path in paths]
    if all(of_orbax):
        refuse(args, ("family",), "is for safetensors, and A and B are checkpoints of Orbax")
    # Beside a checkpoint of Orbax, a link has the names that Orbax restores.
    as_orbax = any(of_orbax) and args.family is None
    sources: list[TileSource] = []
    with ExitStack() as stack:
        for path in paths:
            source = open_source(path, _MEMORY_BYTES, family=args.family, variant=switches, as_orbax=as_orbax)
            stack.callback(source.close)
            sources.append(source)
        first, second = sources
        reporter = stack.enter_context(Reporter(args.command, sys.stderr))
        compared = compare(first, second, _MEMORY_BYTES, reporter)
    if args.json:
        output.json(_document(first, second, compared))
    else:
        _show(first, second, compared, output)
    return 0 if compared.same else 1


def _document(first: TileSource, second: TileSource, compared: Comparison) -> dict[str, Any]:
    return {
        "paths": [first.path, second.path],
        "same": compared.same,
        "equal": compared.equal,
        "only": list(compared.only),
        "different": [
            {
                "name": array.name,
                "shapes": [list(shape) for shape in array.shapes],
                "dtypes": [dtype.name for dtype in array.dtypes],
                "elements": array.elements,
                "changed": array.changed,
                "largest_difference": None if array.largest is None or not isfinite(array.largest) else array.largest,
            }
            for array in compared.different
        ],
    }


def _show(first: TileSource, second: TileSource, compared: Comparison, output: Printer) -> None:
    for side, names in zip("AB", compared.only, strict=True):
        if names:
            output.table((f"only in {side}",), [(text,) for text, _ in output.joined(names, name=str)])
    reshaped = [array for array in compared.different if array.changed is None]
    if reshaped:
        rows = output.joined(reshaped, attrgetter("shapes"))
        output.table(
            ("different shapes", "in A", "in B"), [(text, *map(shape_text, arrays[0].shapes)) for text, arrays in rows]
        )
    values = [array for array in compared.different if array.changed is not None]
    if values:
        _show_values(values, output)
    output.facts(
        [
            ("A", first.path),
            ("B", second.path),
            ("equal arrays", compared.equal),
            ("different arrays", len(compared.different)),
            ("only in A", len(compared.only[0])),
            ("only in B", len(compared.only[1])),
        ]
    )


def _show_values(arrays: Sequence[ArrayDifference], output: Printer) -> None:
    """Print the arrays whose values differ most first; on a terminal those whose names differ in numbers are one."""
    rows: list[tuple[Cell, ...]] = []
    for text, joined in output.joined(arrays, attrgetter("dtypes")):
        dtypes = " and ".join(dict.fromkeys(dtype.name for dtype in joined[0].dtypes))
        changed, elements = sum(array.changed or 0 for array in joined), sum(array.elements for array in joined)
        largest = max(array.largest or 0 for array in joined)
        rows.append((text, dtypes, changed, elements, f"{largest:.6g}"))
    rows.sort(key=lambda row: -float(row[-1]))
    output.worst(("different values", "dtype", "changed", "elements", "largest difference"), rows)
