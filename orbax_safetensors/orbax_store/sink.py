"""`OrbaxSink`: a checkpoint that Orbax reads, written in tiles as they come, with few of them in memory."""

from __future__ import annotations

import hashlib
import json
import threading
from concurrent.futures import Future
from functools import partial
from typing import Self

import numpy as np

from orbax_safetensors.devices.joint_sink import JointSink
from orbax_safetensors.errors import TensorMismatchError, storage_errors
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store.item_writer import ItemWriter
from orbax_safetensors.orbax_store.leaf import OrbaxLeaf, box_of, check_box, check_memory, chunks_of
from orbax_safetensors.orbax_store.operations import Budget, Operations
from orbax_safetensors.orbax_store.unfinished import UnfinishedCheckpoint

# What a write costs besides its bytes: what TensorStore and Python keep of it, as measured.
_WRITE_OVERHEAD = 32 << 10


class OrbaxSink(JointSink):
    """A checkpoint under way: a directory of items, as Orbax's `CheckpointManager` makes for each step, or one item.

    Every process makes one, with the same arguments and in the same order as its other saves, writes its own tiles and
    calls `commit`; see `JointSink`. What is unfinished is in Orbax's temporary directory, which nothing opens.

    Attributes:
      leaves: its arrays, by key path joined by dots; if there are several items, after the item's name and a slash.
    """

    workspace: UnfinishedCheckpoint

    def __init__(self, checkpoint: UnfinishedCheckpoint, *, memory_bytes: int = 256 << 20) -> None:
        """Write nothing. At most `memory_bytes` are in flight, of tiles and what is made of them, or one tile."""
        self.path, self.leaves, self.workspace = checkpoint.destination, checkpoint.leaves, checkpoint
        self._budget = Budget(memory_bytes)
        self._lock = threading.Lock()

    def begin(self, *, resume: bool = False) -> Self:
        """Make the temporary directory and all arrays in it.

        With `resume`, go on with the unfinished checkpoint of a sink with the same leaves, formats and `source`;
        `written` says which chunks are stored. If there is none, or without `resume`, begin anew.

        Raises `StorageError` if the checkpoint exists or storage fails, and `TensorMismatchError` if another sink has
        begun the unfinished checkpoint; in every process, before anything is written.
        """
        digest = hashlib.sha256(json.dumps(self.workspace.record).encode()).hexdigest()
        self._start("orbax", lambda: digest, resume=resume)
        return self

    def _open(self) -> None:
        self._stores = self.workspace.named(lambda item: item.open(self._is_first))

    def _see(self) -> str:
        self._present = self.workspace.named(ItemWriter.chunks)
        return ""

    def written(self, name: str, box: Box) -> bool:
        """Return whether all chunks that a box touches are stored, by this process or before it began."""
        leaf = self._leaf(name)
        check_box(box, leaf.shape, f"{self.workspace.destination}: {name!r}")
        with self._lock:
            return bool(self._present[name][chunks_of(box, leaf).slices].all())

    def write_box(self, name: str, box: Box, tile: np.ndarray) -> Future[int]:
        """Begin to write the elements of `box`, which is made of whole chunks; the future is their bytes.

        Waits while `memory_bytes` are in flight. Safe from any thread. `tile` is not copied: it must not change before
        the future is done, which is when no kill of the process can undo the write. Raises the error by which this or
        another process has failed, so that callers notice it without waiting for futures. Callbacks of the future must
        not call the sink: they run in a thread that other writes need.
        """
        leaf, where = self._leaf(name), f"{self.workspace.destination}: {name!r}"
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
        taken = self._budget.acquire(tile.nbytes * (2 if self.workspace.compression else 1) + _WRITE_OVERHEAD)
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

    def _flush(self) -> None:
        self._stop()
        if self._failure is not None:
            raise self._failure

    def _stop(self) -> None:
        self._budget.drain()
        self._stores = {}

    def _leaf(self, name: str) -> OrbaxLeaf:
        if name not in self.leaves:
            raise TensorMismatchError(f"{self.workspace.destination}: has no array {name!r}")
        return self.leaves[name]
