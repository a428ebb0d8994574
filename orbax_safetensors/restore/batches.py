"""What a restore fills at a time: the shards of leaves, in the order of the files, in batches that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices.arrays import on_host
from orbax_safetensors.devices.growing import can_grow
from orbax_safetensors.devices.sharding import plain
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.tiling import storage_order, tile_shape, tiles
from orbax_safetensors.geometry.view import by_tensors
from orbax_safetensors.restore.target import Target
from orbax_safetensors.storage.process_memory import no_collection
from orbax_safetensors.transfer.engine import batches
from orbax_safetensors.transfer.plan import Block
from orbax_safetensors.transfer.threads import Countdown

# What no leaf is cut below: programs on devices and requests for short parts would take longer than the bytes.
_LEAST_CUT_BYTES = 16 * 2**20


class Fill(NamedTuple):
    """What becomes arrays at once: the shards of a target, or of each the part that begins at `start`.

    `number` is the target's in the call that fills it.
    """

    number: int
    target: Target
    start: tuple[int, ...] | None
    blocks: tuple[Block, ...]  # one for each of the target's local boxes

    @property
    def nbytes(self) -> int:
        """Of the blocks."""
        return sum(block.nbytes for block in self.blocks)


class Batch:
    """Fills that are filled together: threads do that until `filled` has ended, then `arrays` has one for each block.

    `sent` are the `jax.Array`s that are made of these.
    """

    def __init__(self, fills: Sequence[Fill], *, leaves_host: bool) -> None:
        """Describe a batch of which nothing is filled yet."""
        self.fills = fills
        self.blocks = [block for fill in fills for block in fill.blocks]
        self.nbytes = sum(block.nbytes for block in self.blocks)
        self.leaves_host = leaves_host
        self.filled = Countdown()
        self.arrays: dict[int, np.ndarray] = {}  # by the number of the block
        self.sent: list[jax.Array] = []


@no_collection()
def batches_of(
    checkpoint: Checkpoint, targets: Sequence[Target], most: int, part_bytes: int, batch_bytes: int
) -> list[Batch]:
    """Return all shards of `targets` that this process holds, in batches.

    Everything that stays in host memory is one batch. The others have `batch_bytes`, or one group of leaves that are
    made of the same tensors, which has at most `most` bytes. A leaf with more is in parts of `part_bytes` if it can be.
    """
    whole = [
        Fill(number, target, None, tuple([target.block(box) for box in target.local_boxes()]))
        for number, target in enumerate(targets)
    ]
    sizes = [fill.nbytes for fill in whole]
    stays = [stays_on_host(target) for target in targets]
    groups = groups_in_file_order(checkpoint, targets)
    staying = [whole[number] for group in groups for number in group if stays[number]]
    sized: list[tuple[list[Fill], int]] = []
    for group in groups:
        leaving = [number for number in group if not stays[number]]
        nbytes = sum(sizes[number] for number in leaving)
        if nbytes <= most:
            sized.append(([whole[number] for number in leaving], nbytes))
            continue
        for number in leaving:
            sized += [([fill], fill.nbytes) for fill in _cut(whole[number], most, part_bytes)]

    batched = [[fill for fills in batch for fill in fills] for batch in batches(sized, batch_bytes)]
    return [
        *([Batch(staying, leaves_host=False)] if staying else []),
        *(Batch(fills, leaves_host=True) for fills in batched if fills),
    ]


def stays_on_host(target: Target) -> bool:
    """Return whether all that this process holds of a target is in host memory."""
    return target.sharding is None or on_host(plain(target.sharding))


def _cut(fill: Fill, most: int, part_bytes: int) -> Iterator[Fill]:
    """Yield the same part of every shard of a target with more than `most` bytes, in the order of storage.

    The parts of one place in all shards have at most `part_bytes`.
    """
    target, part_bytes = fill.target, max(part_bytes, _LEAST_CUT_BYTES)
    if fill.nbytes <= max(most, part_bytes) or not can_grow(target.sharding, target.shape, target.dtype):
        yield fill
        return
    boxes = target.local_boxes()
    shape, order = boxes[0].shape, storage_order(target.view)
    limit = part_bytes // (len(boxes) * target.dtype.itemsize)
    for part in tiles(shape, tile_shape(shape, (1,) * len(shape), order, limit), order):
        yield Fill(fill.number, target, part.start, tuple([target.block(_within(box, part)) for box in boxes]))


def _within(box: Box, part: Box) -> Box:
    return Box((low + start, low + stop) for (low, _), (start, stop) in zip(box, part, strict=True))


def groups_in_file_order(checkpoint: Checkpoint, targets: Sequence[Target]) -> list[list[int]]:
    """Return the positions of `targets`, in one group those that are made of the same tensors.

    Groups are in the order of the files, so that a disk reads forward and each batch is one stretch of it.
    """
    groups = by_tensors([target.view for target in targets])

    def begin(group: list[int]) -> tuple[int, int]:
        names = [name for at in group for name in targets[at].view.tensors]
        if len(names) == 1:  # as most groups of a model with many tensors
            return checkpoint.location(names[0])[:2]
        return min([checkpoint.location(name)[:2] for name in names], default=(0, 0))

    return sorted(groups, key=begin)
