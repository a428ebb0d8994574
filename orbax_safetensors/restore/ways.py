"""Which way leaves take to their devices: the host makes them, or devices do of bytes as they lie in the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices.arrays import on_host
from orbax_safetensors.devices.assembly import can_assemble
from orbax_safetensors.devices.program import Recipe, refusal
from orbax_safetensors.devices.sharding import is_abstract, plain, platform_of
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.code_box import decoding_of, group_order
from orbax_safetensors.geometry.elementwise import Ops, apply
from orbax_safetensors.geometry.encoding import Encoding, Role
from orbax_safetensors.geometry.move import move_of
from orbax_safetensors.geometry.pieces import Piece
from orbax_safetensors.geometry.strided import Copy, Modes, Runs, keeps_order, merged, row_major, source_runs
from orbax_safetensors.geometry.view import View, by_tensors
from orbax_safetensors.restore.target import Target
from orbax_safetensors.transfer.plan import Block, same_bits

# A program takes a tenth of a second to compile, or more. The host has made fewer bytes than this before.
_LEAST_PROGRAM_BYTES = 128 * 2**20
_TOO_FEW_BYTES = f"under {_LEAST_PROGRAM_BYTES // 2**20} MiB for each program"
_UINT8 = np.dtype(np.uint8)


class Way(NamedTuple):
    """How a leaf is made of stored bytes: `on_device` by programs, otherwise by the host.

    `change` says what has to be done with the bytes, or is empty; `why` says why devices do not do it.
    """

    change: str
    on_device: bool = False
    why: str = ""

    def __str__(self) -> str:
        if not self.change:
            return "as stored"
        return f"{self.change} on the {'device' if self.on_device else 'host'}" + (f": {self.why}" if self.why else "")


def ways_of(checkpoint: Checkpoint, targets: Sequence[Target], boxes: Sequence[Sequence[Box]]) -> list[Way]:
    """Return the way of each target. This process holds distinct `boxes` of it, and the first one decides."""
    ways: list[Way] = []
    recipes: list[set[Recipe]] = []
    nbytes = Counter[Recipe]()
    for target, held in zip(targets, boxes, strict=True):
        way, steps = _way(checkpoint, target, held[0]) if held else (Way(""), [])
        for step in steps:
            nbytes[step.recipe] += len(held) * sum([runs.nbytes for _, runs in step.reads])
        ways.append(way)
        recipes.append({step.recipe for step in steps})

    def pays(number: int) -> bool:
        used = recipes[number]
        return bool(used) and sum([nbytes[recipe] for recipe in used]) >= _LEAST_PROGRAM_BYTES * len(used)

    # What is made of one tensor goes one way if it can: its bytes are then read, and their checksums compared, once.
    for group in by_tensors([target.view.tensors for target in targets]):
        if not any(map(pays, group)):
            for number in group:
                if ways[number].on_device:
                    ways[number] = Way(ways[number].change, why=_TOO_FEW_BYTES)
    return ways


def _way(checkpoint: Checkpoint, target: Target, box: Box) -> tuple[Way, list[_Step]]:
    change = _change(checkpoint, target.block(box))
    if not change or target.sharding is None:
        return Way(change), []
    if not is_abstract(plain(target.sharding)):
        if on_host(plain(target.sharding)):
            return Way(change), []
        if not can_assemble(target.sharding, target.shape, target.dtype):
            return Way(change, why="its dtype, layout or memory"), []
    steps = _steps(checkpoint, target, box)
    return (Way(change, why=steps), []) if isinstance(steps, str) else (Way(change, on_device=True), steps)


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


class LeafPart(NamedTuple):
    """Blocks that are filled, and what becomes of them: the shards of a leaf, or what a program makes of packed bytes.

    Attributes:
      leaf: the number of the target.
      blocks: the distinct shards that this process holds. With a `recipe`, for each of them one for each of its inputs,
        which are bytes as they lie in a file, and then the group index of a quantised tensor, if it has one.
      recipe: of the program that makes a box of each shard.
      starts: where the box begins in each shard.
      orders: what has to be in each group index; None without one.
      mapped: the file and the offset where each block lies as in memory, if arrays alias the files.
    """

    leaf: int
    blocks: tuple[Block, ...]
    nbytes: int  # of the blocks
    recipe: Recipe | None = None
    starts: tuple[tuple[int, ...], ...] = ()
    orders: tuple[np.ndarray | None, ...] = ()
    mapped: tuple[tuple[int, int], ...] = ()


def packed_parts(checkpoint: Checkpoint, number: int, target: Target, part: Box | None = None) -> list[LeafPart] | None:
    """Return what devices make a target of, whose number is given, or that part of each of its shards.

    Returns None if they cannot, or if shards are not made alike.
    """
    of_shards: list[list[_Step]] = []
    for box in target.local_boxes():
        steps = _steps(checkpoint, target, box, part)
        if isinstance(steps, str) or (of_shards and [s.recipe for s in steps] != [s.recipe for s in of_shards[0]]):
            return None
        of_shards.append(steps)
    parts = []
    for alike in zip(*of_shards, strict=True):
        blocks = tuple([_bytes(*read) for step in alike for read in step.reads])
        starts, orders = tuple([step.start for step in alike]), tuple([step.order for step in alike])
        nbytes = len(alike) * sum([runs.nbytes for _, runs in alike[0].reads])
        parts.append(LeafPart(number, blocks, nbytes, alike[0].recipe, starts, orders))
    return parts


class _Step(NamedTuple):
    """What makes a box of a shard, where it begins, the bytes to read by names of tensors, and the order of groups."""

    recipe: Recipe
    start: tuple[int, ...]
    reads: tuple[tuple[str, Runs], ...]
    order: np.ndarray | None


def _steps(checkpoint: Checkpoint, target: Target, box: Box, part: Box | None = None) -> list[_Step] | str:
    """Return what makes a box of a target, or a part of it; or why devices cannot."""
    assert target.sharding is not None
    platform = platform_of(target.sharding)
    block, first = target.block(box), 0
    if part is not None:
        block = target.block(box.inside(part))
        first = sum([at * stride for at, stride in zip(part.start, row_major(box.shape), strict=True)])
    steps = []
    known: dict[tuple[int, Ops, np.dtype, int], _Made | str] = {}  # layers have the same copies and encodings
    for cut in block.view.cuts(block.box, box.shape):
        if cut.tensor is None:
            if np.any(apply(cut.ops, np.zeros(1))):
                return "a constant that no tensor stores"
            continue
        location = checkpoint.location(cut.tensor)
        key = id(cut.copy), cut.ops, location.dtype, id(location.encoding)
        if (made := known.get(key)) is None:
            stored = location.encoding or location.dtype
            made = _made(cut.copy, cut.ops, stored, box.shape, target.dtype, target.lossless, platform)
            known[key] = made
        if isinstance(made, str):
            return made
        start = made.recipe.move.start(first + cut.begin + cut.copy.destination)
        if start is None:
            return _NO_MOVE
        names = checkpoint.as_bytes(cut.tensor)
        reads = tuple([(names[number], runs) for number, runs in made.reads])
        steps.append(_Step(made.recipe, start, reads, made.order))
    return steps


_NO_MOVE = "strides that no program has"


class _Made(NamedTuple):
    """What makes a copy, the bytes to read of which of the stored tensors, and the order of groups."""

    recipe: Recipe
    reads: tuple[tuple[int, Runs], ...]
    order: np.ndarray | None = None


@lru_cache(maxsize=2**14)
def _made(
    copy: Copy,
    ops: Ops,
    stored: np.dtype | Encoding,
    shape: tuple[int, ...],
    dtype: np.dtype,
    lossless: bool,
    platform: str,
) -> _Made | str:
    """Return what a copy into a shard of `shape` is made by; or why there is nothing."""
    move = move_of(copy, shape)
    if move is None:
        return _NO_MOVE
    if isinstance(stored, np.dtype):
        made = _Made(Recipe(stored, ops, move, shape, dtype), ((0, source_runs(copy, stored.itemsize)),))
    else:
        decoding = decoding_of(copy, stored)
        if isinstance(decoding, str):
            return decoding
        roles = [parameter.role for parameter in stored.parameters]
        numbers = [0, *(1 + number for number, role in enumerate(roles) if role is not Role.GROUP)]
        made = _Made(Recipe(decoding[0], ops, move, shape, dtype), tuple(zip(numbers, decoding[1], strict=True)))
        if (group := group_order(copy, stored)) is not None:
            made = _Made(made.recipe, (*made.reads, (1 + roles.index(Role.GROUP), group[0])), group[1])
    return refusal(made.recipe, platform, lossless) or made


def _bytes(name: str, runs: Runs) -> Block:
    """Return a block of the bytes of a tensor that `runs` are, one after the other."""
    box, dims = _packed(runs)
    return Block(View(box.shape, _UINT8, (Piece(name, (0,), runs.begin, dims),)), box, box.shape, _UINT8)


@lru_cache(maxsize=2**14)
def _packed(runs: Runs) -> tuple[Box, tuple[Modes, ...]]:
    """Return a box of all bytes that runs are, and its dimension."""
    return Box.whole((runs.nbytes,)), (merged((*runs.modes, (runs.length, 1))),)
