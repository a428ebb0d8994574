"""The shards that this process writes, in the leaves' memory or in copies of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.devices.agreement import together
from orbax_safetensors.devices.arrays import local_shards, on_host
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

        NumPy leaves and the shards of accelerators are copied. The memory of arrays on CPU devices is kept instead: it
        lives on if an array is deleted, and XLA does not reuse it if an array is donated. If it is memory that an array
        shares with NumPy or PyTorch, it changes if they write into it.

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

    def batches(self, batch_bytes: int) -> Iterator[list[tuple[Block, np.ndarray]]]:
        """Yield all shards, with at most `batch_bytes` of device memory, or one group, on the host at a time."""
        if self._kept is not None:
            yield self._kept
            return
        sized = ((group, sum(_leaving(leaf, boxes) for leaf, boxes in group)) for group in self._groups)
        for batch in batches(sized, batch_bytes):
            yield list(_memory([owned for group in batch for owned in group], self._views))


def _kept(save: Save) -> list[tuple[Block, np.ndarray]]:
    if save.deliveries is not None:
        return received(save.deliveries, save.active.rank)
    all_owned = [owned for group in save.groups for owned in group]
    mutable = [owned for owned in all_owned if not isinstance(owned[0].value, jax.Array)]
    shards = list(_memory(mutable, save.views))
    copies = allocate([memory.nbytes for _, memory in shards])
    for (_, memory), copy in zip(shards, copies, strict=True):
        np.copyto(copy, memory)
    return [
        *((block, copy) for (block, _), copy in zip(shards, copies, strict=True)),
        *_memory([owned for owned in all_owned if isinstance(owned[0].value, jax.Array)], save.views),
    ]


def _on_host(leaf: Leaf) -> bool:
    return not isinstance(leaf.value, jax.Array) or on_host(leaf.value.sharding)


def _leaving(leaf: Leaf, boxes: Sequence[Box]) -> int:
    """Return the bytes that come from a device to the host."""
    return 0 if _on_host(leaf) else sum(box.volume for box in boxes) * leaf.value.dtype.itemsize


def _memory(owned: Sequence[Owned], views: Views | None) -> Iterator[tuple[Block, np.ndarray]]:
    """Yield boxes of leaves as blocks with their memory, one-dimensional and uint8."""
    for leaf, boxes in owned:
        if not boxes:
            continue
        if isinstance(leaf.value, jax.Array):
            shards = local_shards(leaf.value, boxes)
        else:
            shards = {boxes[0]: np.ascontiguousarray(leaf.value).reshape(leaf.shape)}
        for box in boxes:
            shard = shards[box]
            if views is None:
                block = Block(leaf.view, box, shard.shape, shard.dtype)
            else:
                whole = Box.whole(shard.shape)
                block = Block(views[leaf.name, box], whole, shard.shape, shard.dtype)
            yield block, shard.reshape(-1).view(np.uint8)
