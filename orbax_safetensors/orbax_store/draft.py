"""The directory of a checkpoint that is being written: how it begins, is taken up again, and becomes a checkpoint.

It has the name that Orbax gives unfinished checkpoints, by which all of Orbax ignores it. Chunks that are in its store
are complete: OCDBT refers to a chunk only once its bytes are written, and plain files are renamed into place. So what
the store lists is the record of the work that is done, and none is kept beside it but that of what the work is.

One sink at a time has it: it holds `<destination>/.<step>.lock`. Where the file system has no locks, the record has the
number of the last that began, and no other makes a checkpoint of it.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

# `Checkpointer.save` does these steps in one, and would leave the other processes waiting where one of them fails.
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.futures import synchronization
from orbax.checkpoint._src.serialization import tensorstore_utils

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.io.lock import Lock
from orbax_safetensors.orbax_store.flow import stored
from orbax_safetensors.orbax_store.handlers import registry
from orbax_safetensors.orbax_store.leaves import OrbaxLeaf
from orbax_safetensors.orbax_store.source import STEP_FILE

logger = logging.getLogger(__name__)

# What is written, and by whom; it is there from the beginning to the end of the work.
_RECORD_FILE = "_in_progress.json"
_PROCESS_PREFIX = tensorstore_utils.PROCESS_SUBDIR_PREFIX

# A chunk's key, after the name of its array: `c/0/1` in Zarr 3, `0.1` in Zarr 2.
_CHUNK_KEYS = {
    True: re.compile(r"(.*)/c((?:/\d+)*)", re.DOTALL),
    False: re.compile(r"(.*)/(\d+(?:\.\d+)*)", re.DOTALL),
}


class Draft:
    """An unfinished checkpoint of one step with one item. One process only calls `begin`, `check` and `finish`."""

    def __init__(self, destination: str, step: int, item: str, *, ocdbt: bool, zarr3: bool, compression: bool) -> None:
        """Touches nothing."""
        self._ocdbt, self._zarr3 = ocdbt, zarr3
        self._item = item
        self.path = posixpath.join(destination, str(step))
        self._handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=ocdbt, use_zarr3=zarr3, use_compression=compression, type_handler_registry=registry()
        )
        self._metadata = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
        temporary_path = ocp.path.atomicity.AtomicRenameTemporaryPath
        self._step_path = temporary_path.from_final(epath.Path(self.path), checkpoint_metadata_store=self._metadata)
        self._item_path = temporary_path.from_final(self._step_path.get() / item)
        self._record = posixpath.join(self._step_path.get(), _RECORD_FILE)
        self._run = secrets.token_hex(8)
        self._lock: Lock | None = None

    @property
    def item_directory(self) -> epath.Path:
        """Where Orbax puts the item's files until it is finished."""
        return self._item_path.get()

    def begin(self, record: Mapping[str, Any], *, resume: bool) -> None:
        """Makes the directories, anew unless `resume` finds some that were begun with the same `record`.

        Until `release`, no other can. Raises `StorageError` where another is at work, the step is there already, or
        something else in the place of what is unfinished, and `TensorMismatchError` where the record is another.
        """
        destination, step = posixpath.split(self.path)
        with stored(f"{self._step_path.get()}: cannot be made"):
            os.makedirs(destination, exist_ok=True)
            self._lock = Lock(posixpath.join(destination, f".{step}.lock"), self.path)
        try:
            self._begin(record, resume=resume)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets others begin."""
        if self._lock is not None:
            self._lock.release()

    def check(self) -> None:
        """Raises `StorageError` where another has begun since."""
        if (self._begun() or {}).get("run") != self._run:
            raise StorageError(f"{self.path}: another conversion is writing here")

    def _begin(self, record: Mapping[str, Any], *, resume: bool) -> None:
        if os.path.lexists(self.path):
            raise StorageError(f"{self.path}: already exists")
        self._check_place()
        if resume and (begun := self._begun()) is not None:
            # Compared as JSON has it: without tuples, and with the keys in any order.
            for key, value in json.loads(json.dumps(record)).items():
                if begun.get(key) != value:
                    raise TensorMismatchError(
                        f"{self._step_path.get()}: cannot be taken up again, {key} was {begun.get(key)!r:.300} when it "
                        f"was begun and is {value!r:.300} now"
                    )
            with stored(f"{self._step_path.get()}: cannot be taken up again"):
                self._write_record({"run": self._run, **record})
            self._reopen(record)
            return
        with stored(f"{self._step_path.get()}: cannot be made"):
            if self._step_path.get().exists():
                self._check_unfinished()
                self._empty()
            asyncio_utils.run_sync(self._step_path.create())
            asyncio_utils.run_sync(self._item_path.create())
            self._write_record({"run": self._run, **record})

    def _write_record(self, record: Mapping[str, Any]) -> None:
        draft = f"{self._record}.new"
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(draft, self._record)

    def _check_place(self) -> None:
        """Raises `StorageError` where there is no directory; links are not followed, to wherever they lead."""
        for path in (self._step_path.get(), self._step_path.get() / self._item, self.item_directory):
            if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
                kind = "link" if os.path.islink(path) else "file"
                raise StorageError(f"{path}: is a {kind} and no unfinished checkpoint; move it away")

    def _check_unfinished(self) -> None:
        """Raises `StorageError` where there is something that neither this class nor Orbax has left unfinished.

        Both begin with Orbax's metadata of the step, in which there is a time once the step is complete.
        """
        path = self._step_path.get()
        names = set(os.listdir(path))
        if not names or _RECORD_FILE in names:
            return
        if STEP_FILE not in names:
            raise StorageError(f"{path}: is no unfinished checkpoint, it holds {min(names)!r}; move it away")
        metadata = self._metadata.read(path / STEP_FILE)
        if isinstance(metadata, dict) and metadata.get("commit_timestamp_nsecs") is not None:
            raise StorageError(f"{path}: is a checkpoint that was finished, as its {STEP_FILE} says; move it away")

    def _empty(self) -> None:
        """Deletes what is there but for a record, which says until the end that there is nothing to take up."""
        self._write_record({})
        for entry in list(os.scandir(self._step_path.get())):
            if entry.name != _RECORD_FILE:
                _remove(entry)

    def _begun(self) -> Any:
        """The record of what is there; None where there is nothing that could be taken up."""
        try:
            with open(self._record, encoding="utf-8") as file:
                begun = json.load(file)
            if not isinstance(begun, dict):
                raise ValueError(f"expected a dict, found {begun!r:.80}")
            return begun or None
        except FileNotFoundError:
            if self._step_path.get().exists():
                logger.warning("%s has no record of what it was begun for and is deleted", self._step_path.get())
            return None
        except (OSError, ValueError) as error:
            raise StorageError(f"{self._record}: cannot be read: {error}; begin anew without resume") from error

    def _reopen(self, record: Mapping[str, Any]) -> None:
        """Brings the item back to where only chunks are in it, however far `finish` had come."""
        finished, directory = self._step_path.get() / self._item, self.item_directory
        with stored(f"{directory}: cannot be taken up again"):
            if finished.exists() and not directory.exists():
                os.rename(finished, directory)
            tops = {name.split("/")[0] for name in record["leaves"]}
            for entry in list(os.scandir(directory)):
                if entry.name.startswith(_PROCESS_PREFIX) if self._ocdbt else entry.name in tops:
                    continue
                _remove(entry)

    def chunks(self, leaves: Mapping[str, OrbaxLeaf]) -> dict[str, np.ndarray]:
        """For every array, which of its chunks are in the store, over the grid of its chunks.

        Raises `TensorMismatchError` where there is one that belongs to none.
        """
        present = {name: np.zeros(leaf.grid, np.bool_) for name, leaf in leaves.items()}
        for key in self._keys():
            match = _CHUNK_KEYS[self._zarr3].fullmatch(key)
            if match is None or match[1] not in present:
                continue  # the metadata of an array, or a scalar
            grid = present[match[1]]
            index = tuple(int(part) for part in re.findall(r"\d+", match[2]))[: grid.ndim]
            if len(index) != grid.ndim or any(at >= size for at, size in zip(index, grid.shape, strict=True)):
                raise TensorMismatchError(
                    f"{self.item_directory}: {match[1]!r}: has a chunk {index} that it cannot have"
                )
            grid[index] = True
        return present

    def _keys(self) -> Iterator[str]:
        directory = self.item_directory.as_posix()
        # A context of its own, so that nothing that was cached before is listed.
        context = ocp.type_handlers.get_ts_context(use_ocdbt=self._ocdbt)
        with stored(directory):
            if self._ocdbt:
                roots = sorted(entry.path for entry in os.scandir(directory) if entry.name.startswith(_PROCESS_PREFIX))
            else:
                roots = [f"{directory}/"]
            for root in roots:
                spec = tensorstore_utils.build_kvstore_tspec(root, use_ocdbt=self._ocdbt)
                if not self._ocdbt:
                    spec["path"] = root
                for key in ts.KvStore.open(ts.KvStore.Spec(spec), context=context).result().list().result():
                    yield os.fsdecode(key)

    def save(self, tree: Any, custom_metadata: Any) -> None:
        """Lets Orbax write all that belongs to the arrays. Called by every process."""
        with stored(self.path):
            # As `Checkpointer.save` does, so that no signal of a save before is taken for one of this.
            synchronization.OperationIdGenerator.next_operation_id()
            self._handler.save(self.item_directory, args=ocp.args.PyTreeSave(tree, custom_metadata=custom_metadata))

    def finish(self, custom_metadata: dict[str, Any] | None) -> None:
        """Makes it a checkpoint, as `Checkpointer.save` does with an item: merges, renames the item, then the step."""
        self.check()
        with stored(self.path):
            self._metadata.update(
                file_path=self._step_path.get() / STEP_FILE,
                custom_metadata=custom_metadata,
                item_handlers={self._item: self._handler.typestr()},
            )
            self._handler.finalize(self.item_directory)
            asyncio_utils.run_sync(self._item_path.finalize())
            os.unlink(self._record)
            asyncio_utils.run_sync(self._step_path.finalize())


def _remove(entry: os.DirEntry[str]) -> None:
    """Deletes a file, a link or a directory with all that is in it."""
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path)
    else:
        os.unlink(entry.path)
