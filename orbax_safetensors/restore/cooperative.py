"""Cooperative restores: what several processes need is read once, in parts, and sent from device to device.

With `SafetensorsOptions(cooperative=True)`, the leaves for which that saves bytes, as `exchanges` finds, are read so,
and all others directly. All processes agree on them once each has opened the checkpoint. Then in batches: every process
reads its parts, all processes agree that none has failed, and the devices exchange the parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices import collectives
from orbax_safetensors.devices.agreement import forget, together
from orbax_safetensors.devices.bits import from_bits, to_bits
from orbax_safetensors.devices.sharding import assemble, box_of, on_host
from orbax_safetensors.geometry.exchange import Exchange, by_owner
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore import replicas
from orbax_safetensors.restore.exchanges import Swap, reading, spec
from orbax_safetensors.restore.fill import Filling, filling, in_file_order
from orbax_safetensors.restore.plan import distribution_of
from orbax_safetensors.restore.request import Request
from orbax_safetensors.restore.target import Target
from orbax_safetensors.transfer.engine import batches

_OTHERWISE = (
    "does not restore the same as process 0: other names, shapes, dtypes or shardings, other options, or it does not "
    "see the same files"
)

# Keys of restores that this process was in with all others. Once all have come to a later one, which they make in the
# same order, nobody needs what was agreed on in these.
_left: set[str] = set()


class Decided(NamedTuple):
    """A restore of which no tensor has been read: what is asked for, and what of it devices exchange, in batches.

    `batches` have the leaves by their numbers, `swaps` how each of them is exchanged. `key` is that of agreements, if
    all processes make the restore.
    """

    checkpoint: Checkpoint
    request: Request
    swaps: Mapping[int, Swap] = MappingProxyType({})
    batches: Sequence[Sequence[int]] = ()
    key: str = ""


def decide(resolve: Callable[[], tuple[Checkpoint, Request]], options: SafetensorsOptions, key: str | None) -> Decided:
    """Opens a checkpoint, finds in it what is asked for, and decides how to restore that.

    With a `key`, which is no other restore's, together with all other processes, which ask for the same: then all of
    them raise where one fails, and what devices can exchange may be. Raises what `resolve` raises, and
    `TensorMismatchError` where the processes do not restore the same.
    """
    if key is None:
        return Decided(*resolve())
    earlier = _left.copy()
    try:
        with collectives.ended_by_sigterm():
            decided = together(
                f"{key}/decided", lambda: _decided(*resolve(), options, key), _facts, otherwise=_OTHERWISE
            )
    finally:
        _left.add(key)
    for one in earlier:
        forget(one)
    _left.difference_update(earlier)
    return decided


def _decided(checkpoint: Checkpoint, request: Request, options: SafetensorsOptions, key: str) -> Decided:
    chosen = distribution_of(checkpoint, request.targets, None, options).chosen
    swaps = {at: swap for at, swap in enumerate(chosen) if swap is not None}
    leaves = {at: request.targets[at] for at in swaps}
    numbers = list(leaves)
    groups = in_file_order(checkpoint, list(leaves.values()))
    # All processes have to make the same batches, so that they are of equal size in all of them.
    sized = [
        ([numbers[at] for at in group], sum(_nbytes(leaves[numbers[at]], swaps[numbers[at]]) for at in group))
        for group in groups
    ]
    batched = [[at for group in batch for at in group] for batch in batches(sized, options.in_flight_bytes // 2)]
    return Decided(checkpoint, request, swaps, batched, key)


def restore(decided: Decided, options: SafetensorsOptions) -> list[Any]:
    """Fills the targets of a request with what this process holds of them, with all other processes if they agreed.

    Raises:
      TensorMismatchError: a cast that nobody asked for would change values.
      StorageError: bytes cannot be read, or a file changed, here or in another process that this one restores with.
        Then nothing is returned, and no file or thread stays.
    """
    targets = decided.request.targets
    values: dict[int, Any] = {}
    with filling(decided.checkpoint, options) as fillings:
        # First, so that whoever fails to read what it alone needs leaves nobody waiting.
        if decided.batches:
            with collectives.ended_by_sigterm():
                values |= _exchanged(fillings, decided)
        rest = [at for at in range(len(targets)) if at not in values]
        values |= zip(rest, replicas.fill(fillings, [targets[at] for at in rest]), strict=True)
    return [values[at] for at in range(len(targets))]


def _exchanged(fillings: Filling, decided: Decided) -> dict[int, jax.Array]:
    """Leaves of which every process reads parts."""
    values: dict[int, jax.Array] = {}
    sent: list[jax.Array] = []
    before = f"{decided.key}/decided"
    for number, batch in enumerate(decided.batches):
        leaves = [(decided.request.targets[at], decided.swaps[at]) for at in batch]
        parts = together(f"{decided.key}/{number}", partial(_read, fillings, leaves))
        forget(before)
        before = f"{decided.key}/{number}"
        # Until then the parts of the batch before are in the devices' memory.
        jax.block_until_ready(sent)
        sent = collectives.start(partial(_shards, *leaf, part) for leaf, part in zip(leaves, parts, strict=True))
        values |= zip(batch, sent, strict=True)
    jax.block_until_ready(sent)
    return values


def _read(fillings: Filling, leaves: Sequence[tuple[Target, Swap]]) -> list[jax.Array]:
    """The parts that this process reads."""
    parts = fillings.fill([_part(target, swap) for target, swap in leaves])
    # Others are about to take them.
    fillings.check()
    return parts


def _nbytes(target: Target, swap: Swap) -> int:
    """The most that any process reads into memory of a leaf, in bytes."""
    devices = max(swap.owners.count(process) for process in set(swap.owners))
    return prod(swap.exchange.padded) * target.dtype.itemsize * devices // swap.exchange.devices


def _facts(decided: Decided) -> str:
    """Differs between processes that would not exchange the same, or not of the same files."""
    if not decided.swaps:
        return ""
    store, files = decided.checkpoint.store, decided.checkpoint.files
    # What a file system says of a file's version may differ between the hosts that have mounted it.
    stored = [file.stamp.nbytes if store.maps else (file.stamp.nbytes, file.stamp.version) for file in files]
    leaves = [(decided.request.targets[at], decided.swaps[at]) for batch in decided.batches for at in batch]
    told = [
        (
            target.name,
            target.dtype.str,
            swap.exchange,
            [device.id for device in _mesh(target, swap).devices.flat],
        )
        for target, swap in leaves
    ]
    facts = repr((stored, list(map(len, decided.batches)), told))
    return hashlib.sha256(facts.encode("utf-8", "backslashreplace")).hexdigest()


def _part(target: Target, swap: Swap) -> Target:
    """What is read of a target instead of its shards."""
    devices = _mesh(target, swap).devices.ravel()[by_owner(swap.owners)]
    return replace(target, shape=swap.exchange.padded, sharding=reading(swap.exchange, devices))


def _mesh(target: Target, swap: Swap) -> Mesh:
    """The devices of a target along the axes of its exchange."""
    sharding = cast(NamedSharding, target.sharding)
    sizes = swap.exchange.sizes
    return Mesh(cast(Mesh, sharding.mesh).devices.reshape(sizes), tuple(map(str, range(len(sizes)))))


def _shards(target: Target, swap: Swap, part: jax.Array) -> jax.Array:
    """The target, from the parts of it that its devices have."""
    sharding = cast(NamedSharding, target.sharding)
    mesh = _mesh(target, swap)
    # The same memory under another name: what a device has read need not be its part of this array.
    parts = jax.make_array_from_single_device_arrays(
        part.shape,
        NamedSharding(mesh, spec(swap.exchange.parts)),
        [shard.data for shard in part.addressable_shards],
    )
    made = _program(swap.exchange, swap.exchange.sends(swap.owners), mesh, np.dtype(target.dtype))(parts)
    if on_host(sharding) and len(target.local_boxes()) < len(sharding.addressable_devices):
        # As in a direct restore, CPU devices that hold the same share its memory.
        boxes = {box_of(shard.index, target.shape): np.asarray(shard.data) for shard in made.addressable_shards}
        return assemble(sharding, target.shape, target.dtype, boxes)
    return jax.make_array_from_single_device_arrays(
        target.shape, sharding, [shard.data for shard in made.addressable_shards]
    )


@lru_cache(maxsize=2**10)
def _program(exchange: Exchange, sends: tuple[tuple[int, int], ...], mesh: Mesh, dtype: np.dtype) -> Any:
    """Makes shards of parts, on all devices of a mesh; compiled once."""

    def moved(part: jax.Array) -> jax.Array:
        bits = to_bits(part)
        if sends:
            bits = jax.lax.ppermute(bits, mesh.axis_names, sends)
        for move in exchange.moves:
            names = tuple(map(str, move.axes))
            if move.destination is None:
                bits = jax.lax.all_gather(bits, names, axis=move.source, tiled=True)
            else:
                bits = jax.lax.all_to_all(bits, names, move.destination, move.source, tiled=True)
        for dimension, size in enumerate(exchange.shape):
            if exchange.padded[dimension] != size:
                bits = jax.lax.slice_in_dim(bits, 0, size, axis=dimension)
        return from_bits(bits, dtype)

    return jax.jit(
        jax.shard_map(moved, mesh=mesh, in_specs=spec(exchange.parts), out_specs=spec(exchange.shards), check_vma=False)
    )
