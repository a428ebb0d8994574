"""Safetensors files of a file system as a sink of tiles: many processes write the same files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from orbax_safetensors.checkpoint.model_files import ModelFiles
from orbax_safetensors.errors import StorageError
from orbax_safetensors.format.digest import digest_of
from orbax_safetensors.geometry.tiling import storage_order
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.storage.store import NewFile, write_small
from orbax_safetensors.streaming.cutting import batch_bytes, bundles, check_tiles, request_limits
from orbax_safetensors.streaming.file_layout import Files
from orbax_safetensors.streaming.partial_directory import PartialDirectory
from orbax_safetensors.streaming.sink import Sink
from orbax_safetensors.streaming.tiles import Tile, TileSource, planned
from orbax_safetensors.transfer.writer import Writer


class FilesSink(Sink):
    """Files in a directory, into which every process writes its tiles."""

    workspace: PartialDirectory

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
        self.path = path
        self.batch_bytes = batch_bytes(memory_bytes)
        atomic_tiles = {name: (1,) * leaf.ndim for name, leaf in source.leaves.items()}
        orders = {name: storage_order(files.views[name]) for name in source.leaves}
        self.units = [(bundle,) for bundle in bundles(source, atomic_tiles, orders, groups, memory_bytes)]
        nbytes = sum(header.file_bytes for _, header in files.layout.files)
        self.workspace = PartialDirectory(path, files.digest(source.identity, model_files, self.units), nbytes)
        self._files, self._model_files = files, model_files
        self._store = LocalStore()
        self._writer = Writer(self._create, request_limits(self._store.cost, memory_bytes).requests)
        self.counters = self._writer.counters
        self._created = threading.Event()  # a file was created whose name may not be on the disk
        self._recording = threading.Lock()

    def _open(self) -> None:
        self._numbers = {tile: number for number, tile in enumerate(chain(*chain(*self.units)))}
        self.workspace.open(self._process)

    def _see(self) -> str:
        # Processes share the rest. A network file system may show one of them less; then no process moves some.
        self._done = self.workspace.done()
        return digest_of(sorted(self._done))

    def has(self, unit: int) -> bool:
        """See `Sink`."""
        return all(self._numbers[tile] in self._done for tile in chain(*self.units[unit]))

    def _create(self, number: int) -> NewFile:
        file = self._store.create(self._path(number), sync=True)
        self._created.set()  # last, because another thread may be recording
        return file

    def _path(self, number: int) -> str:
        return os.path.join(self.workspace.directory, self._files.layout.files[number][0])

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """See `Sink`. The disk has the tiles before the record has them, so the record never says too much.

        Every batch is synced: the system forgets bytes that it could not flush, and reports the failure only once. So
        after a failure, which may concern bytes of another thread's batch, nothing is recorded.
        """
        self.check_others()
        self.workspace.check()
        dtypes = [array.dtype for array in arrays]
        blocks, plan = planned(tiles, dtypes, self._files.views, self._files.locations.__getitem__)
        try:
            self._writer.run(plan, blocks, [array.reshape(-1).view(np.uint8) for array in arrays])
            with self._recording:
                if self._failure is None:
                    self._record(tiles, [file.number for file in plan.files])
        except Exception as error:
            self._failure = self._failure or error
        if self._failure is not None:
            raise self._failure

    def _record(self, tiles: Sequence[Tile], files: Sequence[int]) -> None:
        self._writer.sync(files)
        if self._created.is_set():
            self._created.clear()  # before the sync, because a thread may create a file meanwhile
            self._store.sync(self.workspace.directory)
        self.workspace.add([self._numbers[tile] for tile in tiles])

    def _flush(self) -> None:
        """Close the files and the record; a failed write may become known only then."""
        try:
            self.workspace.close()
        finally:
            self._writer.close()

    _stop = _flush

    def _finish(self) -> None:
        """Write the model's files, the index and then the headers, and give the directory its name.

        All bytes are on the disk before the directory has that name.
        """
        directory = self.workspace.directory
        self.workspace.check_complete(len(self._numbers))
        self._model_files.write(self._store, directory, self._files.layout.fingerprints)
        if (index := self._files.layout.index) is not None:
            write_small(self._store, os.path.join(directory, self._files.layout.index_name), index.encode())
        for number, (_, header) in enumerate(self._files.layout.files):
            write_small(self._store, self._path(number), header.encoded, nbytes=header.file_bytes)
            size = os.stat(self._path(number)).st_size
            if size != header.file_bytes:
                raise StorageError(f"{self._path(number)}: expected {header.file_bytes} bytes, found {size}")
        super()._finish()

    def _release(self) -> None:
        try:
            self._flush()
        finally:
            super()._release()
