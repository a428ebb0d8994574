"""Safetensors files on an object store as a sink of tiles: each file is written by one process."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from math import prod
from operator import itemgetter

import numpy as np

from orbax_safetensors.checkpoint.header_record import write_header_record
from orbax_safetensors.checkpoint.model_files import ModelFiles
from orbax_safetensors.cost.conversion import Traffic, traffic_of
from orbax_safetensors.devices.joint_sink import JointSink
from orbax_safetensors.errors import StorageError
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.orbax_store.index_note import fingerprints
from orbax_safetensors.storage.store import NewFile, Store, write_small
from orbax_safetensors.storage.upload import files_at_once, held_bytes
from orbax_safetensors.streaming.file_layout import Files
from orbax_safetensors.streaming.file_units import FileUnit
from orbax_safetensors.streaming.pipeline import Tile, TileSource, is_below, nbytes
from orbax_safetensors.streaming.unfinished_objects import UnfinishedObjects
from orbax_safetensors.transfer.plan import Block, TransferPlan, transfer_plan
from orbax_safetensors.transfer.writer import WholeFileWriter

logger = logging.getLogger(__name__)


class ObjectsSink(JointSink):
    """Files, by number, of which this process writes some alone."""

    def __init__(
        self,
        source: TileSource,
        store: Store,
        path: str,
        files: Files,
        model_files: ModelFiles,
        units: Sequence[FileUnit],
        requests: int,
    ) -> None:
        """Touch nothing. `units` has the unit of each of `files`; at most `requests` are in flight."""
        self.path = path
        self._source, self._store, self._files, self._units = source, store, files, units
        self._model_files = model_files
        self._paths = [posixpath.join(path, name) for name, _ in files.layout.files]
        self._writer = WholeFileWriter(self._create, requests)
        _, self._requests_of_file = files_at_once(requests)
        self._last: int | None = None
        self._expected: list[int] = []
        self._coming: Iterator[int] = iter(())  # the file of each tile
        self._kept: list[tuple[int, Tile, np.ndarray]] = []
        # For `traffic` only.
        self._kept_bytes = self._part_bytes = 0

    @cached_property
    def _unfinished(self) -> UnfinishedObjects:
        # A file that is there is whole, however it was cut into tiles.
        digest = self._files.digest(self._source.identity, self._model_files, ())
        return UnfinishedObjects(self._store, self.path, self._files, self._model_files, digest)

    def start(self, last: int | None, *, resume: bool) -> None:
        """Begin, together with all other processes; `last` is the number of the file that is written last."""
        self._last = last

        def plan() -> str:
            self._check_outside()
            return self._unfinished.digest

        self._start("convert", plan, resume=resume)

    def check_place(self) -> None:
        """Raise `StorageError` if something is in the way; touch nothing."""
        self._check_outside()
        self._unfinished.check()

    def _check_outside(self) -> None:
        if is_below(self._source.path, self.path):
            raise StorageError(f"{self._source.path}: is in {self.path}, which is to be made")

    def _begin(self, *, resume: bool) -> None:
        self._unfinished.begin(resume=resume)

    def _see(self) -> str:
        self._done = self._unfinished.done()
        return repr(sorted(self._done))

    def has(self, unit: int) -> bool:
        """See `OutputSink`."""
        return unit in self._done

    def expect(self, units: Sequence[int]) -> None:
        """See `OutputSink`. Warns if chunks of the source will be read several times."""
        self.take(units)
        tiles = [tile for unit in units for tile in self._tiles(unit)]
        total = nbytes(tiles, self._source.leaves)
        if self._source.decoded and (read := self._source.traffic(tiles).moved_bytes) > total:
            logger.warning(
                "%s: %d bytes of chunks are read for %d bytes of arrays, because chunks that belong to several files "
                "are read for each of them, and again for each part of a large file; more memory makes both fewer",
                self._source.path,
                read,
                total,
            )

    def take(self, units: Sequence[int]) -> None:
        """Expect the tiles of these files next, in this order."""
        self._expected = list(units)
        sizes = [self._files.layout.files[unit][1].file_bytes for unit in units]
        self._part_bytes = max((held_bytes(size, self._requests_of_file) for size in sizes), default=0)
        self._coming = (unit for unit in units for _ in self._tiles(unit))

    def _tiles(self, unit: int) -> Iterator[Tile]:
        return (tile for bundle in self._units[unit].bundles for tile in bundle)

    def _create(self, number: int) -> NewFile:
        header = self._files.layout.files[number][1]
        file = self._store.create(self._paths[number], header.file_bytes, self._requests_of_file)
        file.write(0, [memoryview(header.encoded)])
        return file

    @property
    def requests(self) -> int:
        """See `OutputSink`."""
        return self._writer.counters.num_requests

    @property
    def nbytes(self) -> int:
        """See `OutputSink`."""
        return self._writer.counters.nbytes

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """See `TileSink`. The last batch is kept until `commit`, and with it the objects that it completes."""
        self.check_others()
        before, self._kept = (
            self._kept,
            [(next(self._coming), tile, array) for tile, array in zip(tiles, arrays, strict=True)],
        )
        self._write(before)

    def _write(self, coming: Sequence[tuple[int, Tile, np.ndarray]]) -> None:
        left = iter(coming)
        for blocks, plan in self._planned([(file, tile, array.dtype) for file, tile, array in coming]):
            memory = [array.reshape(-1).view(np.uint8) for _, (_, _, array) in zip(blocks, left, strict=False)]
            self._writer.run(plan, blocks, memory)

    def traffic(self, tiles: Sequence[Tile], dtypes: Sequence[np.dtype]) -> Traffic:
        """See `PlannedSink`. Files are written one after the other, in parts, while the previous batch is kept."""
        coming = [(next(self._coming), tile, dtype) for tile, dtype in zip(tiles, dtypes, strict=True)]
        streams = self._writer.useful_threads(1)
        of_file = [traffic_of(plan, self._paths, streams) for _, plan in self._planned(coming)]
        kept, self._kept_bytes = (
            self._kept_bytes,
            sum(prod(tile.shape) * dtype.itemsize for _, tile, dtype in coming),
        )
        return Traffic(
            sum(traffic.needed_bytes for traffic in of_file),
            sum(traffic.moved_bytes for traffic in of_file),
            sum(traffic.num_requests for traffic in of_file),
            staging_bytes=kept + max(traffic.staging_bytes for traffic in of_file) + self._part_bytes,
            streams=streams,
            files=tuple(file for traffic in of_file for file in traffic.files),
        )

    def _planned(self, coming: Sequence[tuple[int, Tile, np.dtype]]) -> Iterator[tuple[list[Block], TransferPlan]]:
        """Yield blocks of tiles, and how they are written, file by file."""
        for number, of_file in groupby(coming, key=itemgetter(0)):
            views = self._units[number].views
            blocks = [Block(views[tile.name], tile.box, tile.shape, dtype) for _, tile, dtype in of_file]
            yield blocks, transfer_plan(blocks, self._files.locations.__getitem__, max_gap_bytes=0)

    def _flush(self) -> None:
        """Write the kept batch, and wait until the files are there, also files without tensors."""
        self._write_kept([unit for unit in self._expected if unit != self._last])

    def _write_kept(self, files: Sequence[int]) -> None:
        kept, self._kept = self._kept, []
        self._write(kept)
        self._writer.finish(files)

    def _complete(self) -> None:
        if self._is_first:
            self._model_files.write(self._store, self.path, fingerprints(self._files.layout))

    def _finish(self) -> None:
        self._write_kept([unit for unit in self._expected if unit == self._last])
        if (index := self._files.layout.index) is not None:
            write_small(self._store, posixpath.join(self.path, INDEX_NAME), index.encode())
        write_header_record(self._store, self.path, [name for name, _ in self._files.layout.files])

    def _release(self) -> None:
        """Give up files that are not whole."""
        self._writer.close()
