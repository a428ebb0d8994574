"""`inspect`: what a checkpoint holds, from its headers or metadata: tensors, a family's leaves, or Orbax's arrays.

Each of the three is one document, which `--json` prints whole and from which the tables are made. No device is started.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from math import isfinite, prod
from operator import itemgetter
from typing import Any

from orbax_safetensors import Checkpoint, MappingError, open_checkpoint
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.checkpoint.quantized import label, quantized_tensors
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.cli.arguments import refuse, variant
from orbax_safetensors.cli.braces import in_braces
from orbax_safetensors.cli.family_facts import family_facts, full_name
from orbax_safetensors.cli.layer_order import by_layer
from orbax_safetensors.cli.reporter import Reporter
from orbax_safetensors.cli.tables import Facts, Printer, Size, shape_text
from orbax_safetensors.geometry.view import View
from orbax_safetensors.orbax_store import array_name, open_step
from orbax_safetensors.orbax_store.leaf import STRING
from orbax_safetensors.storage.paths import absolute_path
from orbax_safetensors.streaming.cutting import MEMORY_BYTES
from orbax_safetensors.streaming.open_source import open_source
from orbax_safetensors.streaming.statistics import statistics

_Document = dict[str, Any]

_FOR_SAFETENSORS = "is for safetensors, and PATH is a checkpoint of Orbax"

_NUMBER = re.compile("(^|_)[0-9]+$")  # of a layer or an expert: a part of a name, or the end of one, as `layers_0`


def run(args: argparse.Namespace, output: Printer) -> int:
    """Print the tensors of `args.path`, the leaves that a family makes of them, or arrays of Orbax; and totals."""
    if args.stats is not None:
        refuse(args, ("grep", "depth"), "lists names, and --stats has one")
        return _stats(args, output)
    if is_orbax(absolute_path(args.path)):
        unit, document, show = "arrays", _arrays(args), _show_arrays
    elif args.family is not None or args.variant:
        unit, document, show = "leaves", _leaves(args), _show_leaves
    else:
        unit, document, show = "tensors", _tensors(args), _show_tensors
    if args.depth is not None:
        document["groups"] = _groups(unit, document.pop(unit), args.depth)
        show = partial(_show_groups, unit)
    if args.json:
        output.json(document)
        return 0
    facts = show(document, output)
    if len(document["dtypes"]) > 1:
        output.table(
            ("dtype", unit, "parameters", "bytes"),
            ((name, sums[unit], sums["parameters"], Size(sums["bytes"])) for name, sums in document["dtypes"].items()),
        )
    if document.get("unused"):
        output.table(("tensors not used",), ((text,) for text, _ in in_braces(document["unused"])))
    output.facts(facts)
    return 0


def _name(entry: _Document) -> str:
    """Return the name of a tensor or an array, or the path of a leaf."""
    name: str = entry["path"] if "path" in entry else entry["name"]
    return name


def _sums(unit: str, entries: Iterable[_Document], key: Callable[[_Document], str]) -> dict[str, dict[str, int]]:
    """Return how many entries have each key, and how many parameters and bytes these have together."""
    sums: dict[str, Counter[str]] = {}
    for entry in entries:
        counts = {unit: 1, "parameters": entry["parameters"], "bytes": entry["bytes"]}
        sums.setdefault(key(entry), Counter()).update(counts)
    return {name: dict(counter) for name, counter in sums.items()}


def _groups(unit: str, entries: Sequence[_Document], depth: int) -> list[_Document]:
    """Return sums over entries that have the same first parts of their names, except for numbers."""

    def group(entry: _Document) -> str:
        return ".".join([_NUMBER.sub(r"\1*", part) for part in _name(entry).split(".")][:depth])

    return [{"name": name, **counts} for name, counts in _sums(unit, entries, group).items()]


def _with_sums(unit: str, document: _Document, args: argparse.Namespace) -> _Document:
    """Return a document with its entries, the value of the key `unit`, by layer, and their sums.

    There are sums of each dtype, the one with the most bytes first, and of all. With `--grep`, entries with other names
    are left out before; nothing in a document then speaks of what was left out.
    """
    entries = by_layer(document[unit], _name)
    if args.grep is not None:
        entries = [entry for entry in entries if args.grep.search(_name(entry))]
    document |= {unit: entries}
    sums = _sums(unit, document[unit], itemgetter("dtype"))
    dtypes = {name: sums[name] for name in sorted(sums, key=lambda name: (-sums[name]["bytes"], name))}
    totals = {key: sum(counts[key] for counts in sums.values()) for key in (unit, "parameters", "bytes")}
    return document | {"dtypes": dtypes, "totals": totals}


def _total_facts(unit: str, document: _Document) -> Facts:
    totals = document["totals"]
    return [(unit, totals[unit]), ("parameters", totals["parameters"]), ("bytes", Size(totals["bytes"]))]


def _show_groups(unit: str, document: _Document, output: Printer) -> Facts:
    output.table(
        ("name", unit, "parameters", "bytes"),
        ((group["name"], group[unit], group["parameters"], Size(group["bytes"])) for group in document["groups"]),
    )
    return _total_facts(unit, document)


def _tensors(args: argparse.Namespace) -> _Document:
    checkpoint = read_checkpoint(args.path)
    quantized = {}
    with suppress(MappingError):  # what cannot be decoded is listed as it is stored
        encoded = quantized_tensors(checkpoint, read_config(checkpoint))
        quantized = {tensor.codes: tensor for tensor in encoded.tensors.values()}
    names = [posixpath.basename(file.path) for file in checkpoint.files]
    document: _Document = {
        "path": checkpoint.path,
        "tensors": [
            {
                "name": name,
                "dtype": tensor.stored_dtype.name,
                "shape": list(tensor.stored_shape),
                "quantized": label(quantized[name]) if name in quantized else None,
                "parameters": prod(quantized[name].shape if name in quantized else tensor.stored_shape),
                "bytes": tensor.nbytes,
                "file": names[tensor.file],
                "offset": checkpoint.location(name).begin,
            }
            for name, tensor in checkpoint.tensors.items()
        ],
        "files": [
            {"file": name, "bytes": file.header.file_bytes} for name, file in zip(names, checkpoint.files, strict=True)
        ],
        "metadata": checkpoint.metadata,
    }
    document = _with_sums("tensors", document, args)
    if args.grep is not None:
        holding = {tensor["file"] for tensor in document["tensors"]}
        document["files"] = [file for file in document["files"] if file["file"] in holding]
    document["totals"]["files"] = len(document["files"])
    return document


def _show_tensors(document: _Document, output: Printer) -> Facts:
    """Print every tensor. On a terminal files are numbers, explained below the table, to leave room for the names."""
    tensors, files = document["tensors"], document["files"]
    columns: tuple[str, ...] = ("name", "dtype", "shape", "bytes", "file")
    numbers = {file["file"]: number for number, file in enumerate(files, 1)}
    if output.for_people and len(files) == 1:
        columns = columns[:-1]
    output.table(
        columns,
        (
            (
                tensor["name"],
                tensor["quantized"] or tensor["dtype"],
                shape_text(tensor["shape"]),
                Size(tensor["bytes"]),
                numbers[tensor["file"]] if output.for_people else tensor["file"],
            )[: len(columns)]
            for tensor in tensors
        ),
    )
    if output.for_people:
        counts = Counter(tensor["file"] for tensor in tensors)
        nbytes: Counter[str] = Counter()
        for tensor in tensors:
            nbytes[tensor["file"]] += tensor["bytes"]
        output.table(
            ("file", "name", "tensors", "bytes"),
            ((number, file, counts[file], Size(nbytes[file])) for file, number in numbers.items()),
        )
    return [*_total_facts("tensors", document), ("files", len(files))]


def _leaves(args: argparse.Namespace) -> _Document:
    switches = variant(args)
    checkpoint = open_checkpoint(args.path, family=args.family, variant=switches)
    made_of = {path: _stored_names(checkpoint, view) for path, view in checkpoint.leaves.items()}
    used = {name for names in made_of.values() for name in names}
    unused = [name for name in checkpoint.tensors if name not in used and (args.grep is None or args.grep.search(name))]
    document: _Document = {
        "path": checkpoint.path,
        "family": full_name(checkpoint, args.family),
        "variant": switches,
        "leaves": [
            {
                "path": path,
                "dtype": view.dtype.name,
                "shape": list(view.shape),
                "parameters": prod(view.shape),
                "bytes": prod(view.shape) * view.dtype.itemsize,
                "tensors": made_of[path],
            }
            for path, view in checkpoint.leaves.items()
        ],
    }
    document = _with_sums("leaves", document, args) | {"unused": unused}
    listed = {name for leaf in document["leaves"] for name in leaf["tensors"]}
    document["totals"] |= {"tensors": len(listed), "unused_tensors": len(unused)}
    return document


def _stored_names(checkpoint: Checkpoint, view: View) -> Sequence[str]:
    """Return the tensors of the files that a leaf is made of; those that are quantised are codes and scales."""
    names: dict[str, None] = {}
    for name in map(checkpoint.whole, view.tensors):
        quantized = checkpoint.quantized.get(name)
        names |= dict.fromkeys((name,) if quantized is None else quantized.stored)
    return list(names)


def _show_leaves(document: _Document, output: Printer) -> Facts:
    leaves, totals = document["leaves"], document["totals"]
    output.table(
        ("leaf", "dtype", "shape", "parameters", "bytes", "tensors", "made of"),
        (
            (
                leaf["path"],
                leaf["dtype"],
                shape_text(leaf["shape"]),
                leaf["parameters"],
                Size(leaf["bytes"]),
                len(leaf["tensors"]),
            )
            for leaf in leaves
        ),
        ([text for text, _ in in_braces(leaf["tensors"])] for leaf in leaves),
    )
    return [
        *family_facts(document["family"], document["variant"]),
        *_total_facts("leaves", document),
        ("tensors used", totals["tensors"]),
        ("tensors not used", totals["unused_tensors"]),
    ]


def _arrays(args: argparse.Namespace) -> _Document:
    step = open_step(args.path)
    refuse(args, ("family", "variant"), _FOR_SAFETENSORS)
    document: _Document = {
        "path": step.item_path,
        "items": [name for name in step.items if name],
        "arrays": [
            {
                "name": array_name(step.items, name, key),
                "kind": leaf.kind,
                "dtype": leaf.dtype.name,
                "shape": list(leaf.shape),
                "parameters": prod(leaf.shape),
                "bytes": prod(leaf.shape) * leaf.dtype.itemsize,
                "chunk_shape": list(leaf.chunk_shape),
                "chunks": prod(leaf.grid),
            }
            for name, item in step.items.items()
            for key, leaf in item.leaves.items()
            if leaf.kind != STRING
        ],
        "metadata": step.metadata,
    }
    return _with_sums("arrays", document, args) | {"file_bytes": step.stored_bytes() if args.grep is None else None}


def _show_arrays(document: _Document, output: Printer) -> Facts:
    output.table(
        ("name", "kind", "dtype", "shape", "bytes", "chunk", "chunks"),
        (
            (
                array["name"],
                array["kind"],
                array["dtype"],
                shape_text(array["shape"]),
                Size(array["bytes"]),
                shape_text(array["chunk_shape"]),
                array["chunks"],
            )
            for array in document["arrays"]
        ),
    )
    facts = [("path", document["path"]), *_total_facts("arrays", document)]
    if document["file_bytes"] is not None:
        facts += [("bytes of files", Size(document["file_bytes"]))]
    return facts


def _stats(args: argparse.Namespace, output: Printer) -> int:
    """Print what one tensor, leaf or array holds."""
    switches = variant(args)
    if is_orbax(absolute_path(args.path)):
        refuse(args, ("family", "variant"), _FOR_SAFETENSORS)
    with (
        closing(open_source(args.path, MEMORY_BYTES, family=args.family, variant=switches, decode=True)) as source,
        Reporter(args.command, sys.stderr) as reporter,
    ):
        found = statistics(source, args.stats, MEMORY_BYTES, reporter)
    if args.json:
        document = found._asdict() | {"dtype": found.dtype.name}
        output.json(
            {"path": source.path, "name": args.stats} | {key: _finite(value) for key, value in document.items()}
        )
        return 0
    output.facts(
        [
            ("name", args.stats),
            ("dtype", found.dtype.name),
            ("shape", shape_text(found.shape)),
            ("minimum", _digits(found.minimum)),
            ("maximum", _digits(found.maximum)),
            ("mean", _digits(found.mean)),
            ("NaNs", found.nans),
            ("first values", " ".join(map(_digits, found.first))),
        ]
    )
    return 0


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _finite(value: Any) -> Any:
    """Return a value as JSON has it, which has no infinity and no NaN."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
