"""What every restore passes through, and cooperative restores: processes read parts, and devices exchange them.

With `SafetensorsOptions(cooperative=True)`, processes read a leaf in parts if that saves bytes (`exchanges` decides),
and directly otherwise. All processes agree on these leaves once each has opened the checkpoint. Then, for each batch,
every process reads its parts, all processes agree that none has failed, and the devices exchange the parts.
"""

from __future__ import annotations

import hashlib
import json
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
from orbax_safetensors.checkpoint.identity import identity
from orbax_safetensors.devices import collectives
from orbax_safetensors.devices.agreement import forget, same, together
from orbax_safetensors.devices.arrays import assemble, on_host
from orbax_safetensors.devices.bits import from_bits, to_bits
from orbax_safetensors.devices.sharding import box_of
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.names import some
from orbax_safetensors.geometry.exchange import Exchange, by_owner
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore import replicas
from orbax_safetensors.restore.batches import in_file_order
from orbax_safetensors.restore.exchanges import Swap, reading, spec
from orbax_safetensors.restore.fill import Filling, filling
from orbax_safetensors.restore.plan import cooperates, distribution_of
from orbax_safetensors.restore.request import Request
from orbax_safetensors.restore.target import Target
from orbax_safetensors.transfer.engine import batches

_OTHERWISE = "does not restore the same as process {first}: other names, shapes, dtypes or shardings, or other options"

# Keys of restores that this process made with all others. All processes make them in the same order: once all have come
# to a later restore, no process needs the agreements of the earlier ones.
_left: set[str] = set()


class Decided(NamedTuple):
    """A restore before any tensor is read: its request, and the leaves that devices exchange, in batches.

    `batches` holds numbers of leaves, `swaps` the exchange of each of these leaves. `key` names the agreements if all
    processes make the restore, and is empty otherwise.
    """

    checkpoint: Checkpoint
    request: Request
    swaps: Mapping[int, Swap] = MappingProxyType({})
    batches: Sequence[Sequence[int]] = ()
    key: str = ""


def decide(
    open_request: Callable[[], tuple[Checkpoint, Request]], options: SafetensorsOptions, key: str | None
) -> Decided:
    """Open a checkpoint and resolve the request, as `open_request` does, and decide how to restore it.

    With a `key`, which no other restore has, all processes decide together on the same request: if one fails, all
    raise, and devices may exchange leaves. Without a `key`, this process restores alone.

    Raises what `open_request` raises, and `TensorMismatchError` if the processes do not restore the same.
    """
    if key is None:
        return Decided(*open_request())
    earlier = _left.copy()
    try:
        with collectives.ended_by_sigterm():
            decided = together(
                f"{key}/decided",
                lambda: _decided(*open_request(), options, key),
                _facts if cooperates(options) else "",
                check=_check,
                timeout_secs=options.join_timeout_secs,
            )
    finally:
        _left.add(key)
    for left in earlier:
        forget(left)
    _left.difference_update(earlier)
    return decided


def _decided(checkpoint: Checkpoint, request: Request, options: SafetensorsOptions, key: str) -> Decided:
    chosen = distribution_of(checkpoint, request.targets, None, options).chosen
    swaps = {at: swap for at, swap in enumerate(chosen) if swap is not None}
    leaves = {at: request.targets[at] for at in swaps}
    numbers = list(leaves)
    groups = in_file_order(checkpoint, list(leaves.values()))
    # All processes have to make the same batches, so a batch is sized by the process that reads most.
    sized = [
        ([numbers[at] for at in group], sum(_nbytes(leaves[numbers[at]], swaps[numbers[at]]) for at in group))
        for group in groups
    ]
    batched = [[at for group in batch for at in group] for batch in batches(sized, options.in_flight_bytes // 2)]
    return Decided(checkpoint, request, swaps, batched, key)


def restore(decided: Decided, options: SafetensorsOptions) -> list[Any]:
    """Return the leaves of a request, with the shards of this process; all processes do so together if they agreed.

    Raises:
      TensorMismatchError: a cast that the caller did not request would change values.
      StorageError: bytes cannot be read, or a file changed, in this process or in another one of the restore.

    If it raises, no file stays open and no thread runs on.
    """
    targets = decided.request.targets
    values: dict[int, Any] = {}
    with filling(decided.checkpoint, targets, options) as under_way:
        # Exchanges come first: a process that fails in its direct reads then leaves no other process waiting.
        if decided.batches:
            with collectives.ended_by_sigterm():
                values |= _exchanged(under_way, decided)
        rest = [at for at in range(len(targets)) if at not in values]
        values |= zip(rest, replicas.fill(under_way, [targets[at] for at in rest]), strict=True)
    return [values[at] for at in range(len(targets))]


def _exchanged(under_way: Filling, decided: Decided) -> dict[int, jax.Array]:
    """Return the leaves that devices exchange, by number."""
    values: dict[int, jax.Array] = {}
    sent: list[jax.Array] = []
    before = f"{decided.key}/decided"
    for number, batch in enumerate(decided.batches):
        leaves = [(decided.request.targets[at], decided.swaps[at]) for at in batch]
        parts = together(f"{decided.key}/{number}", partial(_read, under_way, leaves))
        forget(before)
        before = f"{decided.key}/{number}"
        # Frees the device memory of the previous batch's parts.
        jax.block_until_ready(sent)
        sent = collectives.start(partial(_shards, *leaf, part) for leaf, part in zip(leaves, parts, strict=True))
        values |= zip(batch, sent, strict=True)
    jax.block_until_ready(sent)
    return values


def _read(under_way: Filling, leaves: Sequence[tuple[Target, Swap]]) -> list[jax.Array]:
    """Read this process's parts."""
    parts = under_way.fill(
        [_part(target, swap) for target, swap in leaves], [target.local_nbytes for target, _ in leaves]
    )
    # Other processes are about to receive them.
    under_way.check()
    return parts


def _nbytes(target: Target, swap: Swap) -> int:
    """Return the most bytes that any process reads of a leaf into memory."""
    devices = max(swap.owners.count(process) for process in set(swap.owners))
    return prod(swap.exchange.padded) * target.dtype.itemsize * devices // swap.exchange.devices


def _facts(decided: Decided) -> str:
    """Return what tells processes that would read other files or exchange other leaves, for `_check`."""
    leaves = [(decided.request.targets[at], decided.swaps[at]) for batch in decided.batches for at in batch]
    exchanges = [
        (
            target.name,
            target.dtype.str,
            swap.exchange,
            [device.id for device in _mesh(target, swap).devices.flat],
        )
        for target, swap in leaves
    ]
    facts = repr((list(map(len, decided.batches)), exchanges))
    digest = hashlib.sha256(facts.encode("utf-8", "backslashreplace")).hexdigest()
    checkpoint = decided.checkpoint
    return json.dumps({"path": checkpoint.path, "identity": identity(checkpoint), "exchanges": digest})


def _check(facts: Mapping[int, str]) -> None:
    """Raise `TensorMismatchError` if processes see other files than the first, or would exchange other leaves."""
    if not any(facts.values()):  # they read one commit, and exchange nothing
        return
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


def _part(target: Target, swap: Swap) -> Target:
    """Return the target whose shards are the parts that processes read."""
    devices = _mesh(target, swap).devices.ravel()[by_owner(swap.owners)]
    return replace(target, shape=swap.exchange.padded, sharding=reading(swap.exchange, devices))


def _mesh(target: Target, swap: Swap) -> Mesh:
    """Return the devices of a target as a mesh with the axes of its exchange."""
    sharding = cast(NamedSharding, target.sharding)
    sizes = swap.exchange.sizes
    return Mesh(cast(Mesh, sharding.mesh).devices.reshape(sizes), tuple(map(str, range(len(sizes)))))


def _shards(target: Target, swap: Swap, part: jax.Array) -> jax.Array:
    """Return the filled target, made of the parts on its devices."""
    sharding = cast(NamedSharding, target.sharding)
    mesh = _mesh(target, swap)
    # The same buffers in mesh order; the program sends each part to the device that it belongs to.
    parts = jax.make_array_from_single_device_arrays(
        part.shape,
        NamedSharding(mesh, spec(swap.exchange.parts)),
        [shard.data for shard in part.addressable_shards],
    )
    made = _program(swap.exchange, swap.exchange.sends(swap.owners), mesh, np.dtype(target.dtype))(parts)
    if on_host(sharding) and len(target.local_boxes()) < len(sharding.addressable_devices):
        # As in a direct restore, CPU devices that hold the same box share its memory.
        boxes = {box_of(shard.index, target.shape): np.asarray(shard.data) for shard in made.addressable_shards}
        return assemble(sharding, target.shape, target.dtype, boxes)
    return jax.make_array_from_single_device_arrays(
        target.shape, sharding, [shard.data for shard in made.addressable_shards]
    )


@lru_cache(maxsize=2**10)
def _program(exchange: Exchange, sends: tuple[tuple[int, int], ...], mesh: Mesh, dtype: np.dtype) -> Any:
    """Return the compiled program that makes shards of parts on all devices of a mesh."""

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
