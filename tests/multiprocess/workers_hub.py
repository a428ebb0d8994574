"""What `test_hub.py` runs in several processes."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors import processes
from orbax_safetensors.io import hub_api
from orbax_safetensors.io.retries import RefusedError


def refused(job: dict[str, Any]) -> dict[str, Any]:
    """Restores that the Hub refuses the last process, then one of this process alone, then one of all."""
    last = jax.process_count() - 1
    mine = jax.process_index() == last

    async def refuse(*_: Any) -> None:
        raise RefusedError("you may not", 403)

    def restored(devices: list[jax.Device]) -> list[float]:
        sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
        item = dict.fromkeys(job["names"], jax.ShapeDtypeStruct(tuple(job["shape"]), np.float32, sharding=sharding))
        found = ost.SafetensorsHandler().restore(job["url"], ost.SafetensorsRestore(item))
        return sorted({float(np.unique(shard.data)[0]) for leaf in found.values() for shard in leaf.addressable_shards})

    errors = []
    for _ in range(2):
        with (
            mock.patch.object(processes, "_TIMEOUT_SECONDS", 60),
            mock.patch.object(hub_api.HubApi, "contents", refuse) if mine else contextlib.nullcontext(),
        ):
            try:
                restored(jax.devices())
            except ost.StorageError as error:
                errors.append(str(error))
    if mine:
        restored(jax.local_devices())
    return {"errors": errors, "values": restored(jax.devices())}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Restores rows, several times; tells the values that each time there are in this process."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    shape = jax.ShapeDtypeStruct(tuple(job["shape"]), np.float32, sharding=NamedSharding(mesh, P("x")))
    item = dict.fromkeys(job["names"], shape)
    found = []
    for _ in range(job["times"]):
        restored = ost.SafetensorsHandler().restore(job["url"], ost.SafetensorsRestore(item))
        shards = [np.asarray(shard.data) for array in restored.values() for shard in array.addressable_shards]
        found.append(sorted({float(value) for shard in shards for value in np.unique(shard)}))
    return {"values": found, "process": os.getpid()}
