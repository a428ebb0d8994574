"""`OrbaxSink`: a checkpoint that Orbax reads, written in tiles as they come, with few of them in memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from orbax_safetensors.devices.agreement import agree, announce, announced, forget, new_key, together
from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store.directories import absolute
from orbax_safetensors.orbax_store.item_layout import OrbaxLayout
from orbax_safetensors.orbax_store.item_writer import ItemDraft, OrbaxItem
from orbax_safetensors.orbax_store.leaf import OrbaxLeaf, box_of, check_box, check_memory, chunks_of
from orbax_safetensors.orbax_store.operations import Budget, Operations, stored
from orbax_safetensors.storage.paths import PathLike

# What a write costs besides its bytes: what TensorStore and Python keep of it, as measured.
_WRITE_OVERHEAD = 32 << 10

# Seconds between two looks at whether another process has given up.
_LOOK_SECONDS = 1.0


class OrbaxSink:
    """A checkpoint under way: a directory of items, as Orbax's `CheckpointManager` makes for each step, or one item.

    Every process makes one, with the same arguments and in the same order as its other saves, writes its own tiles and
    calls `commit`. Used as a context manager it gives up where the block is left without `commit` or by an exception;
    then all processes fail, and what has been written stays in Orbax's temporary directory, which nothing opens.

    Attributes:
      path: where it will be.
      leaves: its arrays, by key path joined by dots; where there are several items, after that of theirs and a slash.
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
        """Makes the temporary directory and all arrays in it.

        Args:
          path: the directory of the checkpoint, which must not be there, or its `gs://` URL.
          items: by name; a single one without a name is to be what is in the directory itself.
          metadata: what Orbax is to record of the checkpoint: `custom_metadata`, as MaxText's `{"scan_layers": True}`,
            and others that it knows; what JSON can hold. `item_handlers` are by default those of trees.
          others: paths of files and directories that are copied beside the items, by the names that they get.
          compression: compress chunks as Orbax does.
          fsync: a tile is done once it is on the disk, as Orbax has it, rather than with the operating system, where
            a kill of the process cannot undo it but a loss of power can.
          memory_bytes: of tiles and what is made of them, at most this much is in flight, or one tile.
          resume: go on with what a sink has left behind that was made with the same leaves, formats and `source`;
            `written` tells what is there. Where nothing was left, and without `resume`, all begins anew.
          source: tells apart what must not be mixed, as two sources of one shape; compared where a sink resumes.

        Raises `StorageError` where a checkpoint is there already or storage fails, and `TensorMismatchError` where a
        leaf cannot be stored or what was left behind is of another sink; in every process, before anything is written.
        """
        self.path = absolute(path)
        self._key = new_key("orbax", self.path)
        self._budget = Budget(memory_bytes)
        self._compression = compression
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._ended = False
        self._looked = time.monotonic()
        self._process = jax.process_index()
        failure: BaseException | None = None
        facts = ""
        try:
            self._layout = OrbaxLayout(
                self.path, items, metadata=metadata, others=others, compression=compression, fsync=fsync
            )
            self._draft = self._layout.draft
            record = self._layout.record(source)
            self.leaves: Mapping[str, OrbaxLeaf] = self._layout.leaves
            facts = hashlib.sha256(json.dumps(record).encode()).hexdigest()
        except BaseException as error:
            failure = error
        agree(f"{self._key}/plan", failure, facts)
        try:
            self._together("begin", partial(self._draft.begin, record, resume=resume), primary=True)
            self._together("list", self._list)
            self._together("open", self._open)
        except BaseException:
            self._draft.release()
            raise

    def _list(self) -> None:
        """All processes see the same, as none has begun to write."""
        self._present = self._layout.named(ItemDraft.chunks)

    def _open(self) -> None:
        self._stores = self._layout.named(lambda item: item.open(self._process == 0))

    def written(self, name: str, box: Box) -> bool:
        """Whether all chunks that a box touches are in the store, written by this process or before it began."""
        leaf = self._leaf(name)
        check_box(box, leaf.shape, f"{self.path}: {name!r}")
        with self._lock:
            return bool(self._present[name][chunks_of(box, leaf).slices].all())

    def missing(self, name: str) -> Iterator[Box]:
        """The boxes of the chunks of an array that are not `written`, in row-major order."""
        leaf = self._leaf(name)
        with self._lock:
            indices = np.argwhere(~self._present[name])
        for index in indices.tolist():
            yield box_of(Box((at, at + 1) for at in index), leaf)

    def write(self, name: str, box: Box, tile: np.ndarray) -> Future[int]:
        """Begins to write the elements of `box`, which is made of whole chunks; the future is their bytes.

        Waits while `memory_bytes` are in flight. Safe from any thread. `tile` is not copied: it must not change before
        the future is done, which it is when no kill of the process can undo the write. Raises what made this or another
        process fail, so that an error is noticed although nobody waits for futures. What is called when the future is
        done must not call the sink: it runs in a thread that other writes need.
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
        # Encoded, a chunk is in memory a second time; without compression TensorStore writes from that of the caller.
        taken = self._budget.acquire(tile.nbytes * (2 if self._compression else 1) + _WRITE_OVERHEAD)
        try:
            with stored(where):
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
        """Raises what has failed, here or elsewhere."""
        if self._ended:
            raise StorageError(f"{self.path}: this sink has been committed or given up")
        if self._failure is not None:
            raise self._failure
        if jax.process_count() > 1 and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            if (reason := announced(self._given_up)) is not None:
                raise StorageError(f"{self.path}: {reason}")

    @property
    def _given_up(self) -> str:
        return f"{self._key}/given_up"

    def wait(self) -> None:
        """Waits until all that was written so far is done; raises what has failed."""
        self._budget.drain()
        self._check()

    def commit(self) -> None:
        """Makes it a checkpoint, once every process has called this; returns when it is there.

        Raises `TensorMismatchError` where chunks are missing, and `StorageError` where any process failed: in all
        processes, and nothing is there then.
        """
        if self._ended:
            raise StorageError(f"{self.path}: this sink has been committed or given up")
        self._ended = True
        try:
            self._budget.drain()
            agree(f"{self._key}/tiles", self._failure)
            self._stores = {}
            self._together("save", self._draft.save)
            self._together("finish", partial(self._draft.finish, self._layout.metadata), primary=True)
        finally:
            self._draft.release()
        for part in ("plan", "begin", "list", "open", "tiles", "save"):
            forget(f"{self._key}/{part}")

    def abort(self, failure: Exception | None = None) -> None:
        """Gives up: waits for what is in flight, tells the other processes and leaves all as it is.

        Returns once the other processes have noticed, which they do at their next `write` or at `commit`.
        """
        if self._ended:
            return
        self._ended = True
        try:
            self._give_up(failure)
        finally:
            self._draft.release()

    def _give_up(self, failure: Exception | None) -> None:
        self._budget.drain()
        self._stores = {}
        failure = failure or self._failure or StorageError(f"{self.path}: was given up before all was written")
        if jax.process_count() > 1:
            announce(self._given_up, f"process {self._process} failed: {type(failure).__name__}: {failure}")
            with contextlib.suppress(Exception):
                agree(f"{self._key}/tiles", failure)

    def _together(self, part: str, do: Any, *, primary: bool = False) -> None:
        """Does something in every process, or in the primary one only; raises in all of them where it fails in one."""
        together(f"{self._key}/{part}", do if not primary or self._process == 0 else lambda: None)

    def _leaf(self, name: str) -> OrbaxLeaf:
        if name not in self.leaves:
            raise TensorMismatchError(f"{self.path}: has no array {name!r}")
        return self.leaves[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort(error if isinstance(error, Exception) else None)
