"""Safetensors files in a directory of a file system as the output of a conversion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orbax_safetensors.checkpoint.model_files import ModelFiles
from orbax_safetensors.cost.conversion import PlannedArray
from orbax_safetensors.geometry.tiling import storage_order
from orbax_safetensors.streaming.bundles import bundles
from orbax_safetensors.streaming.file_layout import Files
from orbax_safetensors.streaming.files_sink import FilesSink
from orbax_safetensors.streaming.pipeline import TileSource, batch_bytes, check_tiles
from orbax_safetensors.streaming.work import Unit


class FilesOutput:
    """A directory of files; see `Output`."""

    last = None
    writers = 2
    arrays: tuple[PlannedArray, ...] = ()

    def __init__(
        self,
        source: TileSource,
        path: str,
        files: Files,
        model_files: ModelFiles,
        groups: Iterable[tuple[str, ...]],
        memory_bytes: int,
    ) -> None:
        """Cut the leaves of `files` into tiles; `groups` are leaves that interleave in the files.

        Raises `SafetensorsError` if memory does not suffice.
        """
        groups = list(groups)
        check_tiles(source, groups, memory_bytes)
        self.path, self.files = path, files.planned
        self.batch_bytes = batch_bytes(memory_bytes)
        self._source, self._files, self._model_files, self._memory_bytes = source, files, model_files, memory_bytes
        grains = {name: (1,) * len(fact.shape) for name, fact in source.leaves.items()}
        orders = {name: storage_order(files.views[name]) for name in source.leaves}
        self.units: Sequence[Unit] = [(bundle,) for bundle in bundles(source, grains, orders, groups, memory_bytes)]

    def _sink(self) -> FilesSink:
        return FilesSink(self.path, self._source.path, self._files, self._model_files, self._memory_bytes)

    def check_place(self) -> None:
        """See `Output`."""
        self._sink().check_place()

    def planned(self, units: Sequence[int]) -> FilesSink:
        """See `Output`."""
        return self._sink()

    def begin(self, *, resume: bool) -> FilesSink:
        """See `Output`."""
        sink = self._sink()
        sink.start(self.units, self._source.identity, resume=resume)
        return sink
