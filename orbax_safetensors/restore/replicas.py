"""Single-replica restores: one replica of the mesh reads, the others receive over the network between devices.

Only leaves with `ocp.type_handlers.SingleReplicaArrayRestoreArgs` are restored so, which pays if storage is slower than
the network and there are many replicas. All processes agree that none has failed before devices send anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orbax_safetensors.devices import collectives
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.agreement import new_key, reaching_others, together
from orbax_safetensors.devices.bits import from_bits, to_bits
from orbax_safetensors.devices.sharding import device_owners
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.restore.target import Target

# Replicas are told apart along the first axis of the mesh, and the first of them reads: Orbax's defaults.
_REPLICA_AXIS = 0
_SOURCE = 0


def fill_and_broadcast(fill: Callable[[Sequence[Target]], list[Any]], targets: Sequence[Target]) -> list[Any]:
    """Return what `fill` returns of targets, except that one replica reads and broadcasts those with `broadcast`.

    Every process passes the same targets. Raises `TensorMismatchError` if such a target is not sharded over a mesh, and
    `StorageError` if another process fails.
    """
    process = jax.process_index()
    reading = [readers(target, None) for target in targets]
    spread = [at for at, among in enumerate(reading) if among is not None]
    if not spread:
        return fill(targets)

    def read() -> list[Any]:
        here = [at for at, among in enumerate(reading) if among is None or process in among]
        read_here = [
            targets[at] if reading[at] is None else replace(targets[at], sharding=_on_this_replica(targets[at]))
            for at in here
        ]
        values_here = dict(zip(here, fill(read_here), strict=True))
        return [values_here.get(at) for at in range(len(targets))]

    meshes = [cast(NamedSharding, targets[at].sharding).mesh for at in spread]
    processes = sorted({device.process_index for mesh in meshes for device in mesh.devices.flat})
    active = ActiveProcesses(tuple(processes), processes[0])
    key = new_key("broadcast", active=active)
    values = together(key, read, active=active)
    with reaching_others(active):
        sent = collectives.start(partial(_broadcast, targets[at], values[at]) for at in spread)
        jax.block_until_ready(sent)
    for at, value in zip(spread, sent, strict=True):
        values[at] = value
    return values


def readers(target: Target, process_count: int | None) -> frozenset[int] | None:
    """Return the processes that read a target and broadcast it; None if all processes read what they hold.

    All do so as well if a process holds several replicas, which it reads once, and if the target has only one replica
    or no elements. `process_count` is as for `device_owners`.
    """
    if not target.broadcast:
        return None
    sharding = target.sharding
    if not isinstance(sharding, NamedSharding):
        raise TensorMismatchError(f"{target.name!r}: SingleReplicaArrayRestoreArgs needs a sharding over a mesh")
    replicas = _by_replica(sharding.mesh, np.array(device_owners(sharding, target.shape, process_count)))
    spanning = sum(len(set(replica)) for replica in replicas) > len(set(replicas.flat))
    sharded = _axis(sharding.mesh) in jax.tree.leaves(tuple(sharding.spec))
    alone = len(replicas) == 1 or spanning or sharded or 0 in target.shape
    return None if alone else frozenset(replicas[_SOURCE].tolist())


def _axis(mesh: Mesh | AbstractMesh) -> Any:
    return mesh.axis_names[_REPLICA_AXIS]


def _by_replica(mesh: Mesh | AbstractMesh, owners: np.ndarray) -> np.ndarray:
    """Return `owners`, which is in the order of the mesh, with one row for each replica."""
    shape = tuple(mesh.shape.values())
    return np.moveaxis(owners.reshape(shape), _REPLICA_AXIS, 0).reshape(shape[_REPLICA_AXIS], -1)


def _on_this_replica(target: Target) -> NamedSharding:
    """Return the target's sharding over the replica that this process belongs to."""
    assert isinstance(target.sharding, NamedSharding)
    mesh = target.sharding.mesh
    assert isinstance(mesh, Mesh)
    for number in range(mesh.devices.shape[_REPLICA_AXIS]):
        devices = np.take(mesh.devices, [number], axis=_REPLICA_AXIS)
        if jax.process_index() in {device.process_index for device in devices.flat}:
            return NamedSharding(Mesh(devices, mesh.axis_names), target.sharding.spec)
    raise TensorMismatchError(f"{target.name!r}: process {jax.process_index()} has no device in the mesh {mesh}")


def _broadcast(target: Target, value: jax.Array | None) -> jax.Array:
    """Return the target on all replicas; `value` is its array on this process's replica, None if not read here."""
    sharding = target.sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    # A mesh with explicit axes would change how the program is sharded.
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    # Replicas lie one after the other in the first dimension: shards that were read stay as they are, others are zeros.
    first, *rest = sharding.spec or (None,)
    axes = () if first is None else first if isinstance(first, tuple) else (first,)
    stacked = NamedSharding(mesh, PartitionSpec((_axis(mesh), *axes), *rest))
    size, *sizes = target.shape or (1,)
    shape = (mesh.devices.shape[_REPLICA_AXIS] * size, *sizes)
    shard_shape = stacked.shard_shape(shape)
    parts = [] if value is None else [shard.data.reshape(shard_shape) for shard in value.addressable_shards]
    blank = stacked.addressable_devices - {part.device for part in parts}
    if blank:
        in_turn = NamedSharding(Mesh(sorted(blank, key=lambda device: device.id), "x"), PartitionSpec("x"))
        zeros = _zeros((len(blank) * shard_shape[0], *shard_shape[1:]), target.dtype, in_turn)()
        parts += [shard.data for shard in zeros.addressable_shards]
    total = _sum(target.shape, NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind))
    made = total(jax.make_array_from_single_device_arrays(shape, stacked, parts))
    return jax.make_array_from_single_device_arrays(
        target.shape, sharding, [shard.data for shard in made.addressable_shards]
    )


@lru_cache(maxsize=2**10)
def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding) -> Any:
    """Return the compiled program that makes elements whose bits are zero, which in some dtypes is another number."""

    def zeros() -> jax.Array:
        return from_bits(jnp.zeros_like(to_bits(jnp.empty(shape, dtype))), dtype)

    return jax.jit(zeros, out_shardings=sharding)


@lru_cache(maxsize=2**10)
def _sum(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Return the compiled program that sums replicas: bit for bit the only summand that is not zero."""
    count = sharding.mesh.shape[_axis(sharding.mesh)]

    def sum_of(stacked: jax.Array) -> jax.Array:
        bits = to_bits(stacked.reshape(count, *shape))
        return from_bits(jnp.sum(bits, axis=0, dtype=bits.dtype), stacked.dtype)

    return jax.jit(sum_of, out_shardings=sharding)
