"""Whether the addresses of an index lie in the tensors of the files that they are of."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorstore as ts

from orbax_safetensors.errors import IndexFileError
from orbax_safetensors.orbax_store.flow import stored
from orbax_safetensors.orbax_store.ocdbt import MANIFEST, Range
from orbax_safetensors.orbax_store.places import absolute, kvstore

# As `ts.ocdbt.dump` writes where a value lies. A path may have colons.
_LOCATION = re.compile(r"value::(.*):(\d+):(\d+)", re.DOTALL)


class Extent(NamedTuple):
    """The bytes of a tensor in its file, `[begin, end)`."""

    begin: int
    end: int
    name: str


def index_faults(directory: str, tensors: Mapping[str, Sequence[Extent]]) -> list[IndexFileError]:
    """What is wrong with the index in a directory, whose files have these `tensors` by file name.

    Every chunk that lies in one of the files has to be in one tensor, and no two may share a byte. Raises
    `StorageError` if the index cannot be read.
    """
    of_files = defaultdict(list)
    for key, range_ in _ranges(directory):
        if range_.file in tensors:
            of_files[range_.file].append((range_.offset, range_.offset + range_.length, key))
    faults, where = [], f"{directory}/{MANIFEST}"
    for file, ranges in of_files.items():
        extents = sorted(tensors[file])
        begins = [extent.begin for extent in extents]
        last = (0, "")
        for begin, end, key in sorted(ranges):
            at = bisect_right(begins, begin) - 1
            if at < 0 or end > extents[at].end:
                faults.append(IndexFileError(f"{where}: {key!r}: bytes {begin} to {end} of {file} are of no tensor"))
            elif begin < last[0]:
                faults.append(IndexFileError(f"{where}: {key!r} and {last[1]!r} share bytes of {file}"))
            last = max(last, (end, key))
    return faults


def _ranges(directory: str) -> Iterator[tuple[str, Range]]:
    """The values of the database that are ranges of files, with their keys."""
    where = f"{directory}/{MANIFEST}"
    with stored(where):
        base = kvstore(absolute(directory), ts.Context())
        versions = ts.ocdbt.dump(base).result()["versions"]
        nodes = [max(versions, key=lambda version: version["generation_number"])["root"]["location"]]
        while nodes:
            entries: list[dict[str, Any]] = ts.ocdbt.dump(base, nodes.pop()).result()["entries"]
            for entry in entries:
                if "location" in entry:
                    nodes.append(entry["location"])
                elif found := _LOCATION.fullmatch(entry.get("indirect_value", "")):
                    yield entry["key"].decode(errors="backslashreplace"), Range(found[1], int(found[2]), int(found[3]))
