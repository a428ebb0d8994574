"""`plan_save`: what a save costs every process, counted before any byte moves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.cost.counter import Count, Counter, ShardedLeaf
from orbax_safetensors.cost.figures import FileWrites, PlannedFile
from orbax_safetensors.devices.sharding import by_process, holders, num_processes
from orbax_safetensors.format.header import Header
from orbax_safetensors.format.layout import MAX_FILE_BYTES, Layout, file_names
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.save.contents import contents_of
from orbax_safetensors.save.pieces import files_of_process
from orbax_safetensors.save.whole import assign_files
from orbax_safetensors.save.writers import assign_writers, grouped
from orbax_safetensors.storage.memory import no_collection
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.upload import num_parts
from orbax_safetensors.transfer.plan import locations


@dataclass(frozen=True)
class ProcessWrites:
    """What a save costs one process, in total and for each file that it writes into."""

    written_bytes: int
    num_requests: int
    files: tuple[FileWrites, ...]


@dataclass(frozen=True)
class SavePlan:
    """What a save will cost, without headers, config and index, which the first process adds at the end.

    On an object store, the header is in the first of the parts of each file.
    """

    files: tuple[PlannedFile, ...]
    processes: tuple[ProcessWrites, ...]

    def to_json(self) -> str:
        """Return the plan as a JSON object with the names of the attributes."""
        return json.dumps(asdict(self))


def plan_save(
    path: PathLike,
    item: Any,
    *,
    save_args: Any = None,
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    family: FamilyLike = None,
    variant: Mapping[str, Any] | None = None,
    config: Any = None,
    like: PathLike | None = None,
    process_count: int | None = None,
    options: SafetensorsOptions | None = None,
) -> SavePlan:
    """Return what saving `item` to `path` will cost each process; writes nothing and needs no devices.

    If `path` is on an object store, each file has one writer, which uploads it in parts, one for each request;
    otherwise processes write into shared files. The figures are those of arrays on CPU devices. A save from
    accelerators goes in batches, and joins no requests across batches.

    Args:
      path: the destination of the save, which need not exist; the plan does not look at what is there.
      item: a tree of `jax.ShapeDtypeStruct` with shardings, whose meshes may be abstract, or of what
        `SafetensorsSave` takes.
      save_args, metadata, max_file_bytes, family, variant, config, like: as for `SafetensorsSave`.
      process_count: how many processes share the devices of each mesh, evenly and in order. By default each device
        belongs to its actual process, and all devices of an abstract mesh belong to one.
      options: the options of the save.

    Raises:
      TensorMismatchError, MappingError, HeaderError: the tree cannot be stored, or processes cannot share the devices
        evenly.
      StorageError: there is no store for `path`, or `like` cannot be opened.
    """
    options = options or SafetensorsOptions()
    with no_collection():
        contents = contents_of(
            path,
            item,
            save_args,
            metadata=metadata,
            max_file_bytes=max_file_bytes,
            family=family,
            variant=variant,
            config=config,
            like=like,
            options=options,
            abstract=True,
        )
        leaves = contents.leaves
        shardings = [getattr(leaf.value, "sharding", None) for leaf in leaves]
        count = num_processes(shardings, process_count)
        layout = contents.layout(max_file_bytes, options.alignment)

        def held(leaf: Leaf) -> Mapping[Box, tuple[int, ...]]:
            if isinstance(leaf.value, np.ndarray):
                return {Box.whole(leaf.shape): tuple(range(count))}
            if leaf.value.sharding is None:  # JAX's default device
                return {Box.whole(leaf.shape): (0,)}
            return holders(leaf.value.sharding, leaf.shape, process_count)

        written = [
            (leaf, by_process(list(writers), list(writers.values()), count))
            for group in assign_writers(grouped(leaves), held)
            for leaf, writers in group
        ]
        store, _ = store_of(path, options.storage_options)
        if store.is_local or not store.writes:
            return _to_shared_files(written, layout, count)
        if count == 1 or contents.is_adapter or options.whole_tensors:
            layout = contents.layout(max_file_bytes, options.alignment, writers=count)
            files: list[list[tuple[str, Header]]] = [[] for _ in range(count)]
            for file, owner in zip(layout.files, assign_files(layout, count), strict=True):
                files[owner].append(file)
            return _to_objects(files)
        headers = [
            files_of_process(
                [(leaf, boxes[process]) for leaf, boxes in written if boxes[process]],
                contents.tensors,
                contents.metadata,
                max_file_bytes=max_file_bytes,
                alignment=options.alignment,
                process=process,
            )[0]
            for process in range(count)
        ]
        names = iter(file_names(sum(map(len, headers))))
        return _to_objects([[(next(names), header) for header in of_process] for of_process in headers])


def _to_shared_files(
    written: Sequence[tuple[Leaf, list[tuple[Box, ...]]]], layout: Layout, process_count: int
) -> SavePlan:
    """Return the cost of writing boxes of leaves, given for every process, into the files of `layout`."""
    shared: dict[tuple[tuple[Box, ...], ...], list[tuple[Box, ...]]] = {}  # leaves that are cut alike share a list
    sharded = [
        ShardedLeaf(leaf.name, leaf.view, leaf.shape, leaf.value.dtype, shared.setdefault(tuple(boxes), boxes))
        for leaf, boxes in written
    ]
    # Gaps are never written: their bytes belong to other processes.
    counter = Counter(sharded, locations(layout).__getitem__, len(layout.files), max_gap_bytes=0)
    files = [PlannedFile(name, header.file_bytes) for name, header in layout.files]
    return SavePlan(tuple(files), tuple(_process_writes(count, files) for count in counter.counts(process_count)))


def _process_writes(count: Count, files: Sequence[PlannedFile]) -> ProcessWrites:
    return ProcessWrites(
        int(count.moved_bytes.sum()),
        int(count.num_requests.sum()),
        tuple(FileWrites(files[number].file, moved, requests) for number, _, moved, requests in count.files()),
    )


def _to_objects(files: Sequence[Sequence[tuple[str, Header]]]) -> SavePlan:
    """Return the cost of writing whole files, given for every process, in parts."""
    planned = tuple(PlannedFile(name, header.file_bytes) for of_process in files for name, header in of_process)
    processes = []
    for of_process in files:
        writes = [FileWrites(name, header.data_bytes, num_parts(header.file_bytes)) for name, header in of_process]
        nbytes, requests = sum(file.written_bytes for file in writes), sum(file.num_requests for file in writes)
        processes.append(ProcessWrites(nbytes, requests, tuple(writes)))
    return SavePlan(planned, tuple(processes))
