"""Restoring with one reader: a replica of the mesh reads, the others receive over the network between devices.

Only leaves with `ocp.type_handlers.SingleReplicaArrayRestoreArgs` take this way, the one place where processes talk to
each other. It pays where storage is slower than the network and there are many replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

# Orbax exports nothing of this module; the broadcast is the one that its own SingleReplicaArrayHandler makes.
from orbax.checkpoint._src.multihost import multislice

from orbax_safetensors import restore as plain
from orbax_safetensors.checkpoint import Checkpoint
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.targets import Target

# Replicas are told apart along the first axis of the mesh, and the first of them reads: Orbax's defaults.
_REPLICA_AXIS = 0
_SOURCE_REPLICA = 0


def restore(checkpoint: Checkpoint, targets: Sequence[Target], options: SafetensorsOptions) -> list[Any]:
    """`restore.restore`, in which leaves that ask for it are read by one replica and broadcast.

    Raises `TensorMismatchError` where such a leaf is not sharded over a mesh.
    """
    meshes = [_mesh(target) if target.broadcast else None for target in targets]
    own = [
        target if mesh is None else replace(target, sharding=_of_own_replica(target))
        for target, mesh in zip(targets, meshes, strict=True)
    ]
    reads = [mesh is None or _is_source(mesh) for mesh in meshes]
    values = iter(plain.restore(checkpoint, [target for target, read in zip(own, reads, strict=True) if read], options))
    out: list[Any] = [
        next(values) if read else jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=target.sharding)
        for target, read in zip(own, reads, strict=True)
    ]
    for mesh in dict.fromkeys(mesh for mesh in meshes if mesh is not None):
        members = [at for at, other in enumerate(meshes) if other == mesh]
        received, _ = multislice.broadcast_one_replica_to_all(
            tuple(out[at] for at in members), mesh, _REPLICA_AXIS, _is_source(mesh)
        )
        for at, value in zip(members, received, strict=True):
            out[at] = value
    return out


def _mesh(target: Target) -> jax.sharding.Mesh | None:
    """The mesh over which a target is broadcast; None where a process holds several replicas and reads once anyway."""
    sharding = target.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding) or isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        raise TensorMismatchError(f"{target.name!r}: SingleReplicaArrayRestoreArgs needs a sharding over a mesh")
    alone = multislice.replica_count(sharding.mesh, replica_axis_index=_REPLICA_AXIS) == 1
    if alone or multislice.process_spans_multiple_replicas(sharding.mesh, replica_axis_index=_REPLICA_AXIS):
        return None
    return sharding.mesh


def _is_source(mesh: jax.sharding.Mesh) -> bool:
    return bool(
        multislice.in_replica(jax.process_index(), mesh, replica_id=_SOURCE_REPLICA, replica_axis_index=_REPLICA_AXIS)
    )


def _of_own_replica(target: Target) -> jax.sharding.NamedSharding:
    """The target's sharding over the replica that this process belongs to."""
    assert isinstance(target.sharding, jax.sharding.NamedSharding)
    mesh = target.sharding.mesh
    devices = multislice.local_replica_devices(mesh, replica_axis_index=_REPLICA_AXIS)
    replica = jax.sharding.Mesh(np.expand_dims(devices, _REPLICA_AXIS), mesh.axis_names)
    return jax.sharding.NamedSharding(replica, target.sharding.spec)
