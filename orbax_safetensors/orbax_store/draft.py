"""The directory of a checkpoint that is being written: how it begins, is taken up again, and becomes a checkpoint.

It has the name that Orbax gives unfinished checkpoints, by which all of Orbax ignores it. On an object store, which
renames nothing, it has its own name, and all of Orbax ignores it until a file says that it is finished.

Chunks that are in its store are complete: OCDBT refers to a chunk only once its bytes are written, plain files are
renamed into place, and objects are there whole or not at all. So what the store lists is the record of the work that is
done, and none is kept beside it but that of what the work is.

One sink at a time has it: it holds `<destination>/.<step>.lock`. Where there are no locks, as on object stores, the
record has the number of the last that began, and no other makes a checkpoint of it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

# `Checkpointer.save` does these steps in one, and would leave the other processes waiting where one of them fails.
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.futures import synchronization
from orbax.checkpoint._src.path import atomicity_defaults
from orbax.checkpoint._src.serialization import tensorstore_utils

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.io.lock import Lock
from orbax_safetensors.orbax_store.flow import stored
from orbax_safetensors.orbax_store.handlers import registry
from orbax_safetensors.orbax_store.leaves import OrbaxLeaf
from orbax_safetensors.orbax_store.places import fresh, is_remote, kvstore, names
from orbax_safetensors.orbax_store.source import FINISHED_FILE, STEP_FILE

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
        final = epath.Path(destination) / str(step)
        self.path = os.fspath(final)
        self._handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=ocdbt, use_zarr3=zarr3, use_compression=compression, type_handler_registry=registry()
        )
        self._metadata = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
        temporary_path = atomicity_defaults.get_default_temporary_path_class(final)
        self._step_path = temporary_path.from_final(final, checkpoint_metadata_store=self._metadata)
        self._item_path = temporary_path.from_final(self._step_path.get() / item)
        self._record = self._step_path.get() / _RECORD_FILE
        # Whether what is finished takes the name of what is unfinished, and nothing but a file in it tells them apart.
        self._in_place = is_remote(self.path)
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
        if not self._in_place:
            destination = epath.Path(self.path).parent
            with stored(f"{self._step_path.get()}: cannot be made"):
                destination.mkdir(parents=True, exist_ok=True)
                self._lock = Lock(os.fspath(destination / f".{os.path.basename(self.path)}.lock"), self.path)
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
        with stored(self.path):
            self._check_free()
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
        if self._in_place:
            self._record.write_text(json.dumps(record))
            return
        draft = self._record.with_name(f"{_RECORD_FILE}.new")
        draft.write_text(json.dumps(record))
        draft.replace(self._record)

    def _check_free(self) -> None:
        if (fresh(self.path) / FINISHED_FILE).exists() if self._in_place else os.path.lexists(self.path):
            raise StorageError(f"{self.path}: already exists")

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
        inside = names(path)
        if not inside or _RECORD_FILE in inside:
            return
        if STEP_FILE not in inside:
            raise StorageError(f"{path}: is no unfinished checkpoint, it holds {inside[0]!r}; move it away")
        metadata = self._metadata.read(path / STEP_FILE)
        if isinstance(metadata, dict) and metadata.get("commit_timestamp_nsecs") is not None:
            raise StorageError(f"{path}: is a checkpoint that was finished, as its {STEP_FILE} says; move it away")

    def _empty(self) -> None:
        """Deletes what is there, and last a record, which says until then that there is nothing to take up."""
        self._write_record({})
        for name in names(self._step_path.get()):
            if name != _RECORD_FILE:
                _remove(self._step_path.get() / name)
        self._step_path.get().rmtree()

    def _begun(self) -> Any:
        """The record of what is there; None where there is nothing that could be taken up."""
        try:
            begun = json.loads(self._record.read_bytes())
            if not isinstance(begun, dict):
                raise ValueError(f"expected a dict, found {begun!r:.80}")
            return begun or None
        except FileNotFoundError:
            if self._step_path.get().exists():
                logger.warning("%s has no record of what it was begun for and is deleted", self._step_path.get())
            return None
        except Exception as error:
            raise StorageError(f"{self._record}: cannot be read: {error}; begin anew without resume") from error

    def _reopen(self, record: Mapping[str, Any]) -> None:
        """Brings the item back to where only chunks are in it, however far `finish` had come."""
        finished, directory = self._step_path.get() / self._item, self.item_directory
        with stored(f"{directory}: cannot be taken up again"):
            if finished.exists() and not directory.exists():
                finished.rename(directory)
            tops = {name.split("/")[0] for name in record["leaves"]}
            for name in names(directory):
                if name.startswith(_PROCESS_PREFIX) if self._ocdbt else name in tops:
                    continue
                _remove(directory / name)

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
        directory = self.item_directory
        # A context of its own, so that nothing that was cached before is listed.
        context = ocp.type_handlers.get_ts_context(use_ocdbt=self._ocdbt)
        with stored(os.fspath(directory)):
            roots = [directory]
            if self._ocdbt:
                roots = [directory / name for name in names(directory) if name.startswith(_PROCESS_PREFIX)]
            for root in roots:
                for key in kvstore(os.fspath(root), context, ocdbt=self._ocdbt).list().result():
                    yield os.fsdecode(key)

    def save(self, tree: Any, custom_metadata: Any) -> None:
        """Lets Orbax write all that belongs to the arrays. Called by every process."""
        with stored(self.path):
            # As `Checkpointer.save` does, so that no signal of a save before is taken for one of this.
            synchronization.OperationIdGenerator.next_operation_id()
            self._handler.save(self.item_directory, args=ocp.args.PyTreeSave(tree, custom_metadata=custom_metadata))

    def finish(self, custom_metadata: dict[str, Any] | None) -> None:
        """Makes it a checkpoint, as `Checkpointer.save` does with an item: merges, finishes the item, then the step."""
        self.check()
        with stored(self.path):
            self._metadata.update(
                file_path=self._step_path.get() / STEP_FILE,
                custom_metadata=custom_metadata,
                item_handlers={self._item: self._handler.typestr()},
            )
            self._handler.finalize(self.item_directory)
            asyncio_utils.run_sync(self._item_path.finalize())
            if self._in_place:  # a record does no harm in what is finished; without it, nothing could be taken up
                asyncio_utils.run_sync(self._step_path.finalize())
                self._record.unlink()
            else:
                self._record.unlink()
                asyncio_utils.run_sync(self._step_path.finalize())


def _remove(path: epath.Path) -> None:
    """Deletes a file, a link or a directory with all that is in it."""
    if path.is_dir() and not os.path.islink(path):
        path.rmtree()
    else:
        path.unlink()
