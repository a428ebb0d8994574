"""The shards that this process writes, in the leaves' memory or in copies of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from orbax_safetensors.devices.arrays import local_shards, on_accelerator, on_host, to_host
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.save.copied import StoredArray, read
from orbax_safetensors.save.writers import Owned
from orbax_safetensors.storage.memory import allocate
from orbax_safetensors.transfer.engine import batches
from orbax_safetensors.transfer.plan import Block

Memory = list[tuple[Block, np.ndarray]]  # of shards, one-dimensional and uint8


@dataclass(frozen=True)
class Shards:
    """The shards that this process writes.

    Attributes:
      groups: leaves with their boxes, in whose memory the shards are. It must not change before it is written.
      memory: of the shards that are `kept`, whose leaves may change.
    """

    groups: Sequence[tuple[Owned, ...]]
    memory: Memory | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all shards, in the dtypes of the leaves."""
        held: int = sum(memory.nbytes for _, memory in self.memory or ())
        owned = [pair for group in self.groups for pair in group]
        return held + sum(sum(box.volume for box in boxes) * int(leaf.value.dtype.itemsize) for leaf, boxes in owned)

    def batches(self, in_flight_bytes: int) -> Iterator[Memory]:
        """Yield all shards in batches, of which the caller drops each before it asks for the next.

        Meanwhile the next one is on its way to the host, if both fit. At most `in_flight_bytes` of device memory, or
        one group, have copies at a time.
        """
        if self.memory is not None:
            yield self.memory
        sized = ((part, _leaving(part)) for group in self.groups for part in _parts(group))
        started: deque[tuple[Iterator[tuple[Block, np.ndarray]], int]] = deque()
        for groups in batches(sized, in_flight_bytes // 2):
            batch = [owned for group in groups for owned in group]
            nbytes = _leaving(batch)
            if started and started[0][1] + nbytes > in_flight_bytes:
                yield list(started.popleft()[0])
            started.append((_to_host(batch), nbytes))
            if len(started) == 2:
                yield list(started.popleft()[0])
        for shards, _ in started:
            yield list(shards)


NO_SHARDS = Shards(())


def kept(groups: Sequence[tuple[Owned, ...]], *, copied_later: bool) -> Shards:
    """Return shards that stay as they are if NumPy leaves are changed, and arrays are donated or deleted.

    NumPy leaves and the shards of accelerators are copied, in whatever memory these are. The memory of arrays on CPU
    devices is kept instead: it lives on if an array is deleted, and XLA does not reuse it if an array is donated. If it
    is memory that an array shares with NumPy or PyTorch, it changes if they write into it.

    Tensors that are copied from a checkpoint are read later if `copied_later`. An object store takes bytes in their
    order, so that there these are read now.
    """
    later: list[tuple[Owned, ...]] = []
    all_owned: list[Owned] = []
    for group in groups:
        if copied_later and all(isinstance(leaf.value, StoredArray) for leaf, _ in group):
            later.append(group)
        else:
            all_owned += group
    stays = _to_host([owned for owned in all_owned if not _may_change(owned[0].value)])
    shards = list(_to_host([owned for owned in all_owned if _may_change(owned[0].value)]))
    copies = allocate([memory.nbytes for _, memory in shards])
    for (_, memory), copy in zip(shards, copies, strict=True):
        np.copyto(copy, memory)
    return Shards(later, [*((block, copy) for (block, _), copy in zip(shards, copies, strict=True)), *stays])


def _may_change(value: Any) -> bool:
    """Return whether a leaf's memory, which NumPy can see, must be copied before the caller goes on."""
    if not isinstance(value, jax.Array):
        return True
    # Of an accelerator, but in memory of the host: a GPU refuses it as a donation as long as NumPy sees it.
    return not on_host(value.sharding) and not on_accelerator(value)


def _parts(group: tuple[Owned, ...]) -> Iterator[tuple[Owned, ...]]:
    """Yield what moves together: a whole group, but only one box of a tensor that is copied."""
    if len(group) == 1 and isinstance(group[0][0].value, StoredArray):
        ((leaf, boxes),) = group
        yield from (((leaf, (box,)),) for box in boxes)
    else:
        yield group


def _leaving(group: Sequence[Owned]) -> int:
    """Return the bytes that come to the host, from a device or a checkpoint."""
    return sum(
        sum(box.volume for box in boxes) * leaf.value.dtype.itemsize
        for leaf, boxes in group
        if isinstance(leaf.value, StoredArray) or (isinstance(leaf.value, jax.Array) and on_accelerator(leaf.value))
    )


def _to_host(group: Sequence[Owned]) -> Iterator[tuple[Block, np.ndarray]]:
    """Begin as `to_host` does, and return boxes of leaves as blocks with their memory, one-dimensional and uint8."""
    blocks: list[Block] = []
    shards: list[Any] = []
    copied = [(leaf.value, box) for leaf, boxes in group if isinstance(leaf.value, StoredArray) for box in boxes]
    copies = iter(read(copied))
    for leaf, boxes in group:
        if isinstance(leaf.value, StoredArray):
            held: dict[Box, Any] = {box: next(copies) for box in boxes}
        elif isinstance(leaf.value, jax.Array):
            held = dict(local_shards(leaf.value, boxes))
        else:
            held = dict.fromkeys(boxes, leaf.value)
        for box in boxes:
            shard = held[box]
            blocks.append(Block(leaf.view, box, shard.shape, np.dtype(shard.dtype)))
            shards.append(shard)
    return zip(blocks, (memory.reshape(-1).view(np.uint8) for memory in to_host(shards)), strict=True)
