"""From any source of tiles into safetensors files on an object store, one file after the other.

An object has one writer and appears when all of its bytes have come, best in their order. So processes are dealt whole
files, and move what is in each in the order of its bytes as far as that goes; what comes early waits in memory.

An object that is there is done: that is the record of the work. What the work is stands in the place of the object that
is written last, the index or the last file. Neither of these is what a reader expects, so nothing opens before the end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from orbax_safetensors.cost.conversion import ConversionCost, ConversionPlan, Traffic, traffic_of
from orbax_safetensors.devices.agreement import forget, new_key, together
from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.strided import extent
from orbax_safetensors.geometry.tiling import storage_order, tile_shape, tiles
from orbax_safetensors.geometry.view import View
from orbax_safetensors.storage.remote import READ_ONLY
from orbax_safetensors.storage.store import NewFile, Store, read_small, write_small
from orbax_safetensors.storage.upload import files_at_once, held_bytes
from orbax_safetensors.streaming.bundles import interleaved
from orbax_safetensors.streaming.file_layout import Files
from orbax_safetensors.streaming.model_files import ModelFiles
from orbax_safetensors.streaming.pipeline import (
    Bundle,
    Moved,
    Progress,
    Tile,
    TileSource,
    bundle_bytes,
    is_below,
    nbytes,
    planned,
    share,
    stream,
)
from orbax_safetensors.streaming.to_safetensors import digest
from orbax_safetensors.transfer.engine import WholeFileWriter
from orbax_safetensors.transfer.plan import Block, TransferPlan, transfer_plan

logger = logging.getLogger(__name__)

# A batch is half of what it may be, because what comes early waits besides.
_PARTS_OF_BATCH = 2
_MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class _Part:
    """What goes into one file: tiles in the order of its bytes, and of each leaf the view of the tensors in there."""

    number: int
    bundles: tuple[Bundle, ...]
    views: Mapping[str, View]

    @property
    def tiles(self) -> Bundle:
        return tuple(tile for bundle in self.bundles for tile in bundle)


class ToObjects:
    """All leaves of a source become files on an object store; see `Work`."""

    def __init__(
        self,
        source: TileSource,
        store: Store,
        destination: str,
        files: Files,
        model_files: ModelFiles,
        memory_bytes: int,
    ) -> None:
        """Decides on tiles. Leaves are those of `files`."""
        self.source, self._store, self._destination = source, store, destination
        self._files, self._model_files = files, model_files
        self._limit = max(bundle_bytes(memory_bytes) // _PARTS_OF_BATCH, 1)
        self._parts = list(_parts(files, source, self._limit))

    def _draft(self) -> _Draft:
        # A file that is there is whole, however it was cut.
        told = digest(self.source, self._files, self._model_files, ())
        return _Draft(self._store, self._destination, self._files, self._model_files, told)

    def _check_outside(self) -> None:
        if is_below(self.source.path, self._destination):
            raise StorageError(f"{self.source.path}: is in {self._destination}, which is to be made")

    def _sink(self) -> _Sink:
        paths = [posixpath.join(self._destination, name) for name, _ in self._files.layout.files]
        # Parts that are on their way may take as much as a batch, which is a quarter of this.
        pace = self._store.cost.pace(None, None, 4 * self._limit)
        return _Sink(self._store, paths, self._files, pace.requests)

    def _dealt(self, left: Sequence[_Part], last_file: int | None, process: int, count: int) -> _Dealt:
        # What stands in the place of the last object is replaced when all others are there, by the one that did that.
        last = [part for part in left if part.number == last_file]
        own = share(
            [part for part in left if part.number != last_file],
            lambda part: nbytes(part.tiles, self.source.leaves),
            process,
            count,
        )
        return _Dealt(own, last if process == 0 else [])

    def plan(self, process_count: int) -> ConversionPlan:
        """See `Work`."""
        draft, sink = self._draft(), self._sink()
        self._check_outside()
        draft.check()

        def cost(process: int) -> ConversionCost:
            dealt = self._dealt(self._parts, draft.last_file, process, process_count)
            return ConversionCost(
                tuple(
                    batch
                    for some in dealt
                    for batch in planned(self.source, sink.of(some), _bundles(some), self._limit)
                )
            )

        return ConversionPlan(
            self._destination,
            tuple(cost(process) for process in range(process_count)),
            files=self._files.planned,
            arrays=(),
            source_bytes=self.source.stored_bytes,
            from_orbax=self.source.decoded,
        )

    def run(self, *, resume: bool, progress: Progress | None) -> Moved:
        """See `Work`. Files that are there by then stay where it fails."""
        source, store, destination = self.source, self._store, self._destination
        draft = self._draft()
        key = new_key(f"convert/{hashlib.sha256(destination.encode('utf-8', 'backslashreplace')).hexdigest()}")
        primary = jax.process_index() == 0

        def begin() -> None:
            self._check_outside()
            if primary:
                draft.begin(resume=resume)

        together(f"{key}/begin", begin, draft.digest)
        done = together(f"{key}/done", draft.done, lambda done: repr(sorted(done)))
        left = [part for part in self._parts if part.number not in done]
        own, last = self._dealt(left, draft.last_file, jax.process_index(), jax.process_count())
        sink = self._sink()
        tiles = [tile for part in (*own, *last) for tile in part.tiles]
        total = nbytes(tiles, source.leaves)
        if source.decoded and (read := source.traffic(tiles).moved_bytes) > total:
            logger.warning(
                "%s: %d bytes of chunks are read for %d bytes of arrays, because chunks that belong to several files "
                "are read for each of them, and for several tiles of one; with more memory there are fewer of both",
                source.path,
                read,
                total,
            )
        moved = 0

        def move(some: Sequence[_Part]) -> int:
            def told(here: int, _: int) -> None:
                if progress is not None:
                    progress(moved + here, total)

            here = stream(source, sink.of(some), _bundles(some), self._limit, told)
            source.check()
            sink.finish(some)
            return here

        def finish() -> int:
            if not primary:
                return 0
            self._model_files.write(store, destination)
            here = move(last)
            if (index := self._files.layout.index) is not None:
                write_small(store, posixpath.join(destination, INDEX_NAME), index.encode())
            return here

        with closing(sink):
            moved = together(f"{key}/tiles", lambda: move(own))
            moved += together(f"{key}/finish", finish)
        for name in ("begin", "done", "tiles"):
            forget(f"{key}/{name}")
        return Moved(destination, sink.nbytes, source.requests + sink.requests)


class _Dealt(NamedTuple):
    """What one process moves: first its own files, and then, when all others are there, the last one."""

    own: list[_Part]
    last: list[_Part]


def _bundles(parts: Sequence[_Part]) -> list[Bundle]:
    return [bundle for part in parts for bundle in part.bundles]


class _Draft:
    """What is unfinished. `begin` is called by one process."""

    def __init__(self, store: Store, destination: str, files: Files, model_files: ModelFiles, digest: str) -> None:
        self._store, self._destination, self.digest = store, destination, digest
        self._names = [name for name, _ in files.layout.files]
        self._all_names = sorted({*self._names, *model_files.names, INDEX_NAME})
        # The number of the file that is written last; none where that is the index.
        self.last_file = len(self._names) - 1 if files.layout.index is None else None
        self._record = posixpath.join(destination, INDEX_NAME if self.last_file is None else self._names[-1])

    def check(self) -> dict[str, Any] | None:
        """The record of what was begun in its place, if anything; touches nothing.

        Raises `StorageError` where something else is there.
        """
        if not self._store.writes:
            raise StorageError(f"{self._destination}: {READ_ONLY}")
        names = self._store.list(self._destination) or []
        begun = self._begun(self._record)
        if other := sorted(set(names).difference(begun["names"] if begun else ())):
            # Other layouts have their record in other places: the index, or the last file.
            last = max((name for name in names if name.endswith(".safetensors")), default=INDEX_NAME)
            if any(self._begun(posixpath.join(self._destination, name)) for name in {INDEX_NAME, last} & {*other}):
                raise StorageError(
                    f"{self._destination}: holds what another conversion has begun, of another layout or with other "
                    "arguments; finish it with resume (--resume) and the arguments that it was begun with, or delete it"
                )
            raise StorageError(f"{self._destination}: already exists, and holds {other[0]!r}; move it away")
        return begun

    def begin(self, *, resume: bool) -> None:
        """Makes the record, unless `resume` finds one; what else has begun there and is not finished is deleted.

        Raises `StorageError` where something else is there, and `TensorMismatchError` where something else was begun.
        """
        begun = self.check()
        if resume and begun is not None:
            if begun["unfinished"] != self.digest:
                raise TensorMismatchError(
                    f"{self._destination}: cannot be taken up again: it was begun of another source, or with other "
                    "arguments; begin anew without resume"
                )
            return
        if begun is not None:
            self._store.delete(self._destination)
        record = {"unfinished": self.digest, "names": self._all_names}
        write_small(self._store, self._record, json.dumps(record).encode())

    def _begun(self, path: str) -> dict[str, Any] | None:
        """The record of what was begun, if there is one."""
        file = self._store.find(path)
        if file is None:
            return None
        if file.stamp.nbytes > _MAX_RECORD_BYTES:
            file.close()
            return None
        try:
            record = json.loads(read_small(file, _MAX_RECORD_BYTES))
        except ValueError:
            return None
        return record if isinstance(record, dict) and {"unfinished", "names"} == record.keys() else None

    def done(self) -> set[int]:
        """The numbers of the files that are there."""
        names = set(self._store.list(self._destination) or ())
        return {number for number, name in enumerate(self._names) if name in names and number != self.last_file}


class _Sink:
    """Files that this process writes alone."""

    def __init__(self, store: Store, paths: Sequence[str], files: Files, requests: int) -> None:
        self._store, self._paths, self._files = store, paths, files
        self._writer = WholeFileWriter(self._create, requests)
        _, self._requests_of_file = files_at_once(requests)
        self._coming: Iterator[_Part] = iter(())
        self._kept: list[tuple[_Part, Tile, np.ndarray]] = []
        # Of a plan.
        self._kept_bytes = self._part_bytes = 0

    def of(self, parts: Sequence[_Part]) -> _Sink:
        """The sink for the tiles of `parts`, which have to come in this order."""
        self._kept_bytes = 0
        sizes = [self._files.layout.files[part.number][1].file_bytes for part in parts]
        self._part_bytes = max((held_bytes(size, self._requests_of_file) for size in sizes), default=0)
        self._coming = (part for part in parts for _ in part.tiles)
        return self

    def _create(self, number: int) -> NewFile:
        header = self._files.layout.files[number][1]
        file = self._store.create(self._paths[number], header.file_bytes, self._requests_of_file)
        file.write(0, [memoryview(header.encode())])
        return file

    @property
    def requests(self) -> int:
        """See `TileSink`."""
        return self._writer.counters.num_requests

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that it has written."""
        return self._writer.counters.nbytes

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """See `TileSink`. The last batch is kept until `finish`, and with it the objects that it completes."""
        before, self._kept = (
            self._kept,
            [(next(self._coming), tile, array) for tile, array in zip(tiles, arrays, strict=True)],
        )
        self._write(before)

    def _write(self, coming: Sequence[tuple[_Part, Tile, np.ndarray]]) -> None:
        left = iter(coming)
        for blocks, plan in self._planned([(part, tile, array.dtype) for part, tile, array in coming]):
            memory = [array.reshape(-1).view(np.uint8) for _, (_, _, array) in zip(blocks, left, strict=False)]
            self._writer.run(plan, blocks, memory)

    def traffic(self, tiles: Sequence[Tile], dtypes: Sequence[np.dtype]) -> Traffic:
        """See `PlannedSink`. Files are written one after the other, in parts, while the batch before is kept."""
        coming = [(next(self._coming), tile, dtype) for tile, dtype in zip(tiles, dtypes, strict=True)]
        streams = self._writer.useful_threads(1)
        of_file = [traffic_of(plan, self._paths, streams) for _, plan in self._planned(coming)]
        kept, self._kept_bytes = (
            self._kept_bytes,
            sum(prod(tile.shape) * dtype.itemsize for _, tile, dtype in coming),
        )
        return Traffic(
            sum(one.needed_bytes for one in of_file),
            sum(one.moved_bytes for one in of_file),
            sum(one.num_requests for one in of_file),
            staging_bytes=kept + max(one.staging_bytes for one in of_file) + self._part_bytes,
            streams=streams,
            files=tuple(file for one in of_file for file in one.files),
        )

    def _planned(self, coming: Sequence[tuple[_Part, Tile, np.dtype]]) -> Iterator[tuple[list[Block], TransferPlan]]:
        """Blocks of tiles, and how they are written, file by file."""
        for _, of_file in groupby(coming, key=lambda one: one[0].number):
            blocks = [Block(part.views[tile.name], tile.box, tile.shape, dtype) for part, tile, dtype in of_file]
            yield blocks, transfer_plan(blocks, self._files.locations.__getitem__, max_gap_bytes=0)

    def finish(self, parts: Sequence[_Part]) -> None:
        """Writes what was kept, and waits until the files of `parts` are there, those without tensors as well."""
        kept, self._kept = self._kept, []
        self._write(kept)
        self._writer.finish([part.number for part in parts])

    def close(self) -> None:
        """Gives up what is not whole."""
        self._writer.close()


def _parts(files: Files, source: TileSource, limit: int) -> Iterator[_Part]:
    """What goes into each file, in tiles of at most `limit` bytes."""
    views: list[dict[str, View]] = [{} for _ in files.layout.files]
    for name, view in files.views.items():
        numbers = [files.locations[piece.tensor].file if piece.tensor else None for piece in view.pieces]
        for number in {number for number in numbers if number is not None}:
            pieces = tuple(piece for piece, of in zip(view.pieces, numbers, strict=True) if of == number)
            views[number][name] = replace(view, pieces=pieces)
    for number, own in enumerate(views):
        cuts: list[tuple[int, Bundle]] = []
        for names in interleaved(own):
            elements = {name: limit // len(names) // source.leaves[name].dtype.itemsize for name in names}
            boxes = [list(_boxes(own[name], elements[name])) for name in names]
            if len(set(map(tuple, boxes))) == 1:  # their elements lie beside each other
                bundles = [tuple(Tile(name, box) for name in names) for box in boxes[0]]
            else:
                bundles = [(Tile(name, box),) for name, of_leaf in zip(names, boxes, strict=True) for box in of_leaf]
            cuts += [(min(_first_byte(own[tile.name], tile.box, files) for tile in one), one) for one in bundles]
        yield _Part(number, tuple(bundle for _, bundle in sorted(cuts)), own)


def _boxes(view: View, limit: int) -> Iterator[Box]:
    """Boxes of at most `limit` elements that the pieces of a view make up."""
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
    """Where the first element of a box lies in its file; 0 where none of its elements does."""
    begins = (
        files.locations[name].begin + copy.source * files.locations[name].dtype.itemsize
        for name, copy, _ in view.copies(box, box.shape)
        if name is not None
    )
    return min(begins, default=0)
