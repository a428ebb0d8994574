"""What `test_programs.py` runs in several processes: many leaves whose shards devices send each other."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.save.job import prepare
from orbax_safetensors.save.request import SaveRequest
from tests.support.measure import different_shards

# Many times as many programs as XLA's CPU client lets be in flight: enough for any of them to hang if nothing waits.
LEAVES = 400


def tensors() -> dict[str, np.ndarray]:
    whole = np.arange(64 * 256, dtype=np.uint16).reshape(64, 256)
    return {f"{number:03}": whole + np.uint16(number) for number in range(LEAVES)}


def run(job: dict[str, Any]) -> dict[str, list[str]]:
    """The shards that are wrong, of what is restored and of what is saved."""
    return {"restored": broadcast(job["directory"]), "saved": saved(job)}


def broadcast(directory: str) -> list[str]:
    """Restores leaves that one process reads."""
    sharding = NamedSharding(_mesh(), P(None, "y"))
    args = ocp.type_handlers.SingleReplicaArrayRestoreArgs(sharding=sharding)
    item = {name: jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=sharding) for name, host in tensors().items()}
    restored = ost.SafetensorsHandler().restore(directory, ost.SafetensorsRestore(item, dict.fromkeys(item, args)))
    assert len(restored) == LEAVES
    return _different(restored)


def saved(job: dict[str, Any]) -> list[str]:
    """Saves leaves to an object store, and restores them."""
    options = ost.SafetensorsOptions(storage_options=job["options"])
    sharding = NamedSharding(_mesh(), P(None, ("x", "y")))
    tree = {
        name: jax.make_array_from_callback(host.shape, sharding, lambda index, host=host: host[index])
        for name, host in list(tensors().items())[:104]  # each is a request
    }
    prepare(SaveRequest(job["url"], tree, options=options)).kept().run()
    restored = ost.SafetensorsHandler(options=options).restore(job["url"], ost.SafetensorsRestore(tree))
    return _different(restored)


def _different(restored: dict[str, jax.Array]) -> list[str]:
    expected = tensors()
    return [f"{name} {shard}" for name, array in restored.items() for shard in different_shards(array, expected[name])]


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("x", "y"))
