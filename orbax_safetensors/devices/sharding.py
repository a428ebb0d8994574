"""Which boxes of a sharded array each device, and each process, holds. Nothing here touches an array's data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, PartitionSpec

from orbax_safetensors.errors import SafetensorsError, TensorMismatchError
from orbax_safetensors.format.digest import digest_of
from orbax_safetensors.geometry.box import Box

Axes = tuple[tuple[str, ...], ...]  # the mesh axes that shard each dimension


def default_sharding() -> jax.sharding.Sharding:
    """Return the sharding of arrays without a requested sharding: on JAX's default device."""
    sharding: jax.sharding.Sharding = jax.device_put(np.zeros(())).sharding
    return sharding


def plain(sharding: jax.sharding.Sharding | Format) -> jax.sharding.Sharding:
    """Return the sharding of a `Format`, or a sharding unchanged."""
    return sharding.sharding if isinstance(sharding, Format) else sharding  # type: ignore[return-value]  # None only in layouts


def no_mesh() -> AbstractContextManager[object]:
    """Return a context without the mesh that a caller has set with `jax.set_mesh`.

    JAX refuses programs, also those that it makes of its own accord, over other devices than those of the mesh. Raises
    `SafetensorsError` while it traces a function.
    """
    try:
        return jax.set_mesh(Mesh(np.empty((), object), ()))
    except ValueError as error:
        raise SafetensorsError(f"a checkpoint cannot be restored or saved in a function of jax.jit: {error}") from error


@lru_cache(maxsize=2**16)
def local_boxes(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return the distinct boxes of an array of `shape` that devices of this process hold, in the order of the devices.

    Raises `TensorMismatchError` if JAX cannot shard the shape as `sharding`.
    """
    _check_entries(sharding, shape)
    try:
        indices = sharding.addressable_devices_indices_map(shape)
    except (ValueError, IndexError) as error:
        raise TensorMismatchError(f"shape {shape} cannot be sharded as {sharding}: {error}") from error
    return tuple(dict.fromkeys(box_of(index, shape) for index in indices.values()))


def box_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    """Return the box of `shape` for a tuple of slices, which is JAX's index of a shard."""
    assert index is not None
    return Box(taken.indices(size)[:2] for taken, size in zip(index, shape, strict=True))


@lru_cache(maxsize=2**16)
def holders(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], process: int, process_count: int | None
) -> dict[Box, tuple[int, ...]]:
    """Return all processes that hold each distinct box that `process` holds; the boxes are sorted."""
    return {box: held_by for box, held_by in all_holders(sharding, shape, process_count).items() if process in held_by}


@lru_cache(maxsize=2**16)
def all_holders(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], process_count: int | None
) -> dict[Box, tuple[int, ...]]:
    """Return all processes that hold each distinct box of an array; the boxes are sorted.

    `process_count` is as for `device_owners`.
    """
    owners = device_owners(sharding, shape, process_count)
    out: dict[Box, set[int]] = {}
    for box, owner in zip(device_boxes(sharding, shape), owners, strict=True):
        out.setdefault(box, set()).add(owner)
    return {box: tuple(sorted(out[box])) for box in sorted(out)}


@lru_cache(maxsize=2**16)
def boxes_digest(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
    """Return a digest of the boxes of all devices; it is the same in all processes with the same array."""
    indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    boxes = sorted((device.id, box_of(index, shape)) for device, index in indices.items())
    return digest_of(boxes)


def device_boxes(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> list[Box]:
    """Return the box of every device, in the order of the mesh if there is one; the mesh may be abstract.

    A dimension that does not divide is cut as XLA cuts it: into equal blocks, rounded up; the last blocks may be short
    or empty. Raises `TensorMismatchError` if the sharding does not fit the shape.
    """
    _check_entries(sharding, shape)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return _named_boxes(sharding, shape)
    try:
        return [box_of(index, shape) for index in sharding.devices_indices_map(shape).values()]
    except (ValueError, IndexError) as error:
        raise TensorMismatchError(f"shape {shape} cannot be sharded as {sharding}: {error}") from error


def device_owners(sharding: jax.sharding.Sharding, shape: tuple[int, ...], process_count: int | None) -> list[int]:
    """Return the process of every device, in the order of `device_boxes`.

    With `process_count`, the devices of a mesh are dealt to processes evenly and in order. Without it, each belongs to
    its `process_index`, or to process 0 if the mesh is abstract. Raises `TensorMismatchError` if the devices cannot be
    dealt evenly.
    """
    if isinstance(sharding, jax.sharding.NamedSharding):
        if process_count is not None:
            if sharding.mesh.size % process_count:
                raise TensorMismatchError(
                    f"{sharding.mesh.size} devices cannot be dealt to {process_count} processes evenly"
                )
            return [number * process_count // sharding.mesh.size for number in range(sharding.mesh.size)]
        if is_abstract(sharding):
            return [0] * sharding.mesh.size
        return [device.process_index for device in sharding.mesh.devices.flat]
    devices: list[Any] = list(sharding.devices_indices_map(shape))
    return [device.process_index for device in devices]


def by_process(boxes: Sequence[Box], owners: Sequence[int], process_count: int) -> list[tuple[Box, ...]]:
    """Return the boxes of each process, given the box and the process of every device."""
    held: list[list[Box]] = [[] for _ in range(process_count)]
    for owner, box in zip(owners, boxes, strict=True):
        held[owner].append(box)
    return [tuple(local) for local in held]


def num_processes(shardings: Iterable[jax.sharding.Sharding | None], process_count: int | None) -> int:
    """Return how many processes share arrays of these shardings: `process_count`, or by default all processes.

    Raises `SafetensorsError` if `process_count` is not a positive integer.
    """
    if process_count is not None:
        if type(process_count) is not int or process_count < 1:
            raise SafetensorsError(f"process_count is {process_count!r}, must be an integer of at least 1")
        return process_count
    # Asking JAX for its processes starts JAX, which a plan on abstract meshes must not do.
    with_devices = any(sharding is not None and not is_abstract(sharding) for sharding in shardings)
    return int(jax.process_count()) if with_devices or jax.distributed.is_initialized() else 1


def is_abstract(sharding: jax.sharding.Sharding) -> bool:
    """Return whether a sharding has no devices."""
    return isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, jax.sharding.AbstractMesh)


def platform_of(sharding: jax.sharding.Sharding | Format) -> str:
    """Return the platform of a sharding's devices, as `gpu`; an abstract mesh may say that it is of TPUs."""
    named = plain(sharding)
    if isinstance(named, jax.sharding.NamedSharding) and isinstance(named.mesh, jax.sharding.AbstractMesh):
        kind = getattr(named.mesh.abstract_device, "device_kind", None)
        return "tpu" if kind and kind.startswith("TPU") else "gpu"
    devices: set[Any] = named.device_set
    return str(next(iter(devices)).platform)


def _check_entries(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> None:
    """Raise `TensorMismatchError` if a partition has more entries than the shape has dimensions."""
    if isinstance(sharding, jax.sharding.NamedSharding) and len(sharding.spec) > len(shape):
        raise TensorMismatchError(
            f"shape {shape} cannot be sharded as {sharding.spec}: expected a partition of at most {len(shape)} entries"
        )


def axes_of(sharding: jax.sharding.NamedSharding, rank: int) -> Axes:
    """Return the mesh axes that shard every dimension of an array of `rank` dimensions."""
    entries = (*sharding.spec, *[None] * (rank - len(sharding.spec)))
    return tuple(
        # JAX replicates an unconstrained dimension if nothing else decides.
        () if entry is None or entry is PartitionSpec.UNCONSTRAINED else entry if isinstance(entry, tuple) else (entry,)
        for entry in entries
    )


def _named_boxes(sharding: jax.sharding.NamedSharding, shape: tuple[int, ...]) -> list[Box]:
    """Return the box of each device of a mesh, in the order of the mesh."""
    sizes = dict(sharding.mesh.shape)
    positions = {axis: position for position, axis in enumerate(sizes)}
    coordinates = np.array(list(np.ndindex(*sizes.values())), np.int64).reshape(-1, len(sizes)).T
    ranges = []
    for size, axes in zip(shape, axes_of(sharding, len(shape)), strict=True):
        block = np.zeros(coordinates.shape[1], np.int64)
        for name in axes:
            block = block * sizes[name] + coordinates[positions[name]]
        length = -(-size // prod(sizes[name] for name in axes))
        start = np.minimum(block * length, size)
        ranges.append(zip(start.tolist(), np.minimum(start + length, size).tolist(), strict=True))
    return list(map(Box, zip(*ranges, strict=True))) if ranges else [Box()] * coordinates.shape[1]
