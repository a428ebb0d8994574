"""The directory of a checkpoint that is being written: how it begins, is resumed, and becomes a checkpoint.

It has the name that Orbax gives unfinished checkpoints, and Orbax ignores it by that name. On an object store, which
renames nothing, it has its final name, and Orbax ignores it until a file says that it is finished.

Chunks in its store are complete: OCDBT refers to a chunk only once its bytes are written, plain files are renamed into
place, and objects exist whole or not at all. So the store's list of chunks is the record of the work that is done, and
`RECORD_FILE` says only what the work is.

One sink at a time holds `<destination>/.<step>.lock`. On object stores, which have no locks, the record has the number
of the sink that began last, and no other sink can finish the checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.orbax_store._compat import run_sync
from orbax_safetensors.orbax_store.directories import copy, flush, flush_names, fresh, is_on_gcs, make, names, remove
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE, RECORD_FILE, STEP_FILE
from orbax_safetensors.orbax_store.item_writer import ItemWriter, OrbaxItem
from orbax_safetensors.orbax_store.operations import storage_errors
from orbax_safetensors.storage.local import check_makeable
from orbax_safetensors.storage.lock import Lock

logger = logging.getLogger(__name__)


class UnfinishedCheckpoint:
    """An unfinished checkpoint of one or more items. One process only calls `begin`, `check` and `finish`."""

    def __init__(
        self,
        path: str,
        items: Mapping[str, OrbaxItem],
        others: Mapping[str, str],
        *,
        compression: bool,
        fsync: bool,
    ) -> None:
        """Write nothing. `others` are the paths of files and directories to copy, by their new names."""
        self.path, self._others = path, others
        final = epath.Path(path)
        self._metadata = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
        temporary_path = ocp.path.atomicity_defaults.get_default_temporary_path_class(final)
        self._step_path = temporary_path.from_final(final, checkpoint_metadata_store=self._metadata)
        self.items = {
            name: ItemWriter(
                item,
                self._step_path.get(),
                name,
                path if len(items) == 1 else os.path.join(path, name),
                compression=compression,
                fsync=fsync,
            )
            for name, item in items.items()
        }
        self._record = self._step_path.get() / RECORD_FILE
        # Whether the finished checkpoint has the same path, so that only a file in it tells it from an unfinished one.
        self._in_place = is_on_gcs(self.path)
        self._fsync = fsync
        self._run = secrets.token_hex(8)
        self._lock: Lock | None = None

    def begin(self, record: Mapping[str, Any], *, resume: bool) -> None:
        """Make the directories, anew unless `resume` finds some that were begun with the same `record`.

        No other sink can begin until `release`. Raises `StorageError` if another sink is at work, if the checkpoint
        exists, or if something else is in its place, and `TensorMismatchError` if the records differ.
        """
        if not self._in_place:
            destination, name = os.path.split(self.path)
            check_makeable(os.fspath(self._step_path.get()))
            with storage_errors(f"{self._step_path.get()}: cannot be made"):
                make(destination)
                self._lock = Lock(os.path.join(destination, f".{name}.lock"), self.path)
        try:
            self._begin(record, resume=resume)
        except BaseException:
            self.release()
            raise

    def check_place(self) -> None:
        """Raise the `StorageError` of `begin` if something is in the way; write nothing."""
        with storage_errors(self.path):
            if not self._in_place:
                check_makeable(os.fspath(self._step_path.get()))
            self._check_free()
            self._check_place()
            if self._step_path.get().exists():
                self._check_unfinished()

    def release(self) -> None:
        """Let other sinks begin."""
        if self._lock is not None:
            self._lock.release()

    def check(self) -> None:
        """Raise `StorageError` if another sink has begun since."""
        if (self._begun() or {}).get("run") != self._run:
            raise StorageError(f"{self.path}: another save or conversion is writing here")

    def _begin(self, record: Mapping[str, Any], *, resume: bool) -> None:
        with storage_errors(self.path):
            self._check_free()
            self._check_place()
        if resume and (begun := self._begun()) is not None:
            # Compared as JSON has it: without tuples, and with the keys in any order.
            for key, value in json.loads(json.dumps(record)).items():
                if begun.get(key) != value:
                    why = f"{key} was {begun.get(key)!r:.300} when it was begun and is {value!r:.300} now"
                    if key == "source":  # a digest, which says nothing to a reader
                        why = "it was begun from another source, or with other arguments"
                    raise TensorMismatchError(
                        f"{self._step_path.get()}: cannot be resumed: {why}; begin anew without resume"
                    )
            with storage_errors(f"{self._step_path.get()}: cannot be resumed"):
                self._write_record({"run": self._run, **record})
            for item in self.items.values():
                item.reopen()
            with storage_errors(f"{self._step_path.get()}: cannot be resumed"):
                self._copy_others()
            return
        with storage_errors(f"{self._step_path.get()}: cannot be made"):
            if self._step_path.get().exists():
                self._check_unfinished()
                if resume:
                    logger.warning("%s has no record of what it was begun for and is deleted", self._step_path.get())
                self._empty()
            run_sync(self._step_path.create())
            for item in self.items.values():
                item.create()
            self._write_record({"run": self._run, **record})
            if not self._in_place:
                flush_names(os.path.dirname(self.path))
            self._copy_others()

    def _copy_others(self) -> None:
        """Copy all of them, even if some have been copied before: a copy may have been cut short."""
        inside = names(self._step_path.get())
        for name, path in self._others.items():
            if name in inside:
                remove(self._step_path.get() / name)
            copy(epath.Path(path), self._step_path.get() / name)

    def _write_record(self, record: Mapping[str, Any]) -> None:
        if self._in_place:
            self._record.write_text(json.dumps(record))
            return
        new = self._record.with_name(f"{RECORD_FILE}.new")
        with new.open("w") as file:
            file.write(json.dumps(record))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._record)
        flush_names(self._step_path.get())

    def _check_free(self) -> None:
        if (fresh(self.path) / FINISHED_FILE).exists() if self._in_place else os.path.lexists(self.path):
            raise StorageError(f"{self.path}: already exists; choose another destination")

    def _check_place(self) -> None:
        """Raise `StorageError` if something other than a directory is in the place; a symbolic link is not followed."""
        for path in (self._step_path.get(), *(place for item in self.items.values() for place in item.places)):
            if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
                kind = "link" if os.path.islink(path) else "file"
                raise StorageError(f"{path}: is a {kind} and not an unfinished checkpoint; move it away")

    def _check_unfinished(self) -> None:
        """Raise `StorageError` if neither this class nor Orbax has left the directory unfinished.

        Both begin with Orbax's metadata of the step, which has the time of its commit once the step is complete.
        """
        path = self._step_path.get()
        inside = names(path)
        if not inside or RECORD_FILE in inside:
            return
        if STEP_FILE not in inside:
            raise StorageError(f"{path}: is not an unfinished checkpoint, it holds {inside[0]!r}; move it away")
        metadata = self._metadata.read(path / STEP_FILE)
        if isinstance(metadata, dict) and metadata.get("commit_timestamp_nsecs") is not None:
            raise StorageError(f"{path}: is a checkpoint that was finished, as its {STEP_FILE} says; move it away")

    def _empty(self) -> None:
        """Delete the directory; until the end, an empty record says that there is nothing to resume."""
        self._write_record({})
        for name in names(self._step_path.get()):
            if name != RECORD_FILE:
                remove(self._step_path.get() / name)
        self._step_path.get().rmtree()

    def _begun(self) -> Any:
        """Return the record of the unfinished checkpoint; None if there is nothing to resume."""
        try:
            begun = json.loads(self._record.read_bytes())
            if not isinstance(begun, dict):
                raise ValueError(f"expected a dict, found {begun!r:.80}")
            return begun or None
        except FileNotFoundError:
            return None
        except Exception as error:
            raise StorageError(f"{self._record}: cannot be read: {error}; begin anew without resume") from error

    def save(self) -> None:
        """Let Orbax write all that belongs to the arrays. Every process calls this."""
        with storage_errors(self.path):
            for item in self.items.values():
                item.save()

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Make it a checkpoint, as `Checkpointer.save` does: its metadata, then the items, then the whole.

        On a file system, with `fsync`, all is on the disk before it has its name, and the name when this returns.
        """
        self.check()
        unfinished = self._step_path.get()
        with storage_errors(self.path):
            self._metadata.update(file_path=unfinished / STEP_FILE, **metadata)
            for item in self.items.values():
                item.finish()
            if self._in_place:
                run_sync(self._step_path.finalize())
            else:
                self._rename(unfinished)
            # Last: a record does no harm in a finished checkpoint, and an unfinished one cannot be resumed without it.
            (epath.Path(self.path) / RECORD_FILE).unlink()
        if not self._in_place:
            try:
                flush_names(os.path.dirname(self.path))
            except StorageError as error:
                raise StorageError(f"{self.path}: is complete, but may not outlive a crash: {error}") from error

    def _rename(self, unfinished: epath.Path) -> None:
        """Do what Orbax's `finalize` does, but with all files on the disk before the rename."""
        self._metadata.update(file_path=unfinished / STEP_FILE, commit_timestamp_nsecs=time.time_ns())
        (unfinished / FINISHED_FILE).write_text(f"Checkpoint commit was successful to {self.path}")
        if self._fsync:
            flush(unfinished)
        os.rename(unfinished, self.path)
