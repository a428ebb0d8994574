"""Cooperative restores: processes read parts of leaves, and devices exchange these.

All processes open the checkpoint, and agree that they see the same one and read the same leaves in parts (`parts`).
Then, for each batch, every process reads its parts, all processes agree that none has failed, and the devices exchange
the parts. All other leaves are read directly.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import NamedSharding

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.identity import identity
from orbax_safetensors.devices import collectives
from orbax_safetensors.devices.agreement import same, together
from orbax_safetensors.devices.arrays import assemble, on_host
from orbax_safetensors.devices.bits import from_bits, to_bits
from orbax_safetensors.devices.sharding import box_of
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.digest import digest_of
from orbax_safetensors.format.names import some
from orbax_safetensors.restore.batches import groups_in_file_order
from orbax_safetensors.restore.fill import Filling
from orbax_safetensors.restore.parts import Parts, parts_of
from orbax_safetensors.restore.target import Target
from orbax_safetensors.transfer.engine import batches

_OTHERWISE = "does not restore the same as process {first}: other names, shapes, dtypes or shardings, or other options"


class _Leaf(NamedTuple):
    """A leaf that processes read in parts, and its number in the request."""

    number: int
    target: Target
    parts: Parts


Batches = list[list[_Leaf]]


def exchange_batches(checkpoint: Checkpoint, targets: Sequence[Target], most: int) -> Batches:
    """Return the leaves to read in parts, in batches of which no process reads more than `most` bytes, or one group.

    All processes make the same batches.
    """
    in_parts = [(number, target, parts_of(target)) for number, target in enumerate(targets)]
    leaves = [_Leaf(number, target, parts) for number, target, parts in in_parts if parts is not None]
    groups = [
        [leaves[at] for at in group] for group in groups_in_file_order(checkpoint, [leaf.target for leaf in leaves])
    ]
    sized = [(group, sum(map(_nbytes, group))) for group in groups]
    return [[leaf for group in batch for leaf in group] for batch in batches(sized, most)]


def _nbytes(leaf: _Leaf) -> int:
    """Return the most bytes that any process reads of a leaf into memory."""
    sharding = leaf.parts.sharding
    devices = max(Counter(device.process_index for device in sharding.mesh.devices.flat).values())
    return prod(sharding.shard_shape(leaf.parts.shape)) * leaf.target.dtype.itemsize * devices


def facts(checkpoint: Checkpoint, batched: Batches) -> str:
    """Return what tells processes that would read other files or exchange other leaves, for `check`."""
    exchanges = [[_exchange(leaf) for leaf in batch] for batch in batched]
    return json.dumps({"path": checkpoint.path, "identity": identity(checkpoint), "exchanges": digest_of(exchanges)})


def _exchange(leaf: _Leaf) -> tuple[object, ...]:
    target, parts = leaf.target, leaf.parts
    devices = [device.id for device in parts.mesh.devices.flat]
    return target.name, target.dtype.str, target.shape, devices, parts.before, parts.after, parts.sends, parts.moves


def check(facts: Mapping[int, str]) -> None:
    """Raise `TensorMismatchError` if processes see other files than the first, or would exchange other leaves."""
    parsed = {process: json.loads(text) for process, text in facts.items()}
    first = min(parsed)
    expected, where = parsed[first]["identity"], parsed[first]["path"]
    if others := [process for process in parsed if parsed[process]["identity"] != expected]:
        found = parsed[others[0]]
        # A local copy and a server have other kinds of facts: one that only one side has differs too.
        kinds = expected | found["identity"]
        differing = [kind for kind in kinds if found["identity"].get(kind) != expected.get(kind)]
        raise TensorMismatchError(
            f"process {some(others)} does not see the files that process {first} sees: {found['path']!r} and {where!r} "
            f"have different {' and '.join(differing)}"
        )
    same({process: text["exchanges"] for process, text in parsed.items()}, _OTHERWISE)


def exchanged(under_way: Filling, batched: Batches, key: str) -> dict[int, jax.Array]:
    """Return the leaves that devices exchange, by number. `key` is that of the restore.

    Raises what `Filling.fill` raises, and `StorageError` if another process fails.
    """
    values: dict[int, jax.Array] = {}
    sent: list[jax.Array] = []
    with collectives.ended_by_sigterm():
        for number, batch in enumerate(batched):
            parts = together(f"{key}/{number}", partial(_read, under_way, batch))
            # Frees the device memory of the previous batch's parts.
            jax.block_until_ready(sent)
            sent = collectives.start(partial(_shards, leaf, part) for leaf, part in zip(batch, parts, strict=True))
            values |= zip([leaf.number for leaf in batch], sent, strict=True)
        jax.block_until_ready(sent)
    return values


def _read(under_way: Filling, batch: Sequence[_Leaf]) -> list[jax.Array]:
    """Read this process's parts."""
    parts = under_way.fill(
        [leaf.parts.target(leaf.target) for leaf in batch], sum(leaf.target.local_nbytes for leaf in batch)
    )
    # Other processes are about to receive them.
    under_way.check()
    return parts


def _shards(leaf: _Leaf, part: jax.Array) -> jax.Array:
    """Return the filled target, made of the parts on its devices."""
    target, parts = leaf.target, leaf.parts
    sharding = cast(NamedSharding, target.sharding)
    # The same buffers in the order of the leaf's mesh.
    part = jax.make_array_from_single_device_arrays(
        part.shape, NamedSharding(parts.mesh, parts.before), [shard.data for shard in part.addressable_shards]
    )
    made = _program(parts, target.shape, np.dtype(target.dtype))(part)
    if on_host(sharding) and len(target.local_boxes()) < len(sharding.addressable_devices):
        # As in a direct restore, CPU devices that hold the same box share its memory.
        boxes = {box_of(shard.index, target.shape): np.asarray(shard.data) for shard in made.addressable_shards}
        return assemble(sharding, target.shape, target.dtype, boxes)
    return jax.make_array_from_single_device_arrays(
        target.shape, sharding, [shard.data for shard in made.addressable_shards]
    )


@lru_cache(maxsize=2**10)
def _program(parts: Parts, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return the compiled program that makes the shards of a leaf of its parts.

    It moves integers, because XLA may change NaNs. It says which device sends what, because XLA, given only the two
    shardings, may first make the whole leaf on every device.
    """

    def moved(part: jax.Array) -> jax.Array:
        bits = to_bits(part)
        if parts.sends:
            bits = jax.lax.ppermute(bits, parts.mesh.axis_names, parts.sends)
        for axes, source, destination in parts.moves:
            if destination is None:
                bits = jax.lax.all_gather(bits, axes, axis=source, tiled=True)
            else:
                bits = jax.lax.all_to_all(bits, axes, destination, source, tiled=True)
        for dimension, size in enumerate(shape):
            if parts.shape[dimension] != size:
                bits = jax.lax.slice_in_dim(bits, 0, size, axis=dimension)
        return from_bits(bits, dtype)

    return jax.jit(jax.shard_map(moved, mesh=parts.mesh, in_specs=parts.before, out_specs=parts.after, check_vma=False))
