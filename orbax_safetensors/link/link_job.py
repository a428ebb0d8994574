"""The job of a link: `prepare` decides, from headers alone, which leaves become addresses and which have to be made.

`LinkJob.plan` says what that makes; `LinkJob.run` makes it.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.family import mapped
from orbax_safetensors.checkpoint.header_texts import write_header_record
from orbax_safetensors.checkpoint.model_files import files_of_model
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.agreement import new_key, together
from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.format.digest import digest_of
from orbax_safetensors.format.index import INDEX_SUFFIX
from orbax_safetensors.geometry.view import View
from orbax_safetensors.link.link_request import LinkRequest
from orbax_safetensors.link.staging import MADE, ObjectStaging, Staging, staging_of
from orbax_safetensors.mapping.family import Envelope
from orbax_safetensors.options import Progress
from orbax_safetensors.orbax_store import OrbaxItem, OrbaxLeaf, sharded_leaf
from orbax_safetensors.orbax_store.addressed_array import (
    AddressedArray,
    addressed_array,
    array_entries,
    misread,
    scalar_entries,
)
from orbax_safetensors.orbax_store.directories import is_on_gcs
from orbax_safetensors.orbax_store.index_note import NOTE_FILE, note_content
from orbax_safetensors.orbax_store.leaf import SCALAR
from orbax_safetensors.orbax_store.metadata import HANDLER, item_files, record_in_step, step_files
from orbax_safetensors.orbax_store.ocdbt import Entry, merge, write_references
from orbax_safetensors.orbax_store.restore_plan import OrbaxRestorePlan, plan_arrays
from orbax_safetensors.storage.process_memory import peak_bytes
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.streaming.cutting import interleaved
from orbax_safetensors.streaming.orbax_sink import orbax_sink
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from orbax_safetensors.streaming.tile_job import TileJob
from orbax_safetensors.transfer.progress import passing

logger = logging.getLogger(__name__)

# A Python integer, as Orbax stores it.
_SCALAR = OrbaxLeaf((), np.dtype(np.int64), (), SCALAR)

# The job that makes arrays, and these arrays.
Making = tuple[TileJob, Mapping[str, OrbaxLeaf]]


@dataclass(frozen=True)
class Link:
    """The result of `link`.

    ```python
    done = ost.link("/models/qwen3", "/models/linked", family="maxtext")
    print(f"{done.path}: {done.linked_bytes:,} bytes stay where they are, {done.made_bytes:,} were written")
    ```

    Attributes:
      path: the directory that is now a checkpoint of Orbax.
      linked_bytes: bytes of arrays that stay in their files.
      made_bytes: bytes of arrays that had to be written, by all processes.
      num_arrays, num_chunks: the content of the index.
      seconds: how long it took.
      peak_bytes: the most memory that this process had since it began.
      family, variant: the family of the tree, by name, and its switches; None and {} without a family.
    """

    path: str
    linked_bytes: int
    made_bytes: int
    num_arrays: int
    num_chunks: int
    seconds: float
    peak_bytes: int
    family: str | None
    variant: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as a dict."""
        return asdict(self)


@dataclass(frozen=True)
class LinkedArray:
    """An array of the checkpoint that a link makes.

    Attributes:
      name: the name by which `spec` finds the array.
      num_chunks: stored chunks; chunks of padding are not stored.
      made: the reason if the array has to be made, None if it stays where it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    num_chunks: int
    nbytes: int
    made: str | None


@dataclass(frozen=True)
class LinkPlan:
    """What `link` will make.

    ```python
    plan = ost.plan_link("/models/qwen3", "/models/linked", family="maxtext")
    print([(array.name, array.made) for array in plan.arrays if array.made is not None])
    ```

    Attributes:
      path: the directory.
      arrays: all arrays, in the order of the tree.
      metadata_bytes: bytes of the index: addresses, and Orbax's metadata of all arrays.
      restore: the reads of stock Orbax for a restore on the mesh, None without a mesh. Chunks are read whole.
    """

    path: str
    arrays: tuple[LinkedArray, ...]
    metadata_bytes: int
    restore: OrbaxRestorePlan | None

    @property
    def linked_bytes(self) -> int:
        """Bytes of the arrays that stay where they are."""
        return sum(array.nbytes for array in self.arrays if array.made is None)

    @property
    def made_bytes(self) -> int:
        """Bytes of the arrays that have to be made."""
        return sum(array.nbytes for array in self.arrays if array.made is not None)

    @property
    def num_chunks(self) -> int:
        """Chunks of all arrays."""
        return sum(array.num_chunks for array in self.arrays)

    def to_json(self) -> str:
        """Return the plan as a JSON object with the names of the attributes."""
        return json.dumps(
            {
                "path": self.path,
                "linked_bytes": self.linked_bytes,
                "made_bytes": self.made_bytes,
                "metadata_bytes": self.metadata_bytes,
                "num_chunks": self.num_chunks,
                "arrays": [asdict(array) for array in self.arrays],
                "restore": None if self.restore is None else json.loads(self.restore.to_json()),
            }
        )


@dataclass(frozen=True)
class LinkJob:
    """A link: its content, decided. Names are those of the new checkpoint.

    Attributes:
      linked: leaves that become addresses.
      reasons: leaves that have to be made, and the reason for each.
    """

    checkpoint: Checkpoint
    linked: Mapping[str, AddressedArray]
    reasons: Mapping[str, str]
    sharded: Mapping[str, OrbaxLeaf]  # all leaves, with their shards as chunks
    request: LinkRequest

    @property
    def envelope(self) -> Envelope:
        """The tree around the model's."""
        return self.checkpoint.envelope

    @cached_property
    def digest(self) -> str:
        """A digest that is equal for links of the same files into the same index."""
        stamps = [(file.path, file.stamp) for file in self.checkpoint.files]
        # The result of a family: its repr has the addresses of its functions, which differ between processes.
        mapped = None if self.checkpoint.mapped is None else sorted(self.checkpoint.mapped.items())
        return digest_of((stamps, mapped, self.request.facts))

    def plan(self, process_count: int) -> LinkPlan:
        """Return what `run` would make, and what a restore by `process_count` processes would read; write nothing."""
        staging = staging_of(self.request)
        staging.check_place()
        made: Mapping[str, OrbaxLeaf] = {}
        if (making := self._making(staging.path)) is not None:
            job, made = making
            job.source.close()
        above = self.envelope.above
        leaves = {name: self.linked[name].leaf if name in self.linked else made[name] for name in self.sharded}
        nbytes = write_references(self._entries(), lambda *_: None)
        nbytes += sum(map(len, item_files(self._tree(made), whole=self._whole).values()))
        arrays = tuple(
            LinkedArray(
                name.removeprefix(above),
                leaf.dtype.name,
                leaf.shape,
                leaf.chunk_shape,
                self._num_chunks(name, leaf),
                _nbytes(leaf),
                self.reasons.get(name),
            )
            for name, leaf in leaves.items()
        )
        restore = None
        if self.request.mesh is not None or self.request.like is not None:
            restored = {name.removeprefix(above): leaf for name, leaf in leaves.items()}
            file_bytes = sum(file.stamp.nbytes for file in self.checkpoint.files)
            restore = plan_arrays(restored, self.request.partition, process_count, file_bytes)
        return LinkPlan(self.request.destination, arrays, nbytes, restore)

    def run(self, *, resume: bool, progress: Progress | None) -> Link:
        """Make the link, together with all other processes; raises in every process if one fails."""
        started = time.perf_counter()
        key, active = new_key("link"), ActiveProcesses.all()
        staging = staging_of(self.request, self.digest)

        def begun() -> Making | None:
            making = self._making(staging.path)  # first, as it raises if memory does not suffice
            if active.is_primary:
                staging.begin(resume=resume)
            return making

        made: Mapping[str, OrbaxLeaf] = {}
        try:
            if (making := together(f"{key}/begin", begun)) is not None:
                job, made = making
                with closing(job.source):
                    if not together(f"{key}/made", staging.has_made, str):  # an earlier run may have made them
                        with passing(progress) as report:
                            job.run(resume=resume, progress=report)
            together(f"{key}/write", active.by_primary(partial(self._write, staging, made)))
        finally:
            staging.release()
        return Link(
            staging.destination,
            sum(_nbytes(array.leaf) for array in self.linked.values()),
            sum(map(_nbytes, made.values())),
            len(self.linked) + len(made),
            sum(self._num_chunks(name, made.get(name)) for name in self.sharded),
            time.perf_counter() - started,
            peak_bytes(),
            **self.checkpoint.use.record(),
        )

    def _write(self, staging: Staging | ObjectStaging, made: Mapping[str, OrbaxLeaf]) -> None:
        """Write the index, and give the link its place."""
        write_references(self._entries(), staging.write)
        if made:
            merge([staging.made], staging.path)
            staging.keep_data()
        checkpoint, request = self.checkpoint, self.request
        small = item_files(self._tree(made), whole=self._whole)
        linked = checkpoint.use.record()
        staging.write(NOTE_FILE, note_content(checkpoint.fingerprints, checkpoint.mapped is None, small, linked=linked))
        for name, content in {**step_files(self.envelope.custom_metadata), **small}.items():
            staging.write(name, content)
        if isinstance(staging, Staging) and not request.in_source:
            staging.link_files([*(file.path for file in checkpoint.files), *_model_files(request)])
        write_header_record(checkpoint.store, checkpoint.directory, checkpoint.fingerprints)
        for file in checkpoint.files:
            with closing(checkpoint.store.open(file.path)) as opened:
                opened.check(file.stamp)  # raises if the file has changed since its header was read
        staging.finish()
        record_in_step(staging.destination, HANDLER, self.envelope.custom_metadata, new=request.new_step)
        logger.info(
            "Linked %s: %d arrays are addresses, %d were made", staging.destination, len(self.linked), len(made)
        )

    def _making(self, directory: str) -> Making | None:
        """Return the job that makes the leaves that are not addresses, in `directory`, and the arrays that it makes.

        The caller closes the job's source. Returns None if there are no such leaves. Raises `SafetensorsError` if
        memory does not suffice.
        """
        if not self.reasons:
            return None
        views = {name: self.checkpoint.leaves[name.removeprefix(self.envelope.above)] for name in self.reasons}
        source = SafetensorsSource(self.checkpoint, views, {}, self.request.memory_bytes, "auto")
        sink = orbax_sink(
            source,
            os.path.join(directory, MADE),
            {"": OrbaxItem({name: self.sharded[name] for name in views})},
            {name: ("", name.removeprefix(self.envelope.above)) for name in views},
            interleaved(views),
            memory_bytes=self.request.memory_bytes,
            chunk_bytes=self.request.chunk_bytes,
            compression=False,
        )
        return TileJob(source, sink), sink.workspace.leaves

    def _tree(self, made: Mapping[str, OrbaxLeaf]) -> Any:
        """Return the checkpoint's tree of `OrbaxLeaf`; `made` has the leaves that had to be made."""

        def leaf(name: str, _: View) -> OrbaxLeaf:
            name = self.envelope.above + name
            return self.linked[name].leaf if name in self.linked else made[name]

        rest = {key: _SCALAR if isinstance(value, int) else value for key, value in self.envelope.rest.items()}
        return replace(self.envelope, rest=rest).around(self.checkpoint.tree(leaf))

    def _entries(self) -> Iterator[Entry]:
        """Yield the entries of the index, without the leaves that have to be made."""
        for name, array in self.linked.items():
            yield from array_entries(name, array, self._locate)
        for name, value in self.envelope.rest.items():
            if isinstance(value, int):
                yield from scalar_entries(name, np.asarray(value, np.int64))

    def _num_chunks(self, name: str, made: OrbaxLeaf | None) -> int:
        """Return the number of stored chunks of an array, which is in `linked` or was `made`."""
        if name in self.linked:
            return self.linked[name].chunks.count
        assert made is not None
        return prod(made.grid)

    @property
    def _whole(self) -> bool:
        """Whether all chunks of all arrays will be stored; chunks of padding are not."""
        return all(array.is_whole for array in self.linked.values())

    def _locate(self, tensor: str) -> tuple[str, int]:
        location = self.checkpoint.location(tensor)
        return os.path.basename(self.checkpoint.files[location.file].path), location.begin


def prepare(request: LinkRequest) -> LinkJob:
    """Read all headers and decide on every leaf.

    Raises the errors of `convert` for a source, a family or a spec, and `StorageError` for files that are not local.
    """
    checkpoint = read_checkpoint(request.source)
    if is_on_gcs(request.source) and checkpoint.files[0].path == request.source:
        raise StorageError(f"{request.source}: is one object; on gs://, pass the directory with it")
    if not checkpoint.tensors:
        raise TensorMismatchError(f"{request.source}: holds no tensors")
    checkpoint = mapped(checkpoint, request.family, request.variant, complete=True, dequantize=True)
    partition = request.partition
    partition.check((name, view.shape) for name, view in checkpoint.leaves.items())
    addressed, reasons, sharded = {}, {}, {}
    for leaf, view in checkpoint.leaves.items():
        name = checkpoint.envelope.above + leaf
        sharded[name] = sharded_leaf(partition, leaf, view.shape, view.dtype)
        if reason := misread(name, view.shape):
            raise TensorMismatchError(f"{request.source}: {name!r:.200}: {reason}")
        quantized = checkpoint.quantized.keys() & view.tensors
        addresses = "it has to be decoded" if quantized else addressed_array(view, sharded[name], request.chunk_bytes)
        if isinstance(addresses, str):
            reasons[name] = addresses
        else:
            addressed[name] = addresses
    return LinkJob(checkpoint, addressed, reasons, sharded, request)


def _model_files(request: LinkRequest) -> list[str]:
    """Return the other files of a model: their index, `config.json`, the tokenizer's files and their like."""
    indexes = [] if os.path.isfile(request.source) else glob.glob(f"*{INDEX_SUFFIX}", root_dir=request.directory)
    return [
        *files_of_model(*store_of(request.directory, None)).copies.values(),
        *(os.path.join(request.directory, name) for name in indexes),
    ]


def _nbytes(leaf: OrbaxLeaf) -> int:
    """Return the bytes of an array."""
    return prod(leaf.shape) * leaf.dtype.itemsize
