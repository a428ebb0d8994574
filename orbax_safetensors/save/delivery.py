"""Deliveries: devices send the shards of a tensor over their links to the one process that writes its file.

Their programs run before anything is written, in the same order in all processes, whether or not the writes succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.arrays import local_shards, on_accelerator, to_host
from orbax_safetensors.devices.bits import is_float, to_bits
from orbax_safetensors.devices.collectives import MAX_IN_FLIGHT
from orbax_safetensors.devices.sharding import Axes, axes_of, local_boxes, no_mesh
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.names import some
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.strided import extent
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer.plan import Block, Location

# Bytes of each device's memory for shards that are received and not yet copied to the host.
_BATCH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Delivery:
    """The part of one leaf that is in one tensor: `boxes` of the leaf, all in `hull`, go to rank `owner`."""

    leaf: Leaf
    hull: Box
    boxes: tuple[Box, ...]
    owner: int


def deliveries(leaves: Sequence[Leaf], locations: Mapping[str, Location], owners: Sequence[int]) -> list[Delivery]:
    """Return all deliveries, in an order in which the receiving processes take turns.

    `locations` say where tensors lie in the files, and `owners` which process writes each file.
    """
    queues: dict[int, list[tuple[int, int, Delivery]]] = {owner: [] for owner in range(max(owners, default=0) + 1)}
    for leaf in leaves:
        for tensor, boxes in _boxes(leaf.view).items():
            location = locations[tensor]
            owner = owners[location.file]
            queues[owner].append((location.file, location.begin, Delivery(leaf, Box.hull(boxes), tuple(boxes), owner)))
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


def holding(leaf: Leaf, active: ActiveProcesses) -> list[int]:
    """Return the ranks of the processes that can have all of a leaf, by themselves or from each other.

    Raises `TensorMismatchError` if processes that do not save would have to send parts of it, or if it has a sharding
    that is not of a mesh.
    """
    value = leaf.value
    if not isinstance(value, jax.Array):
        return list(range(active.count))
    devices: set[Any] = value.sharding.device_set
    processes = {device.process_index for device in devices}
    if not value.is_fully_replicated:
        if not processes.issubset(active.indices):
            raise TensorMismatchError(
                f"{leaf.name!r}: is sharded over devices of processes {some(sorted(processes))}, and only "
                f"{some(active.indices)} save, by primary_host and active_processes of MultiprocessingOptions; let all "
                "of them save, or shard it over devices of those that do"
            )
        if not isinstance(value.sharding, NamedSharding):
            raise TensorMismatchError(
                f"{leaf.name!r}: expected a NamedSharding, which devices need to send parts of it, found "
                f"{value.sharding}"
            )
    return [rank for rank, process in enumerate(active.indices) if process in processes]


def received(all_deliveries: Sequence[Delivery], rank: int) -> list[tuple[Block, np.ndarray]]:
    """Return what this process writes, copied to host memory; all processes call this with the same deliveries.

    A program runs in the processes that hold the array. If host memory does not suffice, this raises once all programs
    have run, because other processes wait in them.
    """
    out: list[tuple[Block, np.ndarray]] = []
    failures: list[Exception] = []
    waiting: list[tuple[Delivery, jax.Array]] = []

    def keep(blocks: Callable[[], Iterable[tuple[Block, np.ndarray]]]) -> None:
        if not failures:
            try:
                out.extend(blocks())
            except Exception as error:
                failures.append(error)
                out.clear()

    def arrived() -> Iterator[tuple[Block, np.ndarray]]:
        parts = [(delivery, part) for delivery, part in waiting if delivery.owner == rank]
        shards = [local_shards(part, local_boxes(part.sharding, part.shape)) for _, part in parts]
        memory = to_host([shard for boxes in shards for shard in boxes.values()])
        for (delivery, part), boxes in zip(parts, shards, strict=True):
            data = np.empty(part.shape, part.dtype)
            for box in boxes:
                data[box.slices] = next(memory)
            yield from _blocks(delivery, data.view(delivery.leaf.value.dtype))

    def take() -> None:
        keep(arrived)
        for _, part in waiting:
            part.block_until_ready()
            part.delete()
        waiting.clear()

    held = 0
    for delivery in all_deliveries:
        value = delivery.leaf.value
        mine = delivery.owner == rank
        if isinstance(value, jax.Array) and not value.sharding.addressable_devices:
            continue  # only others hold it
        if isinstance(value, jax.Array) and (not value.is_fully_replicated or (mine and on_accelerator(value))):
            with no_mesh():
                waiting.append((delivery, _cut(value, delivery.hull)))
            held += waiting[-1][1].addressable_data(0).nbytes
            if held >= _BATCH_BYTES or len(waiting) == MAX_IN_FLIGHT:
                take()
                held = 0
        elif mine:
            keep(partial(_blocks, delivery, np.asarray(value)[delivery.hull.slices]))
    take()
    if failures:
        raise failures[0]
    return out


def _blocks(delivery: Delivery, data: np.ndarray) -> Iterator[tuple[Block, np.ndarray]]:
    """Yield the boxes of a delivery as blocks with copies of their data; `data` is that of the hull."""
    for box in delivery.boxes:
        begins = delivery.hull.start
        at = tuple(slice(start - begin, stop - begin) for (start, stop), begin in zip(box, begins, strict=True))
        part = np.array(data[at], order="C", copy=True)
        yield Block(delivery.leaf.view, box, part.shape, part.dtype), part.reshape(-1).view(np.uint8)


def _cut(value: jax.Array, box: Box) -> jax.Array:
    """Return a box of an array, with the bits of floats as integers: in every process that holds parts of the array.

    Of a replicated array, it is on one device.
    """
    start = np.array(box.start, np.int32)
    if value.is_fully_replicated:
        shard = value.addressable_data(0)
        return _program(box.shape, shard.sharding)(shard, start)
    assert isinstance(value.sharding, NamedSharding)
    mesh = value.sharding.mesh
    assert isinstance(mesh, Mesh)
    # A mesh with explicit axes would change how the program is sharded.
    plain = Mesh(mesh.devices, mesh.axis_names)
    kept = [
        axes if axes and not size % prod(mesh.shape[axis] for axis in axes) else None
        for size, axes in zip(box.shape, _axes_within_processes(value.sharding, value.ndim), strict=True)
    ]
    shards = [_in_usual_memory(shard.data, shard.device) for shard in value.addressable_shards]
    same = jax.make_array_from_single_device_arrays(value.shape, NamedSharding(plain, value.sharding.spec), shards)
    return _program(box.shape, NamedSharding(plain, PartitionSpec(*kept)))(same, start)


@lru_cache(maxsize=4096)
def _axes_within_processes(sharding: NamedSharding, rank: int) -> Axes:
    """Return the mesh axes that shard each dimension over devices of one process."""
    owners = np.array([device.process_index for device in sharding.mesh.devices.flat]).reshape(sharding.mesh.axis_sizes)
    within = {
        axis for number, axis in enumerate(sharding.mesh.axis_names) if (owners == owners.take([0], axis=number)).all()
    }
    return tuple(tuple(axis for axis in axes if axis in within) for axes in axes_of(sharding, rank))


def _in_usual_memory(shard: jax.Array, device: Any) -> jax.Array:
    """Return a shard in the memory of its device in which programs compute."""
    moved: jax.Array = jax.device_put(shard, SingleDeviceSharding(device, memory_kind=device.default_memory().kind))
    return moved


@lru_cache(maxsize=4096)
def _program(sizes: tuple[int, ...], sharding: jax.sharding.Sharding) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    def box_of(x: jax.Array, start: jax.Array) -> jax.Array:
        if is_float(x.dtype):  # to keep the bits of NaNs
            x = to_bits(x)
        return jax.lax.dynamic_slice(x, [start[axis] for axis in range(len(sizes))], sizes)

    program: Callable[[jax.Array, np.ndarray], jax.Array] = jax.jit(box_of, out_shardings=sharding)
    return program
