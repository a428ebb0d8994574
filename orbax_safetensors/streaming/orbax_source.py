"""An Orbax checkpoint as a source of tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import jax
import numpy as np

from orbax_safetensors.errors import StorageError
from orbax_safetensors.format.digest import digest_of
from orbax_safetensors.orbax_store import OrbaxCheckpoint, OrbaxStep
from orbax_safetensors.orbax_store.leaf import num_chunks, touched_nbytes
from orbax_safetensors.orbax_store.operations import finish_all
from orbax_safetensors.storage.memory import allocate
from orbax_safetensors.streaming.cutting import check_fits
from orbax_safetensors.streaming.tiles import Tile
from orbax_safetensors.transfer.engine import Counters

# Compressed chunks hold less than this many bytes for each of theirs: of zeros that stock Orbax saves, up to 30,700; of
# anything, about 32,768, which is the limit of Zstandard. Beyond `_SMALL`, files that are to hold more have metadata of
# arrays that nobody has stored, and would be moved as zeros for years.
_MOST_DECODED = 2**18
_SMALL = 2**34

ItemArray = tuple[OrbaxCheckpoint, str]  # an item, and the name of one of its arrays


class OrbaxSource:
    """The arrays of a checkpoint, of one item or of several."""

    decoded = True

    def __init__(
        self, checkpoint: OrbaxCheckpoint | OrbaxStep, stored: Mapping[str, ItemArray], memory_bytes: int
    ) -> None:
        """Take leaves: `stored` has the array of each. `check` looks at all files of `checkpoint`.

        Raises `SafetensorsError` if a chunk does not fit into `memory_bytes`, and `StorageError` if the files cannot
        hold as much as the arrays have.
        """
        self.path = checkpoint.path
        self._checkpoint, self._stored = checkpoint, stored
        self._arrays = {name: item.leaves[array] for name, (item, array) in stored.items()}
        self.leaves = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in self._arrays.items()}
        for name, leaf in self._arrays.items():
            check_fits(name, leaf.chunk_nbytes, memory_bytes)
        total = sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves.values())
        if total > _SMALL and (files := checkpoint.stored_bytes()) is not None and total > _MOST_DECODED * files:
            raise StorageError(f"{self.path}: files of {files} bytes cannot hold its arrays, of {total} bytes")
        self._state = checkpoint.state()
        arrays = sorted((name, item.path, array) for name, (item, array) in stored.items())
        moved = (checkpoint.path, sorted(self._state.items()), arrays)
        self.identity = digest_of(moved)
        self.counters = Counters()

    @property
    def stored_bytes(self) -> int | None:
        """See `TileSource`."""
        return self._checkpoint.stored_bytes()

    def order(self, name: str) -> tuple[int, ...]:
        """Return the axes, those with the fewest chunks first."""
        grid = self._arrays[name].grid
        return tuple(sorted(range(len(grid)), key=lambda axis: (grid[axis], -axis)))

    def atomic_tile(self, name: str) -> tuple[int, ...]:
        """Return the shape of a chunk."""
        leaf = self._arrays[name]
        return tuple(min(chunk, size) for chunk, size in zip(leaf.chunk_shape, leaf.shape, strict=True))

    def read(self, tiles: Sequence[Tile], report: Callable[[float], None] | None = None) -> list[np.ndarray]:
        """See `TileSource`."""
        dtypes = [self.leaves[tile.name].dtype for tile in tiles]
        memory = allocate([prod(tile.box.shape) * dtype.itemsize for tile, dtype in zip(tiles, dtypes, strict=True)])
        arrays = [
            buffer.view(dtype).reshape(tile.box.shape)
            for buffer, dtype, tile in zip(memory, dtypes, tiles, strict=True)
        ]
        finish_all(
            item.read(name, tile.box, array)
            for tile, array in zip(tiles, arrays, strict=True)
            for item, name in [self._stored[tile.name]]
        )
        self.counters.num_requests += sum(num_chunks(tile.box, self._arrays[tile.name]) for tile in tiles)
        self.counters.nbytes += sum(touched_nbytes(tile.box, self._arrays[tile.name]) for tile in tiles)
        return arrays

    def check(self) -> None:
        """See `TileSource`."""
        state = self._checkpoint.state()
        if state != self._state:
            changed = sorted(set(state.items()) ^ set(self._state.items()))[0][0]
            raise StorageError(f"{self._checkpoint.path}: {changed} changed while the checkpoint was in use")

    def close(self) -> None:
        """See `TileSource`."""
