"""Safetensors files as a sink of tiles."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from orbax_safetensors.cost.conversion import Traffic, traffic_of
from orbax_safetensors.errors import StorageError
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.storage.store import NewFile, Store, write_small
from orbax_safetensors.streaming.draft import Draft
from orbax_safetensors.streaming.file_layout import Files
from orbax_safetensors.streaming.model_files import ModelFiles
from orbax_safetensors.streaming.pipeline import Tile, pace
from orbax_safetensors.transfer.engine import Writer
from orbax_safetensors.transfer.plan import Block, TransferPlan, transfer_plan


class SafetensorsSink:
    """Files in the directory of a draft, which this process writes its tiles of."""

    def __init__(
        self,
        draft: Draft,
        files: Files,
        numbers: Mapping[Tile, int],
        store: Store,
        memory_bytes: int,
    ) -> None:
        """`draft` is open; `numbers` are those by which it records tiles. Requests take a share of `memory_bytes`."""
        self._draft, self._files, self._numbers, self._store = draft, files, numbers, store
        self._paths = [os.path.join(draft.directory, name) for name, _ in files.layout.files]
        self._writer = Writer(self._create, pace(store.cost, memory_bytes).requests)
        self._created = False  # a file whose name may not be on the disk

    def _create(self, number: int) -> NewFile:
        self._created = True
        return self._store.create(self._paths[number])

    @property
    def requests(self) -> int:
        """Writes so far."""
        return self._writer.counters.num_requests

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that it has written."""
        return self._writer.counters.nbytes

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """See `TileSink`. The disk has the tiles before they are recorded, and the record never says too much.

        That is not left to the end: what the system could not flush it forgets, and says so only once.
        """
        self._draft.check()
        blocks, plan = self._planned(tiles, [array.dtype for array in arrays])
        self._writer.run(plan, blocks, [array.reshape(-1).view(np.uint8) for array in arrays])
        self._writer.sync()
        if self._created:
            self._store.sync(self._draft.directory)
            self._created = False
        self._draft.add([self._numbers[tile] for tile in tiles])

    def traffic(self, tiles: Sequence[Tile], dtypes: Sequence[np.dtype]) -> Traffic:
        """See `PlannedSink`. The draft need not be open; files have the paths that they will have in the end."""
        _, plan = self._planned(tiles, dtypes)
        final = [os.path.join(self._draft.destination, name) for name, _ in self._files.layout.files]
        return traffic_of(plan, final, self._writer.useful_threads(len(plan.files)))

    def _planned(self, tiles: Sequence[Tile], dtypes: Sequence[np.dtype]) -> tuple[list[Block], TransferPlan]:
        blocks = [
            Block(self._files.views[tile.name], tile.box, tile.shape, dtype)
            for tile, dtype in zip(tiles, dtypes, strict=True)
        ]
        return blocks, transfer_plan(blocks, self._files.locations.__getitem__, max_gap_bytes=0)

    def close(self) -> None:
        """Closes the files, which may be what tells that a write failed."""
        try:
            self._draft.close()
        finally:
            self._writer.close()

    def finish(self, model_files: ModelFiles) -> None:
        """Writes `model_files`, the index and then the headers, and gives the directory its name.

        Called by one process, after all have closed. All is on the disk before it has that name.
        """
        directory = self._draft.directory
        model_files.write(self._store, directory)
        if (index := self._files.layout.index) is not None:
            write_small(self._store, os.path.join(directory, INDEX_NAME), index.encode())
        for number, (_, header) in enumerate(self._files.layout.files):
            write_small(self._store, self._paths[number], header.encode())
            found = os.stat(self._paths[number]).st_size
            if found != header.file_bytes:
                raise StorageError(f"{self._paths[number]}: expected {header.file_bytes} bytes, found {found}")
        self._draft.finish()
