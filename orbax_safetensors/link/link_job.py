"""The job of a link: `prepare` decides, from headers alone, which leaves become addresses and which have to be made.

`LinkJob.plan` says what that makes; `LinkJob.run` makes it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.family import mapped
from orbax_safetensors.checkpoint.model_files import files_of_model
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.agreement import new_key, together
from orbax_safetensors.devices.reported_progress import reported_progress
from orbax_safetensors.devices.trees import nodes
from orbax_safetensors.errors import StorageError, TensorMismatchError, printable, storage_errors
from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.format.digest import digest_of
from orbax_safetensors.link.link_request import LinkRequest
from orbax_safetensors.link.staging import ObjectStaging, Staging
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
from orbax_safetensors.storage.local import make_directory
from orbax_safetensors.streaming.cutting import interleaved
from orbax_safetensors.streaming.orbax_sink import orbax_sink
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from orbax_safetensors.streaming.tile_job import TileJob

logger = logging.getLogger(__name__)

# A Python integer, as Orbax stores it.
_SCALAR = OrbaxLeaf((), np.dtype(np.int64), (), SCALAR)


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
    """What `link` will make. Printed, a plan has its main figures in a few lines.

    ```python
    plan = ost.plan_link("/models/qwen3", "/models/linked", family="maxtext")
    print(plan)
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

    def __str__(self) -> str:
        text = (
            f"link to {printable(self.path)}: arrays {len(self.arrays):,}, chunks {self.num_chunks:,}\n"
            f"linked {human_bytes(self.linked_bytes)}, computed {human_bytes(self.made_bytes)}, index "
            f"{human_bytes(self.metadata_bytes)}"
        )
        return text if self.restore is None else f"{text}\n{self.restore}"

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
      leaves: all arrays, with the chunks that are stored, in the order of the tree.
      linked: the arrays that become addresses.
      reasons: the arrays that have to be made, and the reason for each.
      making: makes these, in `staging`; None if there are none.
    """

    request: LinkRequest
    checkpoint: Checkpoint
    staging: Staging | ObjectStaging
    leaves: Mapping[str, OrbaxLeaf]
    linked: Mapping[str, AddressedArray]
    reasons: Mapping[str, str]
    making: TileJob | None

    @property
    def arrays(self) -> tuple[LinkedArray, ...]:
        """The arrays of the new checkpoint, in the order of the tree."""
        return tuple(
            LinkedArray(
                name.removeprefix(self.checkpoint.wrapper.above),
                leaf.dtype.name,
                leaf.shape,
                leaf.chunk_shape,
                self.linked[name].chunks.count if name in self.linked else prod(leaf.grid),
                prod(leaf.shape) * leaf.dtype.itemsize,
                self.reasons.get(name),
            )
            for name, leaf in self.leaves.items()
        )

    def plan(self, process_count: int) -> LinkPlan:
        """Return what `run` would make, and what a restore by `process_count` processes would read; write nothing."""
        self.staging.check_destination()
        nbytes = write_references(self._entries(), lambda *_: None)
        nbytes += sum(map(len, self._small_files().values()))
        restore = None
        if self.request.mesh is not None or self.request.like is not None:
            above = self.checkpoint.wrapper.above
            restored = {name.removeprefix(above): leaf for name, leaf in self.leaves.items()}
            file_bytes = sum(file.stamp.nbytes for file in self.checkpoint.files)
            restore = plan_arrays(restored, self.request.partition, process_count, file_bytes)
        return LinkPlan(self.request.destination, self.arrays, nbytes, restore)

    def run(self, *, resume: bool, progress: Progress | bool | None) -> None:
        """Make the link, together with all other processes; raises in every process if one fails."""
        key, active, staging = new_key("link"), ActiveProcesses.all(), self.staging
        try:
            together(f"{key}/begin", active.by_primary(partial(staging.begin, resume=resume)))
            if self.making is not None:
                with closing(self.making.source):
                    if not together(f"{key}/made", staging.has_made, str):  # an earlier run may have made them
                        with reported_progress(progress, "link") as report:
                            self.making.run(resume=resume, progress=report)
            together(f"{key}/write", active.by_primary(self._write))
        finally:
            staging.release()

    def _write(self) -> None:
        """Write the index, and give the link its place."""
        checkpoint, request, staging = self.checkpoint, self.request, self.staging
        write_references(self._entries(), staging.write)
        if self.making is not None:
            merge([staging.made], staging.path)
            staging.keep_data()
        small = self._small_files()
        linked = checkpoint.use.record()
        staging.write(NOTE_FILE, note_content(checkpoint.fingerprints, checkpoint.mapped is None, small, linked=linked))
        for name, content in {**step_files(checkpoint.wrapper.custom_metadata), **small}.items():
            staging.write(name, content)
        if not request.in_source:
            names = [os.path.basename(file.path) for file in checkpoint.files] + _model_files(checkpoint)
            _link_files(request, checkpoint.directory, names, staging.path)
        for file in checkpoint.files:
            with closing(checkpoint.store.open(file.path)) as opened:
                opened.check(file.stamp)  # raises if the file has changed since its header was read
        staging.finish()
        record_in_step(staging.destination, HANDLER, checkpoint.wrapper.custom_metadata, new=request.new_step)
        logger.info(
            "Linked %s: %d arrays are addresses, %d were made", staging.destination, len(self.linked), len(self.reasons)
        )

    def _small_files(self) -> dict[str, bytes]:
        """Return Orbax's files of the tree, by their names."""
        wrapper = self.checkpoint.wrapper
        rest = {key: _SCALAR if isinstance(value, int) else value for key, value in wrapper.rest.items()}
        tree = self.checkpoint.tree(lambda name, _: self.leaves[wrapper.above + name])
        # Chunks of padding are not stored.
        whole = all(array.is_whole for array in self.linked.values())
        return item_files(nodes(replace(wrapper, rest=rest).around(tree)), whole=whole)

    def _entries(self) -> Iterator[Entry]:
        """Yield the entries of the index, without the arrays that have to be made."""
        files = [os.path.basename(file.path) for file in self.checkpoint.files]
        yield from array_entries(self.linked, self.checkpoint.location, files)
        for name, value in self.checkpoint.wrapper.rest.items():
            if isinstance(value, int):
                yield from scalar_entries(name, np.asarray(value, np.int64))


def prepare(request: LinkRequest) -> LinkJob:
    """Read all headers and decide on every leaf.

    Raises the errors of `convert` for a source, a family or a spec, also if memory does not suffice for what has to be
    made, and `StorageError` for files that are not local.
    """
    checkpoint = read_checkpoint(request.source)
    if is_on_gcs(request.source) and checkpoint.is_file:
        raise StorageError(f"{request.source}: is one object; on gs://, pass the directory with it")
    if not checkpoint.tensors:
        raise TensorMismatchError(f"{request.source}: holds no tensors")
    checkpoint = mapped(checkpoint, request.family, request.variant, complete=True, dequantize=True)
    partition, above = request.partition, checkpoint.wrapper.above
    partition.check((name, view.shape) for name, view in checkpoint.leaves.items())
    linked, reasons, leaves = {}, {}, {}
    for leaf, view in checkpoint.leaves.items():
        name = above + leaf
        leaves[name] = sharded_leaf(partition, leaf, view.shape, view.dtype)
        if reason := misread(name, view.shape):
            raise TensorMismatchError(f"{request.source}: {name!r:.200}: {reason}")
        quantized = checkpoint.quantized.keys() & view.tensors
        addresses = "it has to be decoded" if quantized else addressed_array(view, leaves[name], request.chunk_bytes)
        if isinstance(addresses, str):
            reasons[name] = addresses
        else:
            linked[name], leaves[name] = addresses, addresses.leaf
    staging = (ObjectStaging if is_on_gcs(request.destination) else Staging)(request, _digest(request, checkpoint))
    making = None
    if reasons:
        views = {name: checkpoint.leaves[name.removeprefix(above)] for name in reasons}
        source = SafetensorsSource(checkpoint, views, {}, request.memory_bytes, "auto")
        sink = orbax_sink(
            source,
            staging.made,
            {"": OrbaxItem({name: leaves[name] for name in reasons})},
            interleaved(views),
            memory_bytes=request.memory_bytes,
            chunk_bytes=request.chunk_bytes,
            compression=False,
        )
        making = TileJob(source, sink)
        staging.nbytes = sink.workspace.nbytes  # so that a lack of room is found at once, and names the destination
        leaves |= sink.workspace.leaves
    return LinkJob(request, checkpoint, staging, leaves, linked, reasons, making)


def _digest(request: LinkRequest, checkpoint: Checkpoint) -> str:
    """Return a digest that is equal for links of the same files into the same index."""
    stamps = [(file.path, file.stamp) for file in checkpoint.files]
    # The result of a family: its repr has the addresses of its functions, which differ between processes.
    mapped = None if checkpoint.mapped is None else sorted(checkpoint.mapped.items())
    # Files beside the tensors say how these are decoded.
    return digest_of((stamps, mapped, request.facts, *sorted(checkpoint.quantized.items())))


def _model_files(checkpoint: Checkpoint) -> list[str]:
    """Return the other files of a model: their index, `config.json`, and all that a copy of the model would have."""
    index = [] if checkpoint.index_name is None else [checkpoint.index_name]
    return [*files_of_model(checkpoint.store, checkpoint.directory).copies, *index]


def _link_files(request: LinkRequest, source: str, names: list[str], directory: str) -> None:
    """Link files in `directory`, which becomes the destination: by relative symbolic links, or by hard links."""
    above, base_name = os.path.split(request.destination)
    becomes = os.path.join(os.path.realpath(above), base_name)
    for name in names:
        file, link = os.path.join(source, name), os.path.join(directory, name)
        if not os.path.isfile(file):  # a reader that opens a link to a pipe waits for ever
            raise StorageError(f"{file}: is not a regular file")
        with storage_errors(f"{link}: cannot be made", OSError):
            make_directory(os.path.dirname(link))
        try:
            if request.hard_links:
                os.link(os.path.realpath(file), link)  # if `file` is a link, to its target
            else:
                os.symlink(os.path.relpath(file, os.path.dirname(os.path.join(becomes, name))), link)
        except OSError as error:
            raise StorageError(f"{link}: cannot be made a link to {file}: {error.strerror}") from error
