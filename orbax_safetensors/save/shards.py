"""The shards that this process writes, in the leaves' memory or in copies of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from orbax_safetensors.devices.agreement import together
from orbax_safetensors.devices.arrays import local_shards, on_accelerator, on_host, to_host
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.save.pieces import Views
from orbax_safetensors.save.prepare import Save
from orbax_safetensors.save.whole import received
from orbax_safetensors.save.writers import Owned
from orbax_safetensors.storage.memory import allocate
from orbax_safetensors.transfer.engine import batches
from orbax_safetensors.transfer.plan import Block


class Shards:
    """The shards that this process writes, and their memory."""

    def __init__(self, save: Save) -> None:
        """Take the memory of the leaves, which must not change before it is written."""
        self._groups = save.groups
        self._views = save.views
        self._kept: list[tuple[Block, np.ndarray]] | None = None

    @staticmethod
    def of(save: Save) -> Shards:
        """Return shards in the memory of the leaves, or copies if processes send shards to each other first."""
        return Shards(save) if save.deliveries is None else Shards.kept(save)

    @staticmethod
    def kept(save: Save) -> Shards:
        """Return shards that stay as they are if NumPy leaves are changed, and arrays are donated or deleted.

        NumPy leaves and the shards of accelerators are copied, in whatever memory these are. The memory of arrays on
        CPU devices is kept instead: it lives on if an array is deleted, and XLA does not reuse it if an array is
        donated. If it is memory that an array shares with NumPy or PyTorch, it changes if they write into it.

        Raises `StorageError` in every process if one process has not enough memory.
        """
        shards = Shards(save)
        shards._kept = together(f"{save.key}/copies", lambda: _kept(save), active=save.active)
        return shards

    @property
    def nbytes(self) -> int:
        """The bytes of all shards, in the dtypes of the leaves."""
        if self._kept is not None:
            return sum(memory.nbytes for _, memory in self._kept)
        owned = [pair for group in self._groups for pair in group]
        return sum(sum(box.volume for box in boxes) * leaf.value.dtype.itemsize for leaf, boxes in owned)

    def batches(self, in_flight_bytes: int) -> Iterator[list[tuple[Block, np.ndarray]]]:
        """Yield all shards in batches, of which the caller drops each before it asks for the next.

        Meanwhile the next one is on its way to the host, if both fit. At most `in_flight_bytes` of device memory, or
        one group, have copies at a time.
        """
        if self._kept is not None:
            yield self._kept
            return
        sized = ((group, _leaving(group)) for group in self._groups)
        started: deque[tuple[Iterator[tuple[Block, np.ndarray]], int]] = deque()
        for groups in batches(sized, in_flight_bytes // 2):
            batch = [owned for group in groups for owned in group]
            nbytes = _leaving(batch)
            if started and started[0][1] + nbytes > in_flight_bytes:
                yield list(started.popleft()[0])
            started.append((_to_host(batch, self._views), nbytes))
            if len(started) == 2:
                yield list(started.popleft()[0])
        for shards, _ in started:
            yield list(shards)


def _kept(save: Save) -> list[tuple[Block, np.ndarray]]:
    if save.deliveries is not None:
        return received(save.deliveries, save.active.rank)
    all_owned = [owned for group in save.groups for owned in group]
    kept = _to_host([owned for owned in all_owned if not _may_change(owned[0].value)], save.views)
    shards = list(_to_host([owned for owned in all_owned if _may_change(owned[0].value)], save.views))
    copies = allocate([memory.nbytes for _, memory in shards])
    for (_, memory), copy in zip(shards, copies, strict=True):
        np.copyto(copy, memory)
    return [*((block, copy) for (block, _), copy in zip(shards, copies, strict=True)), *kept]


def _may_change(value: Any) -> bool:
    """Return whether a leaf's memory, which NumPy can see, must be copied before the caller goes on."""
    if not isinstance(value, jax.Array):
        return True
    # Of an accelerator, but in memory of the host: a GPU refuses it as a donation as long as NumPy sees it.
    return not on_host(value.sharding) and not on_accelerator(value)


def _leaving(group: Sequence[Owned]) -> int:
    """Return the bytes that come from a device to the host."""
    return sum(
        sum(box.volume for box in boxes) * leaf.value.dtype.itemsize
        for leaf, boxes in group
        if isinstance(leaf.value, jax.Array) and on_accelerator(leaf.value)
    )


def _to_host(group: Sequence[Owned], views: Views | None) -> Iterator[tuple[Block, np.ndarray]]:
    """Begin as `to_host` does, and return boxes of leaves as blocks with their memory, one-dimensional and uint8."""
    blocks: list[Block] = []
    shards: list[Any] = []
    for leaf, boxes in group:
        if isinstance(leaf.value, jax.Array):
            held: dict[Box, Any] = dict(local_shards(leaf.value, boxes))
        else:
            held = dict.fromkeys(boxes, leaf.value)
        for box in boxes:
            shard = held[box]
            if views is None:
                blocks.append(Block(leaf.view, box, shard.shape, np.dtype(shard.dtype)))
            else:
                whole = Box.whole(shard.shape)
                blocks.append(Block(views[leaf.name, box], whole, shard.shape, np.dtype(shard.dtype)))
            shards.append(shard)
    return zip(blocks, (memory.reshape(-1).view(np.uint8) for memory in to_host(shards)), strict=True)
