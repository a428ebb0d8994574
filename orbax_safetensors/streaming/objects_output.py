"""Safetensors files on an object store as the output of a conversion.

An object has one writer and appears when all of its bytes have come, best in their order. So each process gets whole
files, and moves the tiles of each in the order of its bytes as far as possible; tiles that come early wait in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from orbax_safetensors.checkpoint.model_files import ModelFiles
from orbax_safetensors.cost.conversion import PlannedArray
from orbax_safetensors.storage.store import Store
from orbax_safetensors.streaming.bundles import interleaved
from orbax_safetensors.streaming.file_layout import Files
from orbax_safetensors.streaming.file_units import file_units
from orbax_safetensors.streaming.objects_sink import ObjectsSink
from orbax_safetensors.streaming.pipeline import TileSource, bundle_bytes, check_tiles
from orbax_safetensors.streaming.work import Unit

# A batch is half of its limit, because tiles that come early wait beside it.
_PARTS_OF_BATCH = 2


class ObjectsOutput:
    """A directory of objects; see `Output`."""

    arrays: tuple[PlannedArray, ...] = ()
    writers = 1  # the bytes of an object come in their order

    def __init__(
        self,
        source: TileSource,
        store: Store,
        path: str,
        files: Files,
        model_files: ModelFiles,
        memory_bytes: int,
    ) -> None:
        """Cut the leaves of `files` into tiles. Raises `SafetensorsError` if memory does not suffice."""
        check_tiles(source, interleaved(files.views), memory_bytes)
        self.path, self.files = path, files.planned
        self.batch_bytes = max(bundle_bytes(memory_bytes) // _PARTS_OF_BATCH, 1)
        self._source, self._store, self._files, self._model_files = source, store, files, model_files
        self._of_files = list(file_units(files, source, self.batch_bytes))
        self.units: Sequence[Unit] = [unit.bundles for unit in self._of_files]
        # The record stands in the place of the last object, the index or a file, until all other objects are there.
        self.last = len(self.units) - 1 if files.layout.index is None else None

    def _sink(self) -> ObjectsSink:
        # Parts in flight may take as much as a batch, which is a quarter of this.
        requests = self._store.cost.pace(None, None, 4 * self.batch_bytes).requests
        return ObjectsSink(
            self._source, self._store, self.path, self._files, self._model_files, self._of_files, requests
        )

    def check_place(self) -> None:
        """See `Output`."""
        self._sink().check_place()

    def planned(self, units: Sequence[int]) -> ObjectsSink:
        """See `Output`."""
        sink = self._sink()
        sink.take(units)
        return sink

    def begin(self, *, resume: bool) -> ObjectsSink:
        """See `Output`."""
        sink = self._sink()
        sink.start(self.last, resume=resume)
        return sink
