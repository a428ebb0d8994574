"""What `test_hub.py` runs in several processes."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost


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
