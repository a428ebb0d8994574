"""What an Orbax checkpoint says of its leaves without their values, and the boxes that they are stored in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.geometry.box import Box

# Orbax's names of the kinds of leaves, as `_METADATA` has them.
JAX_ARRAY, NUMPY_ARRAY, SCALAR, STRING = "jax.Array", "np.ndarray", "scalar", "string"
ARRAYS = (JAX_ARRAY, NUMPY_ARRAY)

# Orbax's names of the kinds of empty nodes, and what it restores them as.
EMPTY_NODES: dict[str, Any] = {"Dict": {}, "List": [], "Tuple": (), "None": None, "NamedTuple": None}

# Under this key Orbax records the implementation of random keys with their data.
RANDOM_KEY = "random_key_impl"


@dataclass(frozen=True, slots=True)
class OrbaxLeaf:
    """One leaf that is not empty.

    Attributes:
      shape: `()` for a scalar and a string.
      dtype: `np.str_` for a string.
      chunk_shape: the shape that is stored and encoded at once; at the end of a dimension that it does not divide, a
        chunk has padding.
      kind: `jax.Array`, `np.ndarray`, `scalar` or `string`: what Orbax restores by default.
      write_shape: the shape of the shards that are written, if it is not that of the chunks.
      sharding: the recorded sharding of a `jax.Array`; it needs no devices.
      random_key: the implementation of the random keys whose data this is, for which Orbax returns keys.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_shape: tuple[int, ...]
    kind: str = JAX_ARRAY
    write_shape: tuple[int, ...] | None = None
    sharding: ocp.metadata.ShardingMetadata | None = None
    random_key: str | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the number of chunks in every dimension."""
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def chunk_nbytes(self) -> int:
        """Return the decoded size of a whole chunk."""
        return prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def stored_nbytes(self) -> int:
        """Return the decoded size of all chunks: those at the edges are stored whole."""
        return prod(self.grid) * self.chunk_nbytes


def chunks_of(box: Box, leaf: OrbaxLeaf) -> Box:
    """Return the chunks that a box touches, as a box of the grid."""
    return Box((start // chunk, -(-stop // chunk)) for (start, stop), chunk in zip(box, leaf.chunk_shape, strict=True))


def box_of(chunks: Box, leaf: OrbaxLeaf) -> Box:
    """Return the elements of a box of the grid."""
    return Box(
        (first * chunk, min(last * chunk, size))
        for (first, last), chunk, size in zip(chunks, leaf.chunk_shape, leaf.shape, strict=True)
    )


def num_chunks(box: Box, leaf: OrbaxLeaf) -> int:
    """Return how many chunks a box touches."""
    return chunks_of(box, leaf).volume


def touched_nbytes(box: Box, leaf: OrbaxLeaf) -> int:
    """Return the decoded bytes of the chunks that a box touches, which are read and decoded whole."""
    return box_of(chunks_of(box, leaf), leaf).volume * leaf.dtype.itemsize


def cut(chunks: Box, leaf: OrbaxLeaf, limit: int) -> Iterator[Box]:
    """Yield parts of a box of the grid, of at most `limit` decoded bytes or one chunk, in row-major order."""
    lengths = chunks.shape
    if chunks.volume * leaf.chunk_nbytes <= limit or max(lengths, default=1) <= 1:
        yield chunks
        return
    axis = next(axis for axis, length in enumerate(lengths) if length > 1)
    first, last = chunks[axis]
    middle = (first + last) // 2
    yield from cut(Box((*chunks[:axis], (first, middle), *chunks[axis + 1 :])), leaf, limit)
    yield from cut(Box((*chunks[:axis], (middle, last), *chunks[axis + 1 :])), leaf, limit)
