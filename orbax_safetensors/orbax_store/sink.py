"""`OrbaxSink`: a checkpoint that Orbax reads, written in tiles as they come, with few of them in memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from orbax_safetensors.devices.joint_sink import JointSink
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store.directories import absolute
from orbax_safetensors.orbax_store.item_layout import OrbaxLayout
from orbax_safetensors.orbax_store.item_writer import ItemWriter, OrbaxItem
from orbax_safetensors.orbax_store.leaf import OrbaxLeaf, box_of, check_box, check_memory, chunks_of
from orbax_safetensors.orbax_store.operations import Budget, Operations, storage_errors
from orbax_safetensors.storage.paths import PathLike

# What a write costs besides its bytes: what TensorStore and Python keep of it, as measured.
_WRITE_OVERHEAD = 32 << 10


class OrbaxSink(JointSink):
    """A checkpoint under way: a directory of items, as Orbax's `CheckpointManager` makes for each step, or one item.

    Every process makes one, with the same arguments and in the same order as its other saves, writes its own tiles and
    calls `commit`; see `JointSink`. What is unfinished is in Orbax's temporary directory, which nothing opens.

    Attributes:
      path: the directory of the finished checkpoint.
      leaves: its arrays, by key path joined by dots; if there are several items, after the item's name and a slash.
    """

    def __init__(
        self,
        path: PathLike,
        items: Mapping[str, OrbaxItem],
        *,
        metadata: Mapping[str, Any] | None = None,
        others: Mapping[str, str] | None = None,
        compression: bool = True,
        fsync: bool = True,
        memory_bytes: int = 256 << 20,
        resume: bool = False,
        source: str = "",
    ) -> None:
        """Make the temporary directory and all arrays in it.

        Args:
          path: the directory of the checkpoint, which must not exist, or its `gs://` URL.
          items: by name; a single item without a name is stored in the directory itself.
          metadata: JSON that Orbax records of the checkpoint: `custom_metadata`, as MaxText's `{"scan_layers": True}`,
            and other keys that it knows. `item_handlers` are by default those of trees.
          others: paths of files and directories to copy beside the items, by their new names.
          compression: compress chunks as Orbax does.
          fsync: a tile is done once it is on the disk, as in Orbax. Without it, a tile is done once the operating
            system has it: a loss of power can undo it, a kill of the process cannot.
          memory_bytes: the most bytes in flight, of tiles and what is made of them; one tile may exceed it.
          resume: go on with the unfinished checkpoint of a sink with the same leaves, formats and `source`; `written`
            says which chunks are stored. If there is none, or without `resume`, begin anew.
          source: tells sources of equal shapes apart; compared when a sink resumes.

        Raises `StorageError` if the checkpoint exists or storage fails, and `TensorMismatchError` if a leaf cannot be
        stored or another sink has begun the unfinished checkpoint; in every process, before anything is written.
        """
        self.path = absolute(path)
        self._budget = Budget(memory_bytes)
        self._compression = compression
        self._lock = threading.Lock()

        def plan() -> str:
            self._layout = OrbaxLayout(
                self.path, items, metadata=metadata, others=others, compression=compression, fsync=fsync
            )
            self.leaves: Mapping[str, OrbaxLeaf] = self._layout.leaves
            self._record = self._layout.record(source)
            return hashlib.sha256(json.dumps(self._record).encode()).hexdigest()

        self._start("orbax", plan, resume=resume)

    def _begin(self, *, resume: bool) -> None:
        self._layout.unfinished.begin(self._record, resume=resume)

    def _open(self) -> None:
        self._stores = self._layout.named(lambda item: item.open(self._is_first))

    def _see(self) -> str:
        self._present = self._layout.named(ItemWriter.chunks)
        return ""

    def written(self, name: str, box: Box) -> bool:
        """Return whether all chunks that a box touches are stored, by this process or before it began."""
        leaf = self._leaf(name)
        check_box(box, leaf.shape, f"{self.path}: {name!r}")
        with self._lock:
            return bool(self._present[name][chunks_of(box, leaf).slices].all())

    def missing(self, name: str) -> Iterator[Box]:
        """Yield the boxes of the chunks of an array that are not `written`, in row-major order."""
        leaf = self._leaf(name)
        with self._lock:
            indices = np.argwhere(~self._present[name])
        for index in indices.tolist():
            yield box_of(Box((at, at + 1) for at in index), leaf)

    def write(self, name: str, box: Box, tile: np.ndarray) -> Future[int]:
        """Begin to write the elements of `box`, which is made of whole chunks; the future is their bytes.

        Waits while `memory_bytes` are in flight. Safe from any thread. `tile` is not copied: it must not change before
        the future is done, which is when no kill of the process can undo the write. Raises the error by which this or
        another process has failed, so that callers notice it without waiting for futures. Callbacks of the future must
        not call the sink: they run in a thread that other writes need.
        """
        leaf, where = self._leaf(name), f"{self.path}: {name!r}"
        check_box(box, leaf.shape, where)
        check_memory(tile, box, leaf.dtype, where)
        chunks = chunks_of(box, leaf)
        if box_of(chunks, leaf) != box:
            raise TensorMismatchError(f"{where}: expected a box of chunks of shape {leaf.chunk_shape}, found {box}")
        self._check()
        operations = Operations(where)
        operations.future.add_done_callback(partial(self._wrote, name, chunks))
        if not tile.size:
            operations.close(0)
            return operations.future
        # Encoded, a chunk is in memory a second time; without compression TensorStore writes from the caller's memory.
        taken = self._budget.acquire(tile.nbytes * (2 if self._compression else 1) + _WRITE_OVERHEAD)
        try:
            with storage_errors(where):
                store = self._stores[name][box.slices]
                operation = store.write(tile, can_reference_source_data_indefinitely=True).commit
        except BaseException as error:
            self._budget.release(taken)
            operations.close(0, error)
            raise
        operations.add(operation, self._budget, taken)
        operations.close(tile.nbytes)
        return operations.future

    def _wrote(self, name: str, chunks: Box, future: Future[int]) -> None:
        failure = future.exception()
        with self._lock:
            if failure is None:
                self._present[name][chunks.slices] = True
            elif self._failure is None and isinstance(failure, Exception):
                self._failure = failure

    def _check(self) -> None:
        """Raise the error by which this or another process has failed, if one has."""
        self._check_open()
        if self._failure is not None:
            raise self._failure
        self.check_others()

    def wait(self) -> None:
        """Wait until all writes so far are done; raise the error if one has failed."""
        self._budget.drain()
        self._check()

    def _flush(self) -> None:
        self._stop()
        if self._failure is not None:
            raise self._failure

    def _stop(self) -> None:
        self._budget.drain()
        self._stores = {}

    def _complete(self) -> None:
        self._layout.unfinished.save()

    def _finish(self) -> None:
        self._layout.unfinished.finish(self._layout.metadata)

    def _release(self) -> None:
        self._layout.unfinished.release()

    def _leaf(self, name: str) -> OrbaxLeaf:
        if name not in self.leaves:
            raise TensorMismatchError(f"{self.path}: has no array {name!r}")
        return self.leaves[name]
