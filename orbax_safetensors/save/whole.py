"""Saving whole tensors from several processes to a store whose files each have one writer.

The files are those that one process would write, but shorter and more, so that all processes write about equally much.
Devices send the shards of a tensor over their links to the process that writes it. Their programs run before anything
is written, in the same order in all processes, whether or not the writes succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.arrays import on_accelerator, to_host
from orbax_safetensors.devices.collectives import MAX_IN_FLIGHT
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.layout import Layout
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.strided import extent
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer.plan import Block, Location, locations

# Bytes of device memory for shards that are received and not yet copied to the host.
_BATCH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Delivery:
    """The part of one leaf that is in one tensor: `boxes` of the leaf, all in `hull`, go to rank `owner`."""

    leaf: Leaf
    hull: Box
    boxes: tuple[Box, ...]
    owner: int


def file_bytes(total: int, max_file_bytes: int, process_count: int) -> int:
    """Return the most bytes of a file, so that each process writes at least one if there are tensors enough."""
    return max(1, min(max_file_bytes, -(-total // process_count)))


def assign_files(layout: Layout, process_count: int) -> list[int]:
    """Return the process that writes each file: the longest files first, each to the process with the fewest bytes."""
    loads = [0] * process_count
    owners = [0] * len(layout.files)
    for number in sorted(range(len(owners)), key=lambda at: (-layout.files[at][1].file_bytes, at)):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += layout.files[number][1].file_bytes
    return owners


def part_of_process(layout: Layout, owners: Sequence[int], process: int) -> tuple[Layout, Mapping[str, Location]]:
    """Return the files that a process writes, with the index of all files, and where tensors lie in them."""
    numbers = [number for number, owner in enumerate(owners) if owner == process]
    new = {number: at for at, number in enumerate(numbers)}
    places = {
        name: place._replace(file=new[place.file]) for name, place in locations(layout).items() if place.file in new
    }
    return Layout(tuple(layout.files[number] for number in numbers), layout.index), places


def deliveries(
    leaves: Sequence[Leaf], layout: Layout, owners: Sequence[int], active: ActiveProcesses
) -> list[Delivery]:
    """Return all deliveries, in an order in which the receiving processes take turns.

    Raises `TensorMismatchError` if a leaf is sharded so that the processes cannot exchange it.
    """
    places = locations(layout)
    queues: dict[int, list[tuple[int, int, Delivery]]] = {owner: [] for owner in range(max(owners, default=0) + 1)}
    for leaf in leaves:
        _check(leaf, active)
        for tensor, boxes in _boxes(leaf.view).items():
            place = places[tensor]
            owner = owners[place.file]
            queues[owner].append((place.file, place.begin, Delivery(leaf, Box.hull(boxes), tuple(boxes), owner)))
    for queue in queues.values():
        queue.sort(key=lambda entry: entry[:2])
    longest = max(map(len, queues.values()), default=0)
    return [queue[turn][2] for turn in range(longest) for queue in queues.values() if turn < len(queue)]


def _boxes(view: View) -> dict[str, list[Box]]:
    """Return the boxes of a view by tensor, without boxes that have no elements."""
    out: dict[str, list[Box]] = {}
    for piece in view.pieces:
        sizes = [extent(modes) for modes in piece.dims]
        if piece.tensor is not None and all(sizes):
            box = Box((start, start + size) for start, size in zip(piece.start, sizes, strict=True))
            out.setdefault(piece.tensor, []).append(box)
    return out


def _check(leaf: Leaf, active: ActiveProcesses) -> None:
    value = leaf.value
    if not isinstance(value, jax.Array) or not _is_spread(value):
        return
    sharding = value.sharding
    devices: set[Any] = sharding.device_set
    processes = {device.process_index for device in devices}
    if not isinstance(sharding, NamedSharding) or processes != set(active.indices):
        raise TensorMismatchError(
            f"{leaf.name!r}: cannot be saved whole: expected a NamedSharding over devices of all "
            f"{active.count} processes that save, found {sharding}"
        )


def _is_spread(value: jax.Array) -> bool:
    """Return whether an array has devices of other processes and is not replicated on all of its devices."""
    return not value.is_fully_addressable and not value.is_fully_replicated


def received(all_deliveries: Sequence[Delivery], rank: int) -> list[tuple[Block, np.ndarray]]:
    """Return what this process writes, copied to host memory; all processes call this with the same deliveries."""
    out: list[tuple[Block, np.ndarray]] = []
    waiting: list[tuple[Delivery, jax.Array]] = []

    def take() -> None:
        mine = [(delivery, part) for delivery, part in waiting if delivery.owner == rank]
        arrived = to_host([part.addressable_data(0) for _, part in mine])
        for (delivery, _), data in zip(mine, arrived, strict=True):
            out.extend(_blocks(delivery, data.view(delivery.leaf.value.dtype)))
        for _, part in waiting:
            part.block_until_ready()
            part.delete()
        waiting.clear()

    held = 0
    for delivery in all_deliveries:
        value = delivery.leaf.value
        if isinstance(value, jax.Array) and (_is_spread(value) or (delivery.owner == rank and on_accelerator(value))):
            waiting.append((delivery, _cut(value, delivery.hull)))
            held += waiting[-1][1].nbytes
            if held >= _BATCH_BYTES or len(waiting) == MAX_IN_FLIGHT:
                take()
                held = 0
        elif delivery.owner == rank:
            out.extend(_blocks(delivery, np.asarray(value)[delivery.hull.slices]))
    take()
    return out


def _blocks(delivery: Delivery, data: np.ndarray) -> Iterator[tuple[Block, np.ndarray]]:
    """Yield the boxes of a delivery as blocks with copies of their data; `data` is that of the hull."""
    for box in delivery.boxes:
        begins = delivery.hull.start
        at = tuple(slice(start - begin, stop - begin) for (start, stop), begin in zip(box, begins, strict=True))
        part = np.array(data[at], order="C", copy=True)
        yield Block(delivery.leaf.view, box, part.shape, part.dtype), part.reshape(-1).view(np.uint8)


def _cut(value: jax.Array, box: Box) -> jax.Array:
    """Return a box of an array, with the bits of floats as integers: on all devices of a spread one, else on one."""
    start = np.array(box.start, np.int32)
    if not _is_spread(value):
        shard = value.addressable_data(0)
        return _program(box.shape, shard.sharding)(shard, start)
    assert isinstance(value.sharding, NamedSharding)
    mesh = value.sharding.mesh
    assert isinstance(mesh, Mesh)
    # A mesh with explicit axes would change how the program is sharded.
    plain = Mesh(mesh.devices, mesh.axis_names)
    shards = [shard.data for shard in value.addressable_shards]
    same = jax.make_array_from_single_device_arrays(value.shape, NamedSharding(plain, value.sharding.spec), shards)
    return _program(box.shape, NamedSharding(plain, PartitionSpec()))(same, start)


@lru_cache(maxsize=4096)
def _program(sizes: tuple[int, ...], sharding: jax.sharding.Sharding) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    def box_of(x: jax.Array, start: jax.Array) -> jax.Array:
        if jax.numpy.issubdtype(x.dtype, np.floating):  # to keep the bits of NaNs
            x = jax.lax.bitcast_convert_type(x, _BITS[x.itemsize])
        return jax.lax.dynamic_slice(x, [start[axis] for axis in range(len(sizes))], sizes)

    program: Callable[[jax.Array, np.ndarray], jax.Array] = jax.jit(box_of, out_shardings=sharding)
    return program


_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
