"""How items are to be stored as a checkpoint of Orbax: checked, and in the chunks that Orbax makes. Writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.orbax_store.directories import absolute
from orbax_safetensors.orbax_store.discovery import STEP_FILE, UNFINISHED
from orbax_safetensors.orbax_store.item_writer import ItemWriter, OrbaxItem, array_name
from orbax_safetensors.orbax_store.leaf import OrbaxLeaf
from orbax_safetensors.orbax_store.unfinished import UnfinishedCheckpoint
from orbax_safetensors.storage.paths import PathLike

_T = TypeVar("_T")


class OrbaxLayout:
    """What `OrbaxSink` writes.

    Attributes:
      path: the directory of the finished checkpoint.
      unfinished: the checkpoint until then.
      leaves: its arrays as in `OrbaxSink`, with the chunks that are written.
      metadata: what Orbax is to record of it.
      compression: whether chunks are compressed.
    """

    def __init__(
        self,
        path: PathLike,
        items: Mapping[str, OrbaxItem],
        *,
        metadata: Mapping[str, Any] | None,
        others: Mapping[str, str] | None,
        compression: bool,
        fsync: bool = True,
    ) -> None:
        """Take the arguments of `OrbaxSink`, and raise its errors."""
        self.path = absolute(path)
        if UNFINISHED in self.path:
            raise StorageError(
                f"{self.path}: choose a path without {UNFINISHED}, by which Orbax knows unfinished checkpoints"
            )
        self.compression = compression
        self._check_options(items, metadata or {}, others or {})
        self.unfinished = UnfinishedCheckpoint(self.path, items, others or {}, compression=compression, fsync=fsync)
        handlers = {name: item.typestr for name, item in self.unfinished.items.items()}
        self.metadata = {"custom_metadata": None, "item_handlers": handlers.get("", handlers), **(metadata or {})}
        self._names = {"items": list(items), "others": list(others or {})}
        self.leaves: Mapping[str, OrbaxLeaf] = self.named(lambda item: item.leaves)

    def record(self, source: str) -> dict[str, Any]:
        """Return JSON that differs from the record of any other checkpoint that may have been begun at this path."""
        record: dict[str, Any] = {"compression": self.compression, "source": source, **self._names}
        return record | self.named(lambda item: item.record)

    def named(self, of_item: Callable[[ItemWriter], Mapping[str, _T]]) -> dict[str, _T]:
        """Return what `of_item` says of the arrays of all items, by names that are unique in the checkpoint."""
        items = self.unfinished.items
        return {
            array_name(items, item, name): value
            for item, unfinished in items.items()
            for name, value in of_item(unfinished).items()
        }

    def _check_options(
        self, items: Mapping[str, OrbaxItem], metadata: Mapping[str, Any], others: Mapping[str, str]
    ) -> None:
        for name in (*items, *others):
            if not isinstance(name, str) or name in (".", "..", STEP_FILE) or "/" in name or UNFINISHED in name:
                raise TensorMismatchError(f"{self.path}: expected the name of an item, found {name!r}")
        if not items or ("" in (*items, *others) and (len(items) > 1 or others)) or items.keys() & others.keys():
            raise TensorMismatchError(
                f"{self.path}: expected items of different names, or one without, found {[*items, *others]}"
            )
        custom_metadata = metadata.get("custom_metadata")
        if custom_metadata is not None and not isinstance(custom_metadata, dict):
            raise TensorMismatchError(f"{self.path}: expected a dict of custom metadata, found {custom_metadata!r}")
        for document in (metadata, *(item.custom_metadata for item in items.values())):
            try:
                json.dumps(document)
            except (TypeError, ValueError) as error:
                raise TensorMismatchError(f"{self.path}: custom metadata must be JSON: {error}") from error
