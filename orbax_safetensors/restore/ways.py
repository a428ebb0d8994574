"""Which way leaves take to their devices: the host makes them, or devices do of bytes as they lie in the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices.arrays import on_host
from orbax_safetensors.devices.assembly import can_assemble
from orbax_safetensors.devices.program import Recipe, refusal
from orbax_safetensors.devices.sharding import is_abstract, plain, platform_of
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.code_box import Decoding, decoding_of, group_order
from orbax_safetensors.geometry.elementwise import Ops, apply
from orbax_safetensors.geometry.encoding import Encoding, Role
from orbax_safetensors.geometry.move import move_of
from orbax_safetensors.geometry.pieces import Piece
from orbax_safetensors.geometry.strided import Copy, Runs, keeps_order, merged, row_major, source_runs
from orbax_safetensors.geometry.view import View
from orbax_safetensors.restore.target import Target
from orbax_safetensors.transfer.plan import Block, same_bits

# A program takes a tenth of a second to compile, or more. The host has made fewer bytes than this before.
_LEAST_PROGRAM_BYTES = 128 * 2**20
_UINT8 = np.dtype(np.uint8)


class Packed(NamedTuple):
    """Bytes as they lie in files, of which a program makes a box of every distinct shard that this process holds.

    `starts` says where the box begins in each shard. `blocks` has for each shard one for each input of the recipe, and
    then the group index of a quantised tensor, if it has one: the host compares it with the `order` for the shard.
    """

    recipe: Recipe
    starts: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[Block, ...], ...]
    orders: tuple[np.ndarray | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum([block.nbytes for blocks in self.blocks for block in blocks])


class Way(NamedTuple):
    """How a leaf is made of stored bytes: by devices if it has `packed` bytes, otherwise by the host.

    `change` says what has to be done with the bytes, or is empty; `why` says why devices do not do it.
    """

    change: str
    packed: tuple[Packed, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        if not self.change:
            return "as stored"
        return f"{self.change} on the {'device' if self.packed else 'host'}" + (f": {self.why}" if self.why else "")


def ways_of(checkpoint: Checkpoint, targets: Sequence[Target], boxes: Sequence[Sequence[Box]]) -> list[Way]:
    """Return the way of each target, of which this process holds the distinct `boxes`."""
    ways = [_way(checkpoint, target, held) for target, held in zip(targets, boxes, strict=True)]
    nbytes = Counter[Recipe]()
    for way in ways:
        for packed in way.packed:
            nbytes[packed.recipe] += packed.nbytes
    return [_if_it_pays(way, nbytes) for way in ways]


def _if_it_pays(way: Way, nbytes: Mapping[Recipe, int]) -> Way:
    recipes = {packed.recipe for packed in way.packed}
    if sum(nbytes[recipe] for recipe in recipes) >= _LEAST_PROGRAM_BYTES * len(recipes):
        return way
    return Way(way.change, why="too few bytes for a program")


def _way(checkpoint: Checkpoint, target: Target, boxes: Sequence[Box]) -> Way:
    change = _change(checkpoint, target.block(boxes[0])) if boxes else ""
    if not change or target.sharding is None:
        return Way(change)
    if not is_abstract(plain(target.sharding)):
        if on_host(plain(target.sharding)):
            return Way(change)
        if not can_assemble(target.sharding, target.shape, target.dtype):
            return Way(change, why="its dtype, layout or memory")
    packed = packed_bytes(checkpoint, target, boxes)
    return Way(change, why=packed) if isinstance(packed, str) else Way(change, packed)


def _change(checkpoint: Checkpoint, block: Block) -> str:
    """Return what has to be done with stored bytes to make a block of them, or an empty string."""
    change = ""
    for cut in block.view.cuts(block.box, block.shape):
        if cut.tensor is None:
            continue
        location = checkpoint.location(cut.tensor)
        if location.encoding is not None:
            return "decoded"
        if not same_bits(cut.ops, location.dtype, block.dtype):
            return "cast"
        if not keeps_order(cut.copy):
            change = "reordered"
    return change


def packed_bytes(
    checkpoint: Checkpoint, target: Target, boxes: Sequence[Box], part: Box | None = None
) -> tuple[Packed, ...] | str:
    """Return the bytes of which devices make the boxes of a target, or that part of each box; or why they cannot."""
    of_boxes = []
    for box in boxes:
        steps = []
        for step in _steps(checkpoint, target, box, part):
            if isinstance(step, str):
                return step
            steps.append(step)
        of_boxes.append(steps)
    packed = []
    if len({len(steps) for steps in of_boxes}) > 1:
        return "its shards differ"
    for alike in zip(*of_boxes, strict=True):
        recipes, starts, blocks, orders = zip(*alike, strict=True)
        if len(set(recipes)) > 1:
            return "its shards differ"
        packed.append(Packed(recipes[0], starts, blocks, orders))
    return tuple(packed)


class _Step(NamedTuple):
    """A box of one shard: see `Packed`."""

    recipe: Recipe
    start: tuple[int, ...]
    blocks: tuple[Block, ...]
    order: np.ndarray | None


def _steps(checkpoint: Checkpoint, target: Target, box: Box, part: Box | None) -> Iterator[_Step | str]:
    """Yield what makes a box of a target, or a part of it."""
    block, first = target.block(box), 0
    if part is not None:
        first = sum(at * stride for at, stride in zip(part.start, row_major(box.shape), strict=True))
        block = target.block(box.inside(part))
    assert target.sharding is not None
    platform = platform_of(target.sharding)
    for cut in block.view.cuts(block.box, box.shape):
        if cut.tensor is None:
            if np.any(apply(cut.ops, np.zeros(1))):
                yield "a constant that no tensor stores"
            continue
        location = checkpoint.location(cut.tensor)
        made = _recipe(
            cut.copy, cut.ops, location.encoding or location.dtype, box.shape, target.dtype, target.lossless, platform
        )
        if isinstance(made, str):
            yield made
            return
        recipe, runs = made
        start = recipe.move.start(first + cut.begin + cut.copy.destination)
        if start is None:
            yield "strides that no program has"
            return
        codes, *beside = checkpoint.as_bytes(cut.tensor)
        group, order = None, None
        if location.encoding is not None:
            roles = [parameter.role for parameter in location.encoding.parameters]
            if (index := group_order(cut.copy, location.encoding)) is not None:
                group = _bytes(beside.pop(roles.index(Role.GROUP)), index[0])
                order = index[1]
        blocks = [_bytes(name, run) for name, run in zip((codes, *beside), runs, strict=True)]
        yield _Step(recipe, start, (*blocks, *([group] if group else [])), order)


@lru_cache(maxsize=2**14)
def _recipe(
    copy: Copy,
    ops: Ops,
    stored: np.dtype | Encoding,
    shape: tuple[int, ...],
    dtype: np.dtype,
    lossless: bool,
    platform: str,
) -> tuple[Recipe, tuple[Runs, ...]] | str:
    """Return the recipe for a copy into a shard, and the bytes that it takes; or why there is none."""
    move = move_of(copy, shape)
    if move is None:
        return "strides that no program has"
    source: np.dtype | Decoding
    runs: tuple[Runs, ...]
    if isinstance(stored, np.dtype):
        source, runs = stored, (source_runs(copy, stored.itemsize),)
    else:
        decoding = decoding_of(copy, stored)
        if isinstance(decoding, str):
            return decoding
        source, runs = decoding
    recipe = Recipe(source, ops, move, shape, dtype)
    return refusal(recipe, platform, lossless) or (recipe, runs)


def _bytes(name: str, runs: Runs) -> Block:
    """Return a block of the bytes of a tensor that `runs` are, one after the other."""
    modes = merged((*runs.modes, (runs.length, 1)))
    view = View((runs.nbytes,), _UINT8, (Piece(name, (0,), runs.begin, (modes,)),))
    return Block(view, Box.whole(view.shape), view.shape, _UINT8)
