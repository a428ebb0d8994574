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
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from etils import epath

from orbax_safetensors.errors import StorageError, TensorMismatchError, storage_errors
from orbax_safetensors.format import strict_json
from orbax_safetensors.orbax_store.directories import (
    absolute,
    copied_nbytes,
    copy,
    flush,
    fresh,
    is_on_gcs,
    names,
    read_bytes,
    remove,
)
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE, RECORD_FILE, STEP_FILE, UNFINISHED, unfinished_path
from orbax_safetensors.orbax_store.item_writer import ItemWriter, OrbaxItem, array_name
from orbax_safetensors.orbax_store.leaf import OrbaxLeaf
from orbax_safetensors.orbax_store.metadata import HANDLER, begun_record, finished_record, finished_text
from orbax_safetensors.storage.local import LocalStore, write_whole
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.replace import remove as remove_if_there
from orbax_safetensors.storage.workspace import Workspace, already_running_error

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class UnfinishedCheckpoint(Workspace):
    """An unfinished checkpoint of one or more items.

    Attributes:
      destination: the directory of the finished checkpoint.
      items: what writes each item, by name.
      leaves: the arrays of all items with the chunks that are written, see `named`.
      compression: whether chunks are compressed.
    """

    kind = "checkpoint"

    def __init__(
        self,
        path: PathLike,
        items: Mapping[str, OrbaxItem],
        *,
        metadata: Mapping[str, Any] | None = None,
        others: Mapping[str, str] | None = None,
        compression: bool = True,
        source: str = "",
    ) -> None:
        """Decide how arrays are stored, and write nothing.

        Args:
          path: the directory of the checkpoint, which must not exist, or its `gs://` URL.
          items: by name; a single item without a name is stored in the directory itself.
          metadata: JSON that Orbax records of the checkpoint: `custom_metadata`, as MaxText's `{"scan_layers": True}`,
            and other keys that it knows. `item_handlers` are by default those of trees.
          others: paths of files and directories to copy beside the items, by their new names.
          compression: compress chunks as Orbax does.
          source: tells sources of equal shapes apart; compared when a run resumes.

        Raises `StorageError` for a path that cannot hold a checkpoint, and `TensorMismatchError` if a leaf cannot be
        stored.
        """
        self.destination = absolute(path)
        if UNFINISHED in self.destination:
            raise StorageError(
                f"{self.destination}: choose a path without {UNFINISHED}, by which Orbax knows unfinished checkpoints"
            )
        self._others, self.compression = others or {}, compression
        for document in (metadata, *(item.custom_metadata for item in items.values())):
            try:
                json.dumps(document)
            except (TypeError, ValueError) as error:
                raise TensorMismatchError(f"{self.destination}: custom metadata must be JSON: {error}") from error
        handlers = dict.fromkeys(items, HANDLER)
        self._metadata = {"custom_metadata": None, "item_handlers": handlers.get("", handlers), **(metadata or {})}
        recorded = self._metadata["item_handlers"]
        self._metadata["item_handlers"] = (
            {name: _handler(handler) if name in items else handler for name, handler in recorded.items()}
            if isinstance(recorded, dict)
            else _handler(recorded)
        )
        self.directory = unfinished_path(epath.Path(self.destination))
        self.path = os.fspath(self.directory)
        # Whether the finished checkpoint has the same path, so that only a file in it tells it from an unfinished one.
        self._in_place = is_on_gcs(self.destination)
        if not self._in_place:
            parent, name = os.path.split(self.destination)
            self.locked = os.path.join(parent, f".{name}.lock")
        self.items = {
            name: ItemWriter(
                item,
                self.directory,
                name,
                self.destination if len(items) == 1 else os.path.join(self.destination, name),
                compression=compression,
            )
            for name, item in items.items()
        }
        self.leaves: Mapping[str, OrbaxLeaf] = self.named(lambda item: item.leaves)
        # Nobody knows how short chunks become if they are compressed: those of zeros take nothing.
        if not compression:
            others_nbytes = sum(copied_nbytes(epath.Path(other)) for other in self._others.values())
            self.nbytes = sum(leaf.stored_nbytes for leaf in self.leaves.values()) + others_nbytes
        self.record = {
            "compression": compression,
            "source": source,
            "items": list(items),
            "others": list(self._others),
            **self.named(lambda item: item.record),
        }
        self._record_path = self.directory / RECORD_FILE

    def named(self, facts: Callable[[ItemWriter], Mapping[str, _T]]) -> dict[str, _T]:
        """Return what `facts` says of the arrays of all items, by names that are unique in the checkpoint."""
        return {
            array_name(self.items, item, name): value
            for item, writer in self.items.items()
            for name, value in facts(writer).items()
        }

    def check_destination(self) -> None:
        """See `Workspace`. A symbolic link is not followed."""
        with storage_errors(self.destination):
            super().check_destination()
            of_items = (os.fspath(directory) for item in self.items.values() for directory in item.directories)
            for path in (self.path, *of_items):
                self._check_directory(path)
            if self.directory.exists():
                self._check_unfinished()

    def check(self) -> None:
        """See `Workspace`."""
        if (self._begun() or {}).get("run") != self.run:
            raise already_running_error(self.destination)

    def _check_same(self, begun: Mapping[str, Any]) -> None:
        # Compared as JSON has it: without tuples, and with the keys in any order.
        for key, value in json.loads(json.dumps(self.record)).items():
            if begun.get(key) != value:
                if key == "source":  # a digest, which says nothing to a reader
                    super()._check_same(begun)
                if isinstance(value, dict) and isinstance(begun.get(key), dict):  # the leaves of an item
                    self._check_chunks(begun[key], value)
                raise self._mismatch(f"{key} was {begun.get(key)!r:.300} when it was begun and is {value!r:.300} now")

    def _check_chunks(self, begun: Mapping[str, Any], leaves: Mapping[str, list[Any]]) -> None:
        """Raise `TensorMismatchError` if only the chunks of a leaf differ, given the `record` of the leaves."""
        for name, facts in leaves.items():
            match begun.get(name):
                case [*others, list(chunk)] if others == facts[:-1] and chunk != facts[-1]:
                    raise self._mismatch(
                        f"{name!r} was cut into {chunk} and would be cut into {facts[-1]}",
                        "pass the mesh, spec and memory of the first run (--mesh, --spec, --memory), or ",
                    )

    def _take_up(self) -> None:
        with storage_errors(f"{self.path}: cannot be resumed"):
            self._write_record({"run": self.run, **self.record})
            for item in self.items.values():
                item.reopen()
            self._copy_others()

    def _make(self) -> None:
        with storage_errors(f"{self.path}: cannot be made"):
            if self.directory.exists():
                self._empty()
            if not self._in_place:
                self.directory.mkdir()
            (self.directory / STEP_FILE).write_text(begun_record())
            for item in self.items.values():
                item.create()
            self._write_record({"run": self.run, **self.record})
            if not self._in_place:
                LocalStore().sync(os.path.dirname(self.path))
            self._copy_others()

    def _copy_others(self) -> None:
        """Copy all of them, even if some have been copied before: a copy may have been cut short."""
        inside = names(self.directory)
        for name, path in self._others.items():
            if name in inside:
                remove(self.directory / name)
            copy(epath.Path(path), self.directory / name)

    def _write_record(self, record: Mapping[str, Any]) -> None:
        if self._in_place:
            self._record_path.write_text(json.dumps(record))
        else:
            write_whole(os.fspath(self._record_path), json.dumps(record))

    def check_free(self) -> None:
        """See `Workspace`."""
        if not self._in_place:
            super().check_free()
        elif (fresh(self.path) / FINISHED_FILE).exists():
            raise self._exists()

    def _check_unfinished(self) -> None:
        """Raise `StorageError` if neither this class nor Orbax has left the directory unfinished.

        Both begin with Orbax's metadata of the step, which has the time of its commit once the step is complete.
        """
        inside = names(self.directory)
        if not inside or RECORD_FILE in inside:
            return
        if STEP_FILE not in inside:
            raise self._not_ours(self.path, inside[0])
        if self._step_record().get("commit_timestamp_nsecs") is not None:
            raise StorageError(f"{self.path}: is a checkpoint that was finished, as its {STEP_FILE} says; move it away")

    def _empty(self) -> None:
        """Delete the directory; until the end, an empty record says that there is nothing to resume."""
        self._write_record({})
        for name in names(self.directory):
            if name != RECORD_FILE:
                remove(self.directory / name)
        self.directory.rmtree()

    def _begun(self) -> Any:
        """Return the record of the unfinished checkpoint; None if there is nothing to resume."""
        try:
            if (content := read_bytes(self._record_path)) is None:
                return None
            begun = strict_json.loads(content)
            if not isinstance(begun, dict):
                raise ValueError(f"expected a dict, found {begun!r:.80}")
            return begun or None
        except ValueError as error:
            raise StorageError(f"{self._record_path}: cannot be read: {error}; begin anew without resume") from error

    def finish(self) -> None:
        """See `Workspace`. Finishes the items, then Orbax's record of the step, then the whole.

        On a file system, all is on the disk before it has its name, and the name when this returns.
        """
        self.check()
        with storage_errors(self.destination):
            for item in self.items.values():
                item.finish()
            record = finished_record(self._step_record(), self._metadata)
            (self.directory / STEP_FILE).write_text(record)
            (self.directory / FINISHED_FILE).write_text(finished_text(self.destination))
            if not self._in_place:
                flush(self.directory)
                os.rename(self.path, self.destination)
            # Last: a record does no harm in a finished checkpoint, and an unfinished one cannot be resumed without it.
            (epath.Path(self.destination) / RECORD_FILE).unlink()
        if not self._in_place:
            self._sync_name()

    def _tidy(self) -> None:
        """See `Workspace`: the record in the finished checkpoint, if an interrupt has left it there."""
        remove_if_there(os.path.join(self.destination, RECORD_FILE))

    def _step_record(self) -> dict[str, Any]:
        """Return Orbax's record of the step; {} if there is none, or one that was cut short."""
        try:
            record = strict_json.loads(read_bytes(self.directory / STEP_FILE) or b"")
        except ValueError:
            return {}
        return record if isinstance(record, dict) else {}


def _handler(recorded: Any) -> Any:
    """Return the handler of an item that has Orbax's arrays: not one of this package, which looks for safetensors."""
    is_own = isinstance(recorded, str) and recorded.partition(".")[0] == __name__.partition(".")[0]
    return HANDLER if is_own else recorded
