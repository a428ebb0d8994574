"""Tiles, and the sources that they are read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol

import jax
import numpy as np

from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.view import View
from orbax_safetensors.storage.store import RequestLimits
from orbax_safetensors.transfer.engine import Counters
from orbax_safetensors.transfer.plan import Block, Location, TransferPlan, transfer_plan


class Tile(NamedTuple):
    """A box of one leaf."""

    name: str
    box: Box


Bundle = tuple[Tile, ...]  # tiles that interleave in storage, and are best moved at once
Unit = tuple[Bundle, ...]  # what one process moves, in this order


def nbytes(tiles: Iterable[Tile], leaves: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Return the bytes of tiles in memory."""
    return sum(prod(tile.box.shape) * leaves[tile.name].dtype.itemsize for tile in tiles)


def planned(
    tiles: Sequence[Tile],
    dtypes: Iterable[np.dtype],
    views: Mapping[str, View],
    locate: Callable[[str], Location],
    limits: RequestLimits | None = None,
) -> tuple[list[Block], TransferPlan]:
    """Return tiles as blocks of `views`, with these dtypes, and the plan of their transfer.

    `locate` is as for `transfer_plan`. Reads keep to `limits`; writes have no gaps.
    """
    blocks = [
        Block(views[tile.name], tile.box, tile.box.shape, dtype) for tile, dtype in zip(tiles, dtypes, strict=True)
    ]
    if limits is None:
        return blocks, transfer_plan(blocks, locate, max_gap_bytes=0)
    return blocks, transfer_plan(blocks, locate, limits.max_gap_bytes, limits.max_request_bytes)


class TileSource(Protocol):
    """Leaves that are read in tiles."""

    @property
    def leaves(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The shape of each leaf, and the dtype that its tiles are read with, by name."""

    @property
    def path(self) -> str:
        """The file or directory of the leaves."""

    @property
    def identity(self) -> str:
        """A digest of these leaves, of what they are made of and of its state."""

    @property
    def decoded(self) -> bool:
        """Whether an atomic tile is read and decoded whole, even for a part of it."""

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of all files that hold the leaves, None if that is not known."""

    @property
    def counters(self) -> Counters:
        """The reads so far."""

    def order(self, name: str) -> tuple[int, ...]:
        """Return the axes of a leaf, innermost in storage first."""

    def atomic_tile(self, name: str) -> tuple[int, ...]:
        """Return the shape of the boxes that are best read whole; they begin at multiples of it."""

    def read(self, tiles: Sequence[Tile], report: Callable[[float], None] | None = None) -> list[np.ndarray]:
        """Return the elements of tiles, each as a new row-major array.

        Meanwhile, a source may call `report` with the share of the bytes that it has read.
        """

    def check(self) -> None:
        """Raise `StorageError` if the stored files have changed since they were opened."""

    def close(self) -> None:
        """Close all files."""
