"""A save that is only counted: what each process would write where. No arrays and no devices are needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import jax

from orbax_safetensors.checkpoint.family import AskedFamily, Tensors, taken_apart
from orbax_safetensors.checkpoint.source import Source
from orbax_safetensors.cost.counter import Boxes, Count, Counter, ShardedLeaf
from orbax_safetensors.cost.figures import FileWrites, PlannedFile
from orbax_safetensors.format.header import Header
from orbax_safetensors.format.layout import MAX_FILE_BYTES, file_names
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.view import View
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.save import prepare as saving
from orbax_safetensors.save.pieces import own_files
from orbax_safetensors.storage.store import Store
from orbax_safetensors.storage.upload import num_parts
from orbax_safetensors.transfer.plan import locations


@dataclass(frozen=True)
class ProcessWrites:
    """What a save costs one process, in all and for each file that it writes into."""

    written_bytes: int
    num_requests: int
    files: tuple[FileWrites, ...]


@dataclass(frozen=True)
class SavePlan:
    """What a save will cost. Headers, config and index, which the first process adds at the end, are not counted.

    On an object store, headers are in the first of the parts that requests carry.
    """

    files: tuple[PlannedFile, ...]
    processes: tuple[ProcessWrites, ...]

    def to_json(self) -> str:
        """The plan as a JSON object with the names of the attributes."""
        return json.dumps(asdict(self))


def plan_save(
    leaves: Sequence[ShardedLeaf],
    store: Store,
    config: Mapping[str, Any],
    family: AskedFamily,
    variant: Mapping[str, Any] | None,
    *,
    process_count: int,
    options: SafetensorsOptions,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> SavePlan:
    """Count what saving a tree costs each of its processes.

    `leaves` say which boxes of which arrays each process holds; their views are not looked at. `config` is the content
    of the model's `config.json`. If `store` is an object store that can be written to, the files go there as objects;
    otherwise they are files. Figures are those of arrays on CPU devices; from accelerators leaves come in batches,
    between which requests are not joined. Raises what `SafetensorsSave` raises of a tree that cannot be stored.
    """
    sources = [
        Source(
            leaf.name,
            cast(Any, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)),
            leaf.dtype,
            View.tensor(leaf.name, leaf.shape, leaf.dtype),
        )
        for leaf in leaves
    ]
    sources, tensors = taken_apart(sources, family, variant, config)
    layout = saving.laid_out(tensors, {}, max_file_bytes, options)
    holders = _Holders(leaves)
    dealt = saving.deal(saving.grouped(sources), holders.of)
    if store.whole and store.writes:
        if process_count == 1:
            return _of_objects([layout.files])
        return _of_objects(_own_files(dealt, tensors, max_file_bytes, options.alignment, process_count))
    boxes: dict[tuple[tuple[Box, ...], ...], list[tuple[Box, ...]]] = {}  # leaves dealt alike share a list
    owned = []
    for group in dealt:
        for source, writers in group:
            own: list[list[Box]] = [[] for _ in range(process_count)]
            for box, writer in writers.items():
                own[writer].append(box)
            given = tuple(map(tuple, own))
            shared = boxes.setdefault(given, list(given))
            owned.append(ShardedLeaf(source.name, source.view, source.shape, source.value.dtype, shared))
    # What lies in a gap is another process's.
    counter = Counter(owned, locations(layout).__getitem__, len(layout.files), max_gap_bytes=0)
    files = [PlannedFile(name, header.file_bytes) for name, header in layout.files]
    costs: dict[Boxes, ProcessWrites] = {}
    processes = []
    for process in range(process_count):
        if (written := counter.moved(process)) not in costs:
            costs[written] = _process_writes(counter.count(written), files)
        processes.append(costs[written])
    return SavePlan(tuple(files), tuple(processes))


def _process_writes(count: Count, files: Sequence[PlannedFile]) -> ProcessWrites:
    return ProcessWrites(
        int(count.moved_bytes.sum()),
        int(count.num_requests.sum()),
        tuple(FileWrites(files[number].file, moved, requests) for number, _, moved, requests in count.files()),
    )


def _own_files(
    dealt: Iterable[Sequence[tuple[Source, Mapping[Box, int]]]],
    tensors: Tensors,
    max_file_bytes: int,
    alignment: int,
    process_count: int,
) -> list[list[tuple[str, Header]]]:
    """The files of each process, where each file has one writer."""
    owned: list[list[tuple[Source, tuple[Box, ...]]]] = [[] for _ in range(process_count)]
    for source, writers in (one for group in dealt for one in group):
        boxes: dict[int, list[Box]] = {}
        for box, writer in writers.items():
            boxes.setdefault(writer, []).append(box)
        for writer, own in boxes.items():
            owned[writer].append((source, tuple(own)))
    headers = [
        own_files(
            own,
            tensors,
            saving.METADATA,
            max_file_bytes=max_file_bytes,
            alignment=alignment,
            process=process,
        )[0]
        for process, own in enumerate(owned)
    ]
    names = iter(file_names(sum(map(len, headers))))
    return [[(next(names), header) for header in own] for own in headers]


def _of_objects(files: Sequence[Sequence[tuple[str, Header]]]) -> SavePlan:
    """What it costs each process to write whole files of its own, in parts."""
    writes = [
        tuple(FileWrites(name, header.data_bytes, num_parts(header.file_bytes)) for name, header in own)
        for own in files
    ]
    return SavePlan(
        tuple(PlannedFile(name, header.file_bytes) for own in files for name, header in own),
        tuple(
            ProcessWrites(sum(file.written_bytes for file in own), sum(file.num_requests for file in own), own)
            for own in writes
        ),
    )


class _Holders:
    """The processes that hold each box of a leaf."""

    def __init__(self, leaves: Sequence[ShardedLeaf]) -> None:
        self._boxes = {leaf.name: leaf.boxes for leaf in leaves}
        self._known: dict[int, dict[Box, tuple[int, ...]]] = {}

    def of(self, source: Source) -> Mapping[Box, tuple[int, ...]]:
        """For each distinct box, in order, all processes that have it; as `arrays.local_holders`, but of everyone."""
        boxes = self._boxes[source.name]
        if id(boxes) not in self._known:
            holders: dict[Box, list[int]] = {}
            for process, own in enumerate(boxes):
                for box in dict.fromkeys(own):
                    holders.setdefault(box, []).append(process)
            self._known[id(boxes)] = {box: tuple(holders[box]) for box in sorted(holders)}
        return self._known[id(boxes)]
