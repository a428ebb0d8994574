"""`plan_save`: what a save costs every process, counted before any byte moves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.devices.sharding import device_owners, num_processes
from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.format.layout import MAX_FILE_BYTES, Layout
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.save.contents import contents_of
from orbax_safetensors.save.copied import StoredArray
from orbax_safetensors.save.request import Rest, SaveRequest
from orbax_safetensors.save.writers import files_by_writer, grouped, holders_of, written_by
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.process_memory import no_collection
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.upload import num_parts
from orbax_safetensors.transfer.figures import looked_at
from orbax_safetensors.transfer.plan import Block, locations, transfer_plan


@dataclass(frozen=True)
class FileWrites:
    """What one process writes into one file."""

    file: str
    written_bytes: int
    num_requests: int


@dataclass(frozen=True)
class PlannedFile:
    """The name and the size of a file to write, and the bytes of its tensors."""

    file: str
    nbytes: int
    data_bytes: int


@dataclass(frozen=True)
class ProcessWrites:
    """What a save costs one process, by its number, in total and for each file that it writes into."""

    process: int
    written_bytes: int
    num_requests: int
    files: tuple[FileWrites, ...]


@dataclass(frozen=True)
class SavePlan:
    """What a save will cost, without headers, config and index, which the first process adds at the end.

    Printed, a plan has its main figures in a few lines.

    ```python
    plan = ost.plan_save("/models/new", ost.load("/models/llama"), max_file_bytes=50_000)
    print(plan)
    print([(file.file, file.nbytes) for file in plan.files])
    ```

    On an object store, the header is in the first of the parts of each file. Of `process_count` processes, `processes`
    has those that the plan looks at.
    """

    files: tuple[PlannedFile, ...]
    process_count: int
    processes: tuple[ProcessWrites, ...]

    def __str__(self) -> str:
        most = max(self.processes, key=lambda cost: cost.written_bytes)
        return (
            f"save of {human_bytes(sum(file.nbytes for file in self.files))}: files {len(self.files):,}, processes "
            f"{self.process_count:,}\nprocess {most.process} writes most: {human_bytes(most.written_bytes)}, requests "
            f"{most.num_requests:,}, files {len(most.files):,}"
        )

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
    rest: Rest = "copy",
    dtype: DTypeLike | Mapping[str, DTypeLike] | None = None,
    process_count: int | None = None,
    all_processes: bool = False,
    options: SafetensorsOptions | None = None,
) -> SavePlan:
    """Return what saving `item` to `path` will cost processes; writes nothing and needs no devices.

    ```python
    mesh = jax.sharding.AbstractMesh((8,), ("model",))
    embedding = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("model")))
    plan = ost.plan_save("/models/new", {"embed": embedding}, process_count=2)
    print([cost.written_bytes for cost in plan.processes])
    ```

    If `path` is on an object store, each file has one writer, which uploads it in parts, one for each request;
    otherwise processes write into shared files. The figures are those of arrays on CPU devices. A save from
    accelerators goes in batches, and joins no requests across batches.

    Args:
      path: the destination of the save, which need not exist; the plan does not look at what is there.
      item: a tree of `jax.ShapeDtypeStruct` with shardings, whose meshes may be abstract, or of what
        `SafetensorsSave` takes.
      save_args, metadata, max_file_bytes, family, variant, config, like, rest, dtype: as for `SafetensorsSave`.
      process_count: how many processes share the devices of each mesh, evenly and in order. By default each device
        belongs to its actual process, and all devices of an abstract mesh belong to one.
      all_processes: look at all processes; see `plan_restore`.
      options: the options of the save.

    Raises:
      TensorMismatchError, MappingError, HeaderError: the tree cannot be stored, or processes cannot share the devices
        evenly.
      StorageError: there is no store for `path`, or `like` cannot be opened.
    """
    options = SafetensorsOptions.of(options)
    request = SaveRequest(
        path,
        item,
        save_args=save_args,
        metadata=metadata,
        max_file_bytes=max_file_bytes,
        family=family,
        variant=variant,
        config=config,
        like=like,
        rest=rest,
        dtype=dtype,
        options=options,
    )
    with no_collection():
        contents = contents_of(request, abstract=True)
        leaves = contents.written
        count = num_processes([getattr(leaf.value, "sharding", None) for leaf in leaves], process_count)
        planned = looked_at(count, everyone=all_processes)
        store, _ = store_of(path, options.storage_options)
        if store.writes and not store.is_local:
            layout, writers = files_by_writer(
                contents, request, count, lambda leaf: _processes(leaf, count, process_count)
            )
            processes = _to_objects(layout, writers, planned)
        else:
            layout = contents.layout(request.max_file_bytes, options.alignment)
            processes = _to_shared_files(leaves, layout, count, process_count, planned)
        files = tuple(PlannedFile(name, header.file_bytes, header.data_bytes) for name, header in layout.files)
        return SavePlan(files, count, processes)


def _processes(leaf: Leaf, process_count: int, dealt: int | None) -> Iterable[int]:
    """Return the processes that hold some of a leaf."""
    if isinstance(leaf.value, np.ndarray | StoredArray):
        return range(process_count)
    if leaf.value.sharding is None:
        return (0,)
    return device_owners(leaf.value.sharding, leaf.shape, dealt)


def _to_shared_files(
    leaves: Sequence[Leaf], layout: Layout, process_count: int, dealt: int | None, planned: Sequence[int]
) -> tuple[ProcessWrites, ...]:
    """Return the cost of writing the boxes of `planned` processes into the files of `layout`."""
    groups, everyone = grouped(leaves), tuple(range(process_count))
    tensor_locations = locations(layout)

    def writes(process: int) -> ProcessWrites:
        blocks = [
            Block(leaf.view, box, box.shape, np.dtype(leaf.value.dtype))
            for group in written_by(process, groups, lambda leaf: holders_of(leaf, everyone, process, dealt))
            for leaf, boxes in group
            for box in boxes
        ]
        # Gaps are never written: their bytes belong to other processes.
        plan = transfer_plan(blocks, tensor_locations.__getitem__, max_gap_bytes=0)
        files = [FileWrites(layout.files[file.number][0], file.moved_bytes, file.num_requests) for file in plan.files]
        return ProcessWrites(process, plan.moved_bytes, plan.num_requests, tuple(files))

    return tuple(map(writes, planned))


def _to_objects(layout: Layout, writers: Sequence[int], planned: Sequence[int]) -> tuple[ProcessWrites, ...]:
    """Return the cost of writing whole files, each by its writer, in parts."""
    out = []
    for process in planned:
        files = [
            FileWrites(name, header.data_bytes, num_parts(header.file_bytes))
            for (name, header), writer in zip(layout.files, writers, strict=True)
            if writer == process
        ]
        nbytes, requests = sum(file.written_bytes for file in files), sum(file.num_requests for file in files)
        out.append(ProcessWrites(process, nbytes, requests, tuple(files)))
    return tuple(out)
