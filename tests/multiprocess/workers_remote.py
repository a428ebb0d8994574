"""What `test_remote.py` runs in several processes: trees of every layout from a store, compared and counted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

import orbax_safetensors as ost
from tests.multiprocess import cases
from tests.multiprocess.checkpoints import Reference
from tests.multiprocess.measure import different_shards


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Restores all tensors in every layout of a tree: which shards are wrong, and what was planned to be read."""
    own = ost.SafetensorsOptions(storage_options=job["options"])
    reference = Reference(Path(job["directory"]))
    found: dict[str, Any] = {"process": os.getpid(), "wrong": [], "read_bytes": 0, "opened": 0}
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
