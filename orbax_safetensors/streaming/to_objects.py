"""From any source of tiles into safetensors files on an object store, one file after the other.

An object has one writer and appears when all of its bytes have come, best in their order. So processes are dealt whole
files, and move what is in each in the order of its bytes as far as that goes; what comes early waits in memory.

An object that is there is done: that is the record of the work. What the work is stands in the place of the object that
is written last, the index or the last file. Neither of these is what a reader expects, so nothing opens before the end.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import jax
import numpy as np

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.io.remote import READ_ONLY
from orbax_safetensors.io.store import NewFile, Store, read_small, write_small
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.plan.conversion import ConversionCost, ConversionPlan, Traffic, traffic_of
from orbax_safetensors.plan.plan import Block, TransferPlan, transfer_plan
from orbax_safetensors.plan.strided import extent
from orbax_safetensors.plan.tiling import storage_order, tile_shape, tiles
from orbax_safetensors.plan.view import Box, View
from orbax_safetensors.processes import agree, forget, new_key, together
from orbax_safetensors.streaming.beside import Beside
from orbax_safetensors.streaming.layouts import Files
from orbax_safetensors.streaming.pipeline import (
    Bundle,
    Moved,
    Progress,
    Tile,
    TileSource,
    batch_bytes,
    nbytes,
    planned,
    share,
    stream,
)
from orbax_safetensors.streaming.to_safetensors import digest
from orbax_safetensors.transfer import WholeFileWriter

# A batch is half of what it may be, because what comes early waits besides.
_PARTS_OF_BATCH = 2
_MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class _Part:
    """What goes into one file: tiles in the order of its bytes, and of each leaf the view of the tensors in there."""

    number: int
    tiles: Bundle
    views: Mapping[str, View]


class ToObjects:
    """All leaves of a source become files on an object store; see `Work`."""

    def __init__(
        self,
        source: TileSource,
        store: Store,
        destination: str,
        files: Files,
        beside: Beside,
        options: SafetensorsOptions,
        memory_bytes: int,
    ) -> None:
        """Decides on tiles. Leaves are those of `files`."""
        self.source, self._store, self._destination = source, store, destination
        self._files, self._beside, self._options = files, beside, options
        self._limit = max(batch_bytes(memory_bytes) // _PARTS_OF_BATCH, 1)
        self._parts = list(_parts(files, source, self._limit))

    def _draft(self) -> _Draft:
        told = digest(self.source, self._files, self._beside, [part.tiles for part in self._parts])
        return _Draft(self._store, self._destination, self._files, told)

    def _sink(self) -> _Sink:
        paths = [posixpath.join(self._destination, name) for name, _ in self._files.layout.files]
        return _Sink(self._store, paths, self._files, self._options)

    def _dealt(self, left: Sequence[_Part], last_file: int | None, process: int, count: int) -> _Dealt:
        # What stands in the place of the last object is replaced when all others are there, by the one that did that.
        last = [part for part in left if part.number == last_file]
        own = share(
            [part for part in left if part not in last],
            lambda part: nbytes(part.tiles, self.source.leaves),
            process,
            count,
        )
        return _Dealt(own, last if process == 0 else [])

    def plan(self, process_count: int) -> ConversionPlan:
        """See `Work`."""
        draft, sink = self._draft(), self._sink()
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
        together(f"{key}/begin", lambda: draft.begin(resume=resume) if primary else None, draft.digest)
        done = together(f"{key}/done", draft.done)
        agree(f"{key}/seen", None, repr(sorted(done)))
        left = [part for part in self._parts if part.number not in done]
        own, last = self._dealt(left, draft.last_file, jax.process_index(), jax.process_count())
        sink = self._sink()
        total = sum(nbytes(part.tiles, source.leaves) for part in (*own, *last))
        moved = 0

        def move(some: Sequence[_Part]) -> int:
            def told(here: int, _: int) -> None:
                if progress is not None:
                    progress(moved + here, total)

            here = stream(source, sink.of(some), _bundles(some), self._limit, told)
            sink.finish(some)
            return here

        def move_own() -> int:
            here = move(own)
            source.check()
            return here

        def finish() -> int:
            if not primary:
                return 0
            self._beside.write(store, destination)
            here = move(last)
            source.check()
            if (index := self._files.layout.index) is not None:
                write_small(store, posixpath.join(destination, INDEX_NAME), index.encode())
            return here

        with closing(sink):
            moved = together(f"{key}/tiles", move_own)
            moved += together(f"{key}/finish", finish)
        for name in ("begin", "done", "seen", "tiles"):
            forget(f"{key}/{name}")
        return Moved(destination, moved, source.requests + sink.requests)


class _Dealt(NamedTuple):
    """What one process moves: first its own files, and then, when all others are there, the last one."""

    own: list[_Part]
    last: list[_Part]


def _bundles(parts: Sequence[_Part]) -> list[Bundle]:
    return [(tile,) for part in parts for tile in part.tiles]


class _Draft:
    """What is unfinished. `begin` is called by one process."""

    def __init__(self, store: Store, destination: str, files: Files, digest: str) -> None:
        self._store, self._destination, self.digest = store, destination, digest
        self._names = [name for name, _ in files.layout.files]
        # The number of the file that is written last; none where that is the index.
        self.last_file = len(self._names) - 1 if files.layout.index is None else None
        self._record = posixpath.join(destination, INDEX_NAME if self.last_file is None else self._names[-1])

    def check(self) -> str | None:
        """The digest of what was begun in its place, if anything; touches nothing.

        Raises `StorageError` where something else is there.
        """
        if not self._store.writes:
            raise StorageError(f"{self._destination}: {READ_ONLY}")
        names = self._store.list(self._destination) or []
        begun = self._begun()
        if names and begun is None:
            raise StorageError(f"{self._destination}: already exists, and holds {names[0]!r}")
        return begun

    def begin(self, *, resume: bool) -> None:
        """Makes the record, unless `resume` finds one; what else has begun there and is not finished is deleted.

        Raises `StorageError` where something else is there, and `TensorMismatchError` where something else was begun.
        """
        begun = self.check()
        if resume and begun is not None:
            if begun != self.digest:
                raise TensorMismatchError(
                    f"{self._destination}: cannot be taken up again: it was begun of another source, or with other "
                    "arguments; begin anew without resume"
                )
            return
        if begun is not None:
            self._store.delete(self._destination)
        write_small(self._store, self._record, json.dumps({"unfinished": self.digest}).encode())

    def _begun(self) -> str | None:
        """The digest of what was begun under the name of this one's record."""
        file = self._store.find(self._record)
        if file is None:
            return None
        if file.stamp.nbytes > _MAX_RECORD_BYTES:
            file.close()
            return None
        try:
            record = json.loads(read_small(file, _MAX_RECORD_BYTES))
        except ValueError:
            return None
        found = record.get("unfinished") if isinstance(record, dict) else None
        return found if isinstance(found, str) else None

    def done(self) -> set[int]:
        """The numbers of the files that are there."""
        names = set(self._store.list(self._destination) or ())
        return {number for number, name in enumerate(self._names) if name in names and number != self.last_file}


class _Sink:
    """Files that this process writes alone."""

    def __init__(self, store: Store, paths: Sequence[str], files: Files, options: SafetensorsOptions) -> None:
        self._store, self._paths, self._files = store, paths, files
        pace = store.cost.pace(options.threads, options.max_gap_bytes, options.in_flight_bytes)
        self._writer = WholeFileWriter(self._create, pace.requests)
        self._coming: Iterator[_Part] = iter(())

    def of(self, parts: Sequence[_Part]) -> _Sink:
        """The sink for the tiles of `parts`, which have to come in this order."""
        self._coming = (part for part in parts for _ in part.tiles)
        return self

    def _create(self, number: int) -> NewFile:
        header = self._files.layout.files[number][1]
        file = self._store.create(self._paths[number], header.file_bytes)
        file.write(0, [memoryview(header.encode())])
        return file

    @property
    def requests(self) -> int:
        """See `TileSink`."""
        return self._writer.counters.num_requests

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """See `TileSink`."""
        of_file = self._planned(tiles, [array.dtype for array in arrays])
        left = iter(arrays)
        for blocks, plan in of_file:
            self._writer.run(plan, blocks, [next(left).reshape(-1).view(np.uint8) for _ in blocks])

    def traffic(self, tiles: Sequence[Tile], dtypes: Sequence[np.dtype]) -> Traffic:
        """See `PlannedSink`. Files are written one after the other."""
        plans = [plan for _, plan in self._planned(tiles, dtypes)]
        of_file = [traffic_of(plan, self._paths, self._writer.useful_threads(1)) for plan in plans]
        return Traffic(
            sum(one.needed_bytes for one in of_file),
            sum(one.moved_bytes for one in of_file),
            sum(one.num_requests for one in of_file),
            staging_bytes=max(one.staging_bytes for one in of_file),
            streams=max(one.streams for one in of_file),
            files=tuple(file for one in of_file for file in one.files),
        )

    def _planned(self, tiles: Sequence[Tile], dtypes: Sequence[np.dtype]) -> Iterator[tuple[list[Block], TransferPlan]]:
        """Blocks of the next of the tiles that come, and how they are written, file by file."""
        coming = [(next(self._coming), tile, dtype) for tile, dtype in zip(tiles, dtypes, strict=True)]
        for _, of_file in groupby(coming, key=lambda one: one[0].number):
            blocks = [Block(part.views[tile.name], tile.box, tile.shape, dtype) for part, tile, dtype in of_file]
            yield blocks, transfer_plan(blocks, self._files.locations.__getitem__, max_gap_bytes=0)

    def finish(self, parts: Sequence[_Part]) -> None:
        """Waits until the files of `parts` are there, those without tensors as well."""
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
        cuts = []
        for name, view in own.items():
            itemsize = source.leaves[name].dtype.itemsize
            for box in _boxes(view, max(limit // itemsize, 1)):
                cuts.append((_first_byte(view, box, files), Tile(name, box)))
        yield _Part(number, tuple(tile for _, tile in sorted(cuts)), own)


def _boxes(view: View, limit: int) -> Iterator[Box]:
    """Boxes of at most `limit` elements that the pieces of a view are in."""
    ranges = [
        [(start, start + extent(modes)) for start, modes in zip(piece.start, piece.dims, strict=True)]
        for piece in view.pieces
    ]
    low = [min(start for start, _ in own) for own in zip(*ranges, strict=True)]
    high = [max(end for _, end in own) for own in zip(*ranges, strict=True)]
    shape = [end - start for start, end in zip(low, high, strict=True)]
    order = storage_order(view)
    for box in tiles(shape, tile_shape(shape, (1,) * len(shape), order, limit), order):
        yield tuple((start + first, start + last) for start, (first, last) in zip(low, box, strict=True))


def _first_byte(view: View, box: Box, files: Files) -> int:
    """Where the first element of a box lies in its file; 0 where none of its elements does."""
    begins = (
        files.locations[name].begin + copy.source * files.locations[name].dtype.itemsize
        for name, copy, _ in view.copies(box, [stop - start for start, stop in box])
        if name is not None
    )
    return min(begins, default=0)
