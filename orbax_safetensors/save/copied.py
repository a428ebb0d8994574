"""Tensors that a save copies from the checkpoint it is like: those for which the saved tree has no leaf."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.tiling import storage_order, tile_shape, tiles
from orbax_safetensors.geometry.view import View
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from orbax_safetensors.streaming.tiles import Tile

# What is read at a time of one tensor; an asynchronous save holds no more than a few of these.
_TILE_BYTES = 64 * 2**20
# Tensors that follow from others or from the config, and of which a copy would be wrong once the others are trained:
# tied heads, DeepSeek's second copies of embedding and head, old tables of RoPE.
_FOLLOWING = re.compile(
    r"(.+\.)?(lm_head|shared_head\.head)\.weight|head\.weight|.+\.layers\.\d+\.embed_tokens\.weight"
    r"|(.+\.)?inv_freq"
)


def follows(name: str) -> bool:
    """Return whether the stored tensor `name`, which no leaf uses, follows from others or from the config."""
    return _FOLLOWING.fullmatch(name) is not None


@dataclass(frozen=True, eq=False)
class StoredArray:
    """A tensor of a checkpoint in place of an array, read when it is written; decoded if the checkpoint decodes it."""

    checkpoint: Checkpoint
    view: View
    options: SafetensorsOptions

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in memory."""
        return self.view.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype in memory: `uint8` if an element is less than a byte."""
        return self.view.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read the whole tensor."""
        (array,) = read([(self, Box.whole(self.shape))])
        return array.astype(dtype or array.dtype, copy=False)

    def boxes(self) -> list[Box]:
        """Return boxes that make up the tensor and are small enough to be read one by one."""
        if not prod(self.shape):
            return [Box.whole(self.shape)]
        order = storage_order(self.view)
        limit = _TILE_BYTES // self.dtype.itemsize
        return list(tiles(self.shape, tile_shape(self.shape, [1] * len(self.shape), order, limit), order))


def copied_leaves(checkpoint: Checkpoint, names: Iterable[str], options: SafetensorsOptions) -> list[Leaf]:
    """Return a leaf of a `StoredArray` for each of the tensors `names`."""
    arrays = {name: StoredArray(checkpoint, checkpoint.view(name), options) for name in names}
    return [
        Leaf(name, array, array.dtype, View.tensor(name, array.shape, array.dtype)) for name, array in arrays.items()
    ]


def read(parts: Sequence[tuple[StoredArray, Box]]) -> list[np.ndarray]:
    """Return boxes of tensors of one checkpoint.

    Raises `StorageError` if they cannot be read, or if the files have changed since the checkpoint was opened.
    """
    if not parts:
        return []
    checkpoint, options = parts[0][0].checkpoint, parts[0][0].options
    views = {str(number): array.view for number, (array, _) in enumerate(parts)}
    with closing(SafetensorsSource(checkpoint, views, {}, options.in_flight_bytes, options.direct)) as source:
        arrays = source.read([Tile(str(number), box) for number, (_, box) in enumerate(parts)])
        source.check()
    return arrays
