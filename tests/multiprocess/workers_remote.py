"""What `test_remote.py` runs in several processes: trees of every layout from a store, compared and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.support import cases, hang
from tests.support.checkpoints import Reference
from tests.support.measure import different_shards


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Restores all tensors in every layout of a tree: which shards are wrong, and what was planned to be read."""
    own = ost.SafetensorsOptions(storage_options=job["options"])
    reference = Reference(Path(job["directory"]))
    found: dict[str, Any] = {"wrong": [], "read_bytes": 0, "opened": 0}
    for label, layouts in cases.TREES.items():
        mesh = cases.MESHES[label].mesh()
        for layout, specs in layouts.items():
            if layout == "leading":  # which is the least of them
                continue
            target = {
                name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, specs[len(shape)]))
                for name, (shape, dtype) in cases.tensors().items()
            }
            plan = ost.plan_restore(job["url"], target, options=own)
            with ost.SafetensorsCheckpointer(options=own) as checkpointer:
                restored = checkpointer.restore(job["url"], item=target, partial_restore=True)
            found["opened"] += 2
            found["read_bytes"] += plan.processes[jax.process_index()].read_bytes
            found["wrong"] += [
                f"{label} {layout} {name} {shard}"
                for name, array in restored.items()
                for shard in different_shards(array, reference.tensors[name])
            ]
    return found


def alone(url: str) -> dict[str, Any]:
    """What the first process restores alone, then a restore of all: errors, and shards that are wrong."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())
    expected = np.arange(2**16, dtype=np.float32).reshape(64, 1024)

    def restore(args: Any) -> Any:
        item = {"a": jax.ShapeDtypeStruct((64, 1024), np.float32, sharding=sharding)}
        handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(join_timeout_secs=hang.SECONDS / 2))
        return handler.restore(url, ost.SafetensorsRestore(item, {"a": args}))["a"]

    ways = {
        "NumPy arrays": lambda: restore(ocp.RestoreArgs(restore_type=np.ndarray)),
        "placeholders": lambda: restore(ocp.PLACEHOLDER),
        "an array over all devices": lambda: restore(ocp.RestoreArgs()),
    }
    errors = {}
    for name, way in ways.items() if jax.process_index() == 0 else ():
        try:
            way()
        except ost.SafetensorsError as error:
            errors[name] = str(error)
    return {
        "errors": errors,
        "wrong": different_shards(restore(ocp.type_handlers.SingleReplicaArrayRestoreArgs()), expected),
    }
