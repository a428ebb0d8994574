"""What a restore reads at a time, planned before the first byte: parts of leaves, in the order of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices.arrays import on_host
from orbax_safetensors.devices.assembly import can_assemble
from orbax_safetensors.devices.program import Recipe
from orbax_safetensors.devices.sharding import plain
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.code_box import Decoding
from orbax_safetensors.geometry.move import move_of
from orbax_safetensors.geometry.strided import Copy, keeps_order, row_major, source_runs
from orbax_safetensors.geometry.tiling import storage_order, tile_shape, tiles
from orbax_safetensors.geometry.view import by_tensors
from orbax_safetensors.restore.target import Target
from orbax_safetensors.restore.ways import LeafPart, packed_parts, ways_of
from orbax_safetensors.storage.memory import ALIGNMENT, PAGE_BYTES, laid_out
from orbax_safetensors.storage.store import RequestLimits
from orbax_safetensors.transfer.engine import batches
from orbax_safetensors.transfer.plan import Block, Location, TransferPlan, same_bits
from orbax_safetensors.transfer.reader import direct_offsets

# Of the memory that bytes for devices go through: enough to read while others are on their way.
_USUAL_BYTES = 512 * 2**20
_BATCHES = 16
# Of that memory, in a leaf that is longer: so that one can be read while others are on their way.
_PARTS = 4
# For batches that begin in their pages as the bytes do in files.
_PAGES = 16
# Rows and columns share scales in blocks of at most so many in most formats. One program serves all parts that begin
# with a block; any other part would need its own.
_BLOCK = 128
# Devices may hold what they decode once more, before it is in its place.
_MOST_DECODED_BYTES = 512 * 2**20
# What no leaf is cut below: programs on devices and requests for short parts would take longer than the bytes.
_LEAST_CUT_BYTES = 16 * 2**20


@dataclass(frozen=True, eq=False)
class Batch:
    """Parts that are read together into memory for their blocks, by `plan`.

    `offsets` are those of `storage.memory.allocate`. Memory of what `leaves_host` is used again when devices have it.
    """

    parts: tuple[LeafPart, ...]
    blocks: tuple[Block, ...]
    plan: TransferPlan
    offsets: Mapping[int, int]
    leaves_host: bool

    @property
    def sizes(self) -> list[int]:
        """Bytes of each block."""
        return [block.nbytes for block in self.blocks]


def batches_for(
    checkpoint: Checkpoint, targets: Sequence[Target], limits: RequestLimits, most: int, *, alias: bool
) -> tuple[list[Batch], int]:
    """Return all that this process reads for `targets`, in batches, and the bytes of memory that some of them share.

    What leaves the host goes through at most `most` bytes of memory, except longer shards that devices cannot put
    together, and those of up to 16 MiB, which are not cut. With `alias`, arrays in host memory alias the files if these
    lie as in memory.
    """
    staying = [number for number, target in enumerate(targets) if stays_on_host(target)]
    leaving = sorted(set(range(len(targets))).difference(staying))
    out, shared = _leaving(checkpoint, targets, leaving, limits, most) if leaving else ([], 0)
    if staying:
        parts = [_whole(number, targets[number]) for number in staying]
        if alias:
            parts = [part._replace(mapped=_places(checkpoint, targets[part.leaf], part)) for part in parts]
        out.append(_batch(checkpoint, limits, parts, leaves_host=False))
    return out, shared


def _leaving(
    checkpoint: Checkpoint, targets: Sequence[Target], numbers: Sequence[int], limits: RequestLimits, most: int
) -> tuple[list[Batch], int]:
    """See `batches_for`: for the targets of these numbers, which leave the host."""
    groups = _groups(checkpoint, _parts(checkpoint, targets, numbers, most), most)
    sized = [(group, _nbytes(group)) for group in groups]
    total, longest = sum([nbytes for _, nbytes in sized]), max([nbytes for _, nbytes in sized], default=0)
    room = min(most, total, max(_USUAL_BYTES, 2 * limits.requests * limits.max_request_bytes, longest))
    out = []
    for together in batches(sized, room // _BATCHES):
        parts = [part for group in together for part in group]
        out.append(_batch(checkpoint, limits, parts, leaves_host=True))
    spans = [laid_out(batch.sizes, batch.offsets)[1] for batch in out if _nbytes(batch.parts) <= most]
    return out, max(min(sum(spans), max([room + min(_PAGES * PAGE_BYTES, room // _BATCHES), *spans])), PAGE_BYTES)


def stays_on_host(target: Target) -> bool:
    """Return whether all that this process holds of a target is in host memory."""
    return target.sharding is None or on_host(plain(target.sharding))


def devices_of(targets: Iterable[Target]) -> set[Any]:
    """Return the devices of this process that bytes leave the host for."""
    shardings = {plain(target.sharding) for target in targets if target.sharding is not None}
    return {device for sharding in shardings if not on_host(sharding) for device in sharding.addressable_devices}


def _batch(checkpoint: Checkpoint, limits: RequestLimits, parts: Sequence[LeafPart], *, leaves_host: bool) -> Batch:
    blocks = tuple([block for part in parts if not part.mapped for block in part.blocks])
    plan = checkpoint.transfer(blocks, limits)
    return Batch(tuple(parts), blocks, plan, direct_offsets(plan, checkpoint.store), leaves_host)


def _nbytes(parts: Iterable[LeafPart]) -> int:
    return sum([part.nbytes for part in parts])


def _whole(number: int, target: Target) -> LeafPart:
    blocks = tuple([target.block(box) for box in target.local_boxes()])
    return LeafPart(number, blocks, sum([block.nbytes for block in blocks]))


def _groups(checkpoint: Checkpoint, parts: Sequence[LeafPart], most: int) -> list[list[LeafPart]]:
    """Return parts that read the same tensors together, if they have at most `most` bytes.

    Groups are in the order of the files, so that a disk reads forward and each batch is one stretch of it.
    """
    tensors = [tuple({name: None for block in part.blocks for name in block.view.tensors}) for part in parts]
    groups: list[list[int]] = []
    for group in by_tensors(tensors):
        together = _nbytes(parts[number] for number in group) <= most
        groups += [group] if together else [[number] for number in group]

    def begin(group: Sequence[int]) -> tuple[int, int]:
        return min([checkpoint.location(name)[:2] for number in group for name in tensors[number]], default=(0, 0))

    return [[parts[number] for number in group] for group in sorted(groups, key=begin)]


def _parts(checkpoint: Checkpoint, targets: Sequence[Target], numbers: Sequence[int], most: int) -> list[LeafPart]:
    """Return parts of at most `most` bytes, if devices can put them together, of all targets that leave the host."""
    leaving = [targets[number] for number in numbers]
    ways = ways_of(checkpoint, leaving, [target.local_boxes() for target in leaving])
    parts: list[LeafPart] = []
    for number, target, way in zip(numbers, leaving, ways, strict=True):
        whole = packed_parts(checkpoint, number, target) if way.on_device else None
        whole = whole or [_whole(number, target)]
        is_short = not any(_is_long(part, most) for part in whole)
        if is_short or not can_assemble(target.sharding, target.shape, target.dtype):
            parts += whole
            continue
        limit = max(most // _PARTS, _LEAST_CUT_BYTES)
        made = min(limit * target.local_nbytes // _nbytes(whole), _MOST_DECODED_BYTES * len(target.local_boxes()))
        for cut in _cuts(target, target.local_boxes()[0].shape, made):
            packed = packed_parts(checkpoint, number, target, cut) if way.on_device else None
            # What the host makes goes through host memory: it may be longer than its packed bytes.
            parts += packed or [_cut(number, target, cut.inside(part)) for part in _cuts(target, cut.shape, limit)]
    return parts


def _is_long(part: LeafPart, most: int) -> bool:
    """Return whether a part needs too much memory, of the host or of devices."""
    if part.nbytes > max(most, _LEAST_CUT_BYTES):
        return True
    recipe = part.recipe
    if recipe is None or recipe.move.fills or not isinstance(recipe.source, Decoding):
        return False
    return prod(recipe.move.box) * recipe.dtype.itemsize > _MOST_DECODED_BYTES


def _cuts(target: Target, shape: tuple[int, ...], nbytes: int) -> Iterator[Box]:
    """Yield boxes that make up `shape`, in the order of storage; in all shards, each has at most `nbytes`."""
    order = storage_order(target.view)
    tile = tile_shape(shape, (1,) * len(shape), order, nbytes // (len(target.local_boxes()) * target.dtype.itemsize))
    tile = tuple([length - length % _BLOCK if length > _BLOCK else length for length in tile])
    yield from tiles(shape, tile, order)


def _cut(number: int, target: Target, cut: Box) -> LeafPart:
    """Return a part of every shard of a target that the host makes, and that devices put in its place."""
    boxes = target.local_boxes()
    shape = boxes[0].shape
    strides = row_major(shape)
    modes = tuple(zip(cut.shape, row_major(cut.shape), strides, strict=True))
    move = move_of(Copy(0, 0, tuple([mode for mode in modes if mode[0] > 1])), shape)
    assert move is not None
    start = move.start(sum([at * stride for at, stride in zip(cut.start, strides, strict=True)]))
    assert start is not None
    blocks = tuple([target.block(box.inside(cut)) for box in boxes])
    recipe = Recipe(target.dtype, (), move, shape, target.dtype)
    nbytes = sum([block.nbytes for block in blocks])
    return LeafPart(number, blocks, nbytes, recipe, (start,) * len(boxes), (None,) * len(boxes))


def _places(checkpoint: Checkpoint, target: Target, part: LeafPart) -> tuple[tuple[int, int], ...]:
    """Return where files have the blocks of a part in the array's order; nothing unless they have all, aligned."""
    places = [_place(block, checkpoint.location) for block in part.blocks if target.kind is jax.Array]
    return () if None in places else tuple([place for place in places if place is not None])


def _place(block: Block, locate: Callable[[str], Location]) -> tuple[int, int] | None:
    """Return the file and offset of a block, if a file has its bytes in the array's order, aligned; else None."""
    copies = block.view.copies(block.box, block.shape)
    if len(copies) != 1:
        return None
    ((name, copy, ops),) = copies
    if name is None or copy.elements != prod(block.shape) or not keeps_order(copy):
        return None
    location = locate(name)
    if location.encoding is not None or not same_bits(ops, location.dtype, block.dtype):
        return None
    runs = source_runs(copy, block.dtype.itemsize)
    begin = location.begin + runs.begin
    return None if runs.modes or begin % ALIGNMENT else (location.file, begin)
