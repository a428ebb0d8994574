"""Safetensors files on an object store as a sink of tiles.

An object has one writer and appears when all of its bytes have come, best in their order. So each process gets whole
files, and moves the tiles of each in the order of its bytes as far as possible; tiles that come early wait in memory.

Finished objects record the work done: an object that is there is done. A record of what is converted stands in the
place of the object that is written last, the index or the last file. No reader accepts it, so nothing opens before the
end.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.model_files import ModelFiles
from orbax_safetensors.errors import StorageError
from orbax_safetensors.format import strict_json
from orbax_safetensors.format.index import SUFFIX
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.strided import extent
from orbax_safetensors.geometry.tiling import storage_order, tile_shape, tiles
from orbax_safetensors.geometry.view import View
from orbax_safetensors.storage.remote import READ_ONLY
from orbax_safetensors.storage.store import NewFile, Store, read_small, write_small
from orbax_safetensors.storage.upload import files_at_once
from orbax_safetensors.storage.workspace import Workspace
from orbax_safetensors.streaming.cutting import bundle_bytes, bundled, check_tiles, interleaved
from orbax_safetensors.streaming.file_layout import Files
from orbax_safetensors.streaming.sink import Sink
from orbax_safetensors.streaming.tiles import Bundle, Tile, TileSource, Unit, nbytes, planned
from orbax_safetensors.transfer.writer import WholeFileWriter

logger = logging.getLogger(__name__)


# A batch is half of its limit, because tiles that come early wait beside it.
_PARTS_OF_BATCH = 2
_MAX_RECORD_BYTES = 1 << 20


class ObjectsSink(Sink):
    """A directory of objects, of which this process writes some alone."""

    workspace: UnfinishedObjects
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
        self.path = path
        self.batch_bytes = max(bundle_bytes(memory_bytes) // _PARTS_OF_BATCH, 1)
        # A file that is there is whole, however it was cut into tiles.
        digest = files.digest(source.identity, model_files, ())
        self.workspace = UnfinishedObjects(store, path, files, model_files, digest)
        self._source, self._store, self._files, self._model_files = source, store, files, model_files
        file_units = list(_file_units(files, source, self.batch_bytes))
        self.units = [unit for unit, _ in file_units]
        self._views = [views for _, views in file_units]
        # The record stands in the place of the last object, the index or a file, until all other objects are there.
        self.last = len(self.units) - 1 if files.layout.index is None else None
        # Parts in flight may take as much as a batch, which is a quarter of this.
        requests = store.cost.request_limits(None, None, 4 * self.batch_bytes).requests
        self._writer = WholeFileWriter(self._create, requests)
        self.counters = self._writer.counters
        _, self._requests_of_file = files_at_once(requests)
        self._done: set[int] = set()  # the files of an earlier run
        self._expected: list[int] = []
        self._coming: Iterator[int] = iter(())  # the file of each tile
        self._kept: list[tuple[int, Tile, np.ndarray]] = []

    def _see(self) -> str:
        self._done = self.workspace.done()
        return repr(sorted(self._done))

    def has(self, unit: int) -> bool:
        """See `Sink`."""
        return unit in self._done

    def expect(self, units: Sequence[int]) -> None:
        """See `Sink`. Warns if chunks of the source will be read several times."""
        self._expected = list(units)
        self._coming = (unit for unit in units for _ in self._tiles(unit))
        if not self._source.decoded:
            return
        tiles = [tile for unit in units for tile in self._tiles(unit)]
        total = nbytes(tiles, self._source.leaves)
        if (read := nbytes((_whole_chunks(tile, self._source) for tile in tiles), self._source.leaves)) > total:
            logger.warning(
                "%s: %d bytes of chunks are read for %d bytes of arrays, because chunks that belong to several files "
                "are read for each of them, and again for each part of a large file; more memory makes both fewer",
                self._source.path,
                read,
                total,
            )

    def _tiles(self, unit: int) -> Iterator[Tile]:
        return (tile for bundle in self.units[unit] for tile in bundle)

    def _create(self, number: int) -> NewFile:
        name, header = self._files.layout.files[number]
        file = self._store.create(posixpath.join(self.path, name), header.file_bytes, self._requests_of_file)
        file.write(0, [memoryview(header.encoded)])
        return file

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """See `Sink`. The last batch is kept until `commit`, and with it the objects that it completes."""
        self.check_others()
        before, self._kept = (
            self._kept,
            [(next(self._coming), tile, array) for tile, array in zip(tiles, arrays, strict=True)],
        )
        self._write(before)

    def _write(self, coming: Sequence[tuple[int, Tile, np.ndarray]]) -> None:
        for number, of_file in groupby(coming, key=itemgetter(0)):
            _, tiles, arrays = zip(*of_file, strict=True)
            dtypes = [array.dtype for array in arrays]
            blocks, plan = planned(tiles, dtypes, self._views[number], self._files.locations.__getitem__)
            self._writer.run(plan, blocks, [array.reshape(-1).view(np.uint8) for array in arrays])

    def _flush(self) -> None:
        """Write the kept batch, and wait until the files are there, also files without tensors."""
        self._write_kept([unit for unit in self._expected if unit != self.last])

    def _write_kept(self, files: Sequence[int]) -> None:
        kept, self._kept = self._kept, []
        self._write(kept)
        self._writer.finish(files)

    def _finish(self) -> None:
        self._model_files.write(self._store, self.path, self._files.layout.fingerprints)
        self._write_kept([unit for unit in self._expected if unit == self.last])
        super()._finish()

    def _release(self) -> None:
        """Give up files that are not whole."""
        self._writer.close()


class UnfinishedObjects(Workspace):
    """An unfinished conversion in a directory."""

    def __init__(self, store: Store, path: str, files: Files, model_files: ModelFiles, digest: str) -> None:
        """Touch nothing. `digest` identifies the content that is written."""
        self._store, self._layout = store, files.layout
        self.destination = self.path = path
        self._names = [name for name, _ in files.layout.files]
        copied = {name.partition("/")[0] for name in model_files.names}  # as a listing has them
        self.record = {"unfinished": digest, "names": sorted({*self._names, *copied, files.layout.index_name})}
        self._last_name = self._names[-1] if files.layout.index is None else files.layout.index_name
        self._record_path = posixpath.join(path, self._last_name)

    def check_destination(self) -> None:
        """See `Workspace`."""
        if not self._store.writes:
            raise StorageError(f"{self.path}: {READ_ONLY}")
        names = set(self._store.list(self.path) or ())
        begun = self._begun()
        if other := sorted(names.difference(begun["names"] if begun else ())):
            # Other layouts have their record in another place: the index, or the last file.
            last = max((name for name in names if name.endswith(SUFFIX)), default=self._layout.index_name)
            records = {INDEX_NAME, self._layout.index_name, last} & {*other}
            if any(self._read(posixpath.join(self.path, name)) for name in records):
                raise StorageError(
                    f"{self.path}: holds what another conversion has begun, of another layout or with other "
                    "arguments; finish it with resume (--resume) and the arguments that it was begun with, or delete it"
                )
            raise StorageError(f"{self.path}: already exists, and holds {other[0]!r}; move it away")

    def _begun(self) -> dict[str, Any] | None:
        return self._read(self._record_path)

    def _take_up(self) -> None:
        """Do nothing: what is there is done."""

    def _make(self) -> None:
        if self._begun() is not None:
            self._store.delete(self.path, self._store.below(self.path))
        write_small(self._store, self._record_path, json.dumps(self.record).encode())

    def finish(self) -> None:
        """See `Workspace`. The index takes the place of the record, unless the last file has done so."""
        if (index := self._layout.index) is not None:
            write_small(self._store, self._record_path, index.encode())

    def _read(self, path: str) -> dict[str, Any] | None:
        """Return the record in a file; None if the file is not there or is not a record."""
        file = self._store.find(path)
        if file is None:
            return None
        if file.stamp.nbytes > _MAX_RECORD_BYTES:
            file.close()
            return None
        try:
            record = strict_json.loads(read_small(file, _MAX_RECORD_BYTES))
        except ValueError:
            return None
        return record if isinstance(record, dict) and {"unfinished", "names"} == record.keys() else None

    def done(self) -> set[int]:
        """Return the numbers of the files that are there, except the file that is written last."""
        names = set(self._store.list(self.path) or ())
        return {number for number, name in enumerate(self._names) if name in names and name != self._last_name}


def _whole_chunks(tile: Tile, source: TileSource) -> Tile:
    """Return all that is read of a source for a tile: the chunks that it touches."""
    chunk_shape = [max(chunk, 1) for chunk in source.atomic_tile(tile.name)]  # 0 along empty dimensions
    sides = zip(tile.box, chunk_shape, source.leaves[tile.name].shape, strict=True)
    box = Box((start // chunk * chunk, min(-(-stop // chunk) * chunk, size)) for (start, stop), chunk, size in sides)
    return Tile(tile.name, box)


def _file_units(files: Files, source: TileSource, limit: int) -> Iterator[tuple[Unit, Mapping[str, View]]]:
    """Yield the tiles of each file in the order of its bytes, and of each leaf the view of the tensors in the file.

    Tiles have at most `limit` bytes.
    """
    views: list[dict[str, View]] = [{} for _ in files.layout.files]
    for name, view in files.views.items():
        numbers = [files.locations[piece.tensor].file if piece.tensor else None for piece in view.pieces]
        for number in {number for number in numbers if number is not None}:
            pieces = tuple(piece for piece, of in zip(view.pieces, numbers, strict=True) if of == number)
            views[number][name] = replace(view, pieces=pieces)
    for file_views in views:
        cuts: list[tuple[int, Bundle]] = []
        for names in interleaved(file_views):
            limits = {name: limit // len(names) // source.leaves[name].dtype.itemsize for name in names}
            boxes = {name: list(_boxes(file_views[name], limits[name])) for name in names}
            cuts += [
                (min(_first_byte(file_views[tile.name], tile.box, files) for tile in bundle), bundle)
                for bundle in bundled(boxes)
            ]
        yield tuple(bundle for _, bundle in sorted(cuts)), file_views


def _boxes(view: View, limit: int) -> Iterator[Box]:
    """Yield boxes of at most `limit` elements that the pieces of a view make up."""
    pieces = [
        Box((start, start + extent(modes)) for start, modes in zip(piece.start, piece.dims, strict=True))
        for piece in view.pieces
    ]
    hull = Box.hull(pieces)
    order = storage_order(view)
    for whole in [hull] if hull.volume == sum(piece.volume for piece in pieces) else pieces:
        shape = whole.shape
        for box in tiles(shape, tile_shape(shape, (1,) * len(shape), order, max(limit, 1)), order):
            yield Box((low + first, low + last) for low, (first, last) in zip(whole.start, box, strict=True))


def _first_byte(view: View, box: Box, files: Files) -> int:
    """Return the offset in its file of the first element of a box; 0 if no element lies in a file."""
    begins = (
        files.locations[name].begin + copy.source * files.locations[name].dtype.itemsize
        for name, copy, _ in view.copies(box, box.shape)
        if name is not None
    )
    return min(begins, default=0)
