"""Safetensors files as a source of tiles, as stored or as a family maps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import jax
import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices.arrays import check_holdable
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.digest import digest_of
from orbax_safetensors.geometry.tiling import storage_order
from orbax_safetensors.geometry.view import View
from orbax_safetensors.storage.direct import reading
from orbax_safetensors.storage.memory import allocate
from orbax_safetensors.streaming.cutting import request_limits
from orbax_safetensors.streaming.tiles import Tile, planned
from orbax_safetensors.transfer.reader import Reader, direct_offsets

# Shorter runs are read at a fraction of the speed.
_RUN_BYTES = 4096


class SafetensorsSource:
    """The leaves of a checkpoint; those with an entry in `dtypes` are cast. Its files stay open until `close`."""

    decoded = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        views: Mapping[str, View],
        dtypes: Mapping[str, np.dtype],
        memory_bytes: int,
        direct: bool | Literal["auto"],
    ) -> None:
        """Take leaves: `views` of the checkpoint, by any name. Requests take a share of `memory_bytes`.

        `direct` is as in `SafetensorsOptions`, of all bytes of the checkpoint. Raises `TensorMismatchError` if NumPy
        cannot hold a leaf.
        """
        for name, view in views.items():
            try:
                check_holdable(view.shape, view.dtype)
            except TensorMismatchError as error:
                raise TensorMismatchError(f"{checkpoint.path}: {name!r}: {error}") from None
        self.path = checkpoint.path
        self.leaves = {
            name: jax.ShapeDtypeStruct(view.shape, dtypes.get(name, view.dtype)) for name, view in views.items()
        }
        stamps = [(stored.path, stored.stamp.nbytes, stored.stamp.version) for stored in checkpoint.files]
        moved = (stamps, sorted(views.items()), self.leaves, sorted(checkpoint.quantized.items()))
        self.identity = digest_of(moved)
        self.stored_bytes = sum(stored.stamp.nbytes for stored in checkpoint.files)
        store = reading(checkpoint.store, direct, self.stored_bytes)
        self._checkpoint, self._views = replace(checkpoint, store=store), views
        self._limits = request_limits(store.cost, memory_bytes)
        self._reader = Reader(self._checkpoint.open_file, self._limits.requests)
        self.counters = self._reader.counters

    def order(self, name: str) -> tuple[int, ...]:
        """See `TileSource`."""
        return storage_order(self._views[name])

    def atomic_tile(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored row, or of several rows if one is short."""
        shape, dtype = self.leaves[name].shape, self.leaves[name].dtype
        out = [1] * len(shape)
        run = dtype.itemsize
        for axis in self.order(name):
            if run >= _RUN_BYTES:
                break
            out[axis] = shape[axis]
            run *= shape[axis]
        return tuple(out)

    def read(self, tiles: Sequence[Tile], report: Callable[[float], None] | None = None) -> list[np.ndarray]:
        """See `TileSource`."""
        dtypes = [self.leaves[tile.name].dtype for tile in tiles]
        blocks, plan = planned(tiles, dtypes, self._views, self._checkpoint.location, self._limits)
        memory = allocate([block.nbytes for block in blocks], direct_offsets(plan, self._checkpoint.store))
        self._reader.run(plan, blocks, memory, report)
        return [buffer.view(block.dtype).reshape(block.shape) for buffer, block in zip(memory, blocks, strict=True)]

    def check(self) -> None:
        """See `TileSource`."""
        self._reader.check()

    def close(self) -> None:
        """See `TileSource`."""
        self._reader.close()
