"""`index_faults`: whether the addresses of an index lie in the tensors of its files."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import tensorstore as ts
from etils import epath

from orbax_safetensors.errors import IndexFileError, storage_errors
from orbax_safetensors.orbax_store._compat import PROCESS_SUBDIR_PREFIX
from orbax_safetensors.orbax_store.directories import absolute, kvstore, size
from orbax_safetensors.orbax_store.ocdbt import MANIFEST, DataReference

# Where a value lies, as `ts.ocdbt.dump` writes it: both parts of the path as in a URL, offset and length. The first
# part is the directory of another database that this one was merged from, if it was.
_LOCATION = re.compile(r"value:([^:]*):(.*):(\d+):(\d+)", re.DOTALL)

# Files that TensorStore has written: of this database, of arrays that a link made, and of each process of Orbax.
_DATA = re.compile(rf"((made|{re.escape(PROCESS_SUBDIR_PREFIX)}[^/]*)/)*d/[^/]*", re.DOTALL)

# What the key of a chunk ends in after the name of its array: in version 3 of Zarr, or in version 2.
_CHUNK = re.compile(r"(^|/)(c(/\d+)*|\d+(\.\d+)*)$")


class TensorRange(NamedTuple):
    """The bytes of a tensor in its file, `[begin, end)`."""

    begin: int
    end: int
    name: str


def index_faults(
    directory: str, tensors: Mapping[str, Sequence[TensorRange]], *, names_tensors: bool
) -> list[IndexFileError]:
    """Return the faults of the index in a directory, whose files have these `tensors` by file name.

    Every chunk has to be in one tensor of these files, that of its array's name if `names_tensors`, or in a file that
    Orbax or TensorStore has written and that is long enough, and no two of an array may share a byte of a tensor.
    Raises `StorageError` if the index cannot be read.
    """
    chunks = defaultdict(list)  # of each file
    needed: dict[str, int] = defaultdict(int)  # bytes of the files that TensorStore has written
    faults, where = [], f"{directory}/{MANIFEST}"
    for key, range_ in _ranges(directory):
        if range_.file in tensors:
            chunks[range_.file].append((range_.offset, range_.offset + range_.length, key))
        elif not _DATA.fullmatch(range_.file):
            faults.append(IndexFileError(f"{where}: {key!r}: lies in {range_.file!r}, which holds no arrays"))
        else:
            needed[range_.file] = max(needed[range_.file], range_.offset + range_.length)
    for file, nbytes in needed.items():
        stored_nbytes = size(epath.Path(directory) / file)
        if stored_nbytes is None or stored_nbytes < nbytes:
            found = "no such file" if stored_nbytes is None else f"{stored_nbytes}"
            faults.append(IndexFileError(f"{directory}/{file}: expected at least {nbytes} bytes, found {found}"))
    for file, ranges in chunks.items():
        extents = sorted(tensors[file])
        begins = [extent.begin for extent in extents]
        last: dict[str, tuple[int, str]] = {}  # of each array: several may be made of one tensor
        for begin, end, key in sorted(ranges):
            at, array = bisect_right(begins, begin) - 1, _CHUNK.sub("", key)
            before = last.get(array, (0, ""))
            if at < 0 or end > extents[at].end:
                faults.append(IndexFileError(f"{where}: {key!r}: bytes {begin} to {end} of {file} are of no tensor"))
            elif names_tensors and extents[at].name and not key.startswith(f"{extents[at].name}/"):
                faults.append(IndexFileError(f"{where}: {key!r}: lies in the tensor {extents[at].name!r} of {file}"))
            elif begin < before[0]:
                faults.append(IndexFileError(f"{where}: {key!r} and {before[1]!r} share bytes of {file}"))
            last[array] = max(before, (end, key))
    return faults


def _ranges(directory: str) -> Iterator[tuple[str, DataReference]]:
    """Yield the values of the database that are ranges of files, with their keys."""
    where = f"{directory}/{MANIFEST}"
    with storage_errors(where):
        base = kvstore(absolute(directory), ts.Context())
        versions = ts.ocdbt.dump(base).result()["versions"]
        nodes = [max(versions, key=lambda version: version["generation_number"])["root"]["location"]]
        while nodes:
            entries: list[dict[str, Any]] = ts.ocdbt.dump(base, nodes.pop()).result()["entries"]
            for entry in entries:
                if "location" in entry:
                    nodes.append(entry["location"])
                elif location := _LOCATION.fullmatch(entry.get("indirect_value", "")):
                    file = os.fsdecode(unquote_to_bytes(location[1] + location[2]))
                    yield (
                        entry["key"].decode(errors="surrogateescape"),
                        DataReference(file, int(location[3]), int(location[4])),
                    )
