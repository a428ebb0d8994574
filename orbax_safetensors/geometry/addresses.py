"""`Chunks`: an array cut into a regular grid of chunks that each lie in a stored tensor as one range of bytes.

A reader of chunks, as Zarr is, then needs only their addresses, and no byte has to move. A grid is possible if every
chunk is a box of one piece of the view whose elements follow one another in storage, in one order of the dimensions
for all chunks. Geometry only: this module reads and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from orbax_safetensors.geometry.elementwise import Offset
from orbax_safetensors.geometry.pieces import Piece
from orbax_safetensors.geometry.strided import Modes, extent, offsets
from orbax_safetensors.geometry.tiling import divisors
from orbax_safetensors.geometry.view import View

# Chunks are not smaller than this, unless stored tensors are: each chunk costs a request and an entry of an index.
MIN_CHUNK_BYTES = 64 * 2**10
# If a dimension has no good divisor, chunks are not cut to less than this part of `max_bytes`.
_CRUMBS = 8


class BoxAddresses(NamedTuple):
    """Where the chunks of one box of the grid, which begins at `first`, lie in a stored tensor.

    `offsets` has the shape of the box. It counts elements from the first of the tensor to the first of each chunk.
    """

    tensor: str
    first: tuple[int, ...]
    offsets: np.ndarray


@dataclass(frozen=True)
class Chunks:
    """A grid of chunks of a view.

    Attributes:
      shape: of a chunk. Chunks of zeros, which no tensor stores, may reach over the end of the view.
      order: the dimensions, slowest in storage first: a stored chunk is C-contiguous once it is transposed like that.
    """

    view: View
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along every dimension."""
        return tuple(-(-size // step) for size, step in zip(self.view.shape, self.shape, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk."""
        return prod(self.shape) * self.view.dtype.itemsize

    @property
    def count(self) -> int:
        """The number of chunks that are stored."""
        elements = sum(prod(map(extent, piece.dims)) for piece in _stored(self.view))
        return elements // prod(self.shape)

    def addresses(self) -> Iterator[BoxAddresses]:
        """Yield the addresses of all stored chunks; the other chunks are zeros."""
        for piece in _stored(self.view):
            first = tuple(start // step for start, step in zip(piece.start, self.shape, strict=True))
            assert piece.tensor is not None
            yield BoxAddresses(piece.tensor, first, _offsets(piece.dims, self.shape) + piece.offset)


def chunks_in_place(view: View, shard: Sequence[int], max_bytes: int) -> Chunks | str:
    """Return a grid of chunks that stay in storage as they are, or a sentence that says why no grid is possible.

    Chunks have at most `max_bytes` if a dimension has a good divisor. They do not cross the edges of shards of the
    shape `shard`, except edges within a contiguous range of storage. A view without stored elements is one chunk of
    zeros.
    """
    for piece in view.pieces:
        if piece.tensor is None and piece.ops != (Offset(0.0),):
            return "it has constants that are stored nowhere"
        if piece.tensor is not None and piece.ops:
            return f"its elements are computed ({', '.join(type(op).__name__.lower() for op in piece.ops)})"
    sizes = [_nbytes(view, map(extent, piece.dims)) for piece in _stored(view)]
    if not sizes:
        return Chunks(view, tuple(size or 1 for size in view.shape), tuple(range(len(view.shape))))
    step = _finest(view)
    chain = _contiguous(view, step)
    step = [size if axis in chain else 1 for axis, size in enumerate(step)]
    # One small tensor among large ones does not cut these to crumbs.
    least = min(MIN_CHUNK_BYTES, max(min(sizes), sum(sizes) // len(sizes) // _CRUMBS))
    if (run := _nbytes(view, step)) < least:
        return f"its elements lie together in runs of {run} bytes only"
    _cut_along_shards(view, step, chain, shard, least)
    _cut_to(view, step, chain, max_bytes)
    rest = [axis for axis in range(len(view.shape)) if axis not in chain]
    return Chunks(view, tuple(step), (*rest, *reversed(chain)))


@lru_cache
def _offsets(dims: tuple[Modes, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Return the offsets of chunks from the first element of their piece; most pieces differ only in where they lie."""
    at = np.zeros((), np.int64)
    for modes, step in zip(dims, shape, strict=True):
        at = np.add.outer(at, offsets(modes, np.arange(0, extent(modes), step)))
    return at


def _stored(view: View) -> Iterator[Piece]:
    return (piece for piece in view.pieces if piece.tensor is not None)


def _nbytes(view: View, shape: Iterable[int]) -> int:
    return prod(shape) * view.dtype.itemsize


def _finest(view: View) -> list[int]:
    """Return the longest steps along each dimension that keep chunks within pieces and within their innermost modes."""
    step = [0] * len(view.shape)
    for piece in view.pieces:
        for axis, (start, modes) in enumerate(zip(piece.start, piece.dims, strict=True)):
            length = extent(modes)
            step[axis] = gcd(step[axis], start)
            if piece.tensor is not None:
                step[axis] = gcd(step[axis], length, *(size for size, _ in modes[-1:]))
            elif start + length < view.shape[axis]:
                step[axis] = gcd(step[axis], length)
    return [length or size for length, size in zip(step, view.shape, strict=True)]


def _contiguous(view: View, step: Sequence[int]) -> list[int]:
    """Return the dimensions, fastest first, along which chunks of the shape `step` are contiguous in every piece."""
    chains = [_chain(dims, step) for dims in {piece.dims for piece in _stored(view)}]
    common = 0
    while len({tuple(chain[: common + 1]) for chain in chains}) == 1 and common < len(chains[0]):
        common += 1
    return chains[0][:common]


def _chain(dims: Sequence[Modes], step: Sequence[int]) -> list[int]:
    """Return the dimensions along which a box of the shape `step` is contiguous, fastest first."""
    counted = [axis for axis, size in enumerate(step) if size > 1]
    chain, run = [], 1
    for axis in sorted(counted, key=lambda axis: dims[axis][-1][1]):
        if dims[axis][-1][1] != run:
            break
        chain.append(axis)
        run *= step[axis]
    return chain


def _cut_along_shards(view: View, step: list[int], chain: Sequence[int], shard: Sequence[int], least: int) -> None:
    """Cut chunks at the edges of shards, along the fastest dimension for which chunks do not become too small."""
    for position, axis in enumerate(chain):
        cut = gcd(step[axis], shard[axis])
        faster = prod(step[inner] for inner in chain[:position])
        if cut < step[axis] and faster * cut * view.dtype.itemsize >= least:
            step[axis] = cut
            for slower in chain[position + 1 :]:
                step[slower] = 1
            return


def _cut_to(view: View, step: list[int], chain: Sequence[int], max_bytes: int) -> None:
    """Cut chunks along the slowest dimensions until they have at most `max_bytes`, or a dimension has no divisor."""
    for axis in reversed(chain):
        if (nbytes := _nbytes(view, step)) <= max_bytes:
            return
        row = nbytes // step[axis]
        fitting = [size for size in divisors(step[axis]) if size * row <= max_bytes]
        best = max(fitting, default=1)
        if fitting and best * row < max_bytes // _CRUMBS:
            step[axis] = min(size for size in divisors(step[axis]) if size not in fitting)
            return
        step[axis] = best
