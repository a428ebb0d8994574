"""What `test_object_stores.py` runs in several processes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors import api
from orbax_safetensors.save import Shards
from tests.multiprocess.workers_save import VALUES, array

SPECS = [("x", "y"), ("y", "x"), (None, ("x", "y")), (("x", "y"),), (), (None, "x")]


def tree(mesh: Mesh) -> dict[str, Any]:
    """Every leaf, sharded in every way."""
    whole = {
        f"{number}": {name: array(host, mesh, *spec) for name, host in VALUES.items()}
        for number, spec in enumerate(SPECS)
    }
    return {**whole, "host": VALUES["table"]}


def expected() -> dict[str, np.ndarray]:
    """What the files hold."""
    named = {f"{number}.{name}": host for number in range(len(SPECS)) for name, host in VALUES.items()}
    return {**named, "host": VALUES["table"]}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Saves twice, in one file each and in several, restores in other shardings, and fails where one process does."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))
    found: dict[str, Any] = {}
    for name, max_file_bytes, options in (
        ("one", 5_000_000_000, job["options"]),
        ("many", 3000, job["options"]),
        ("fails", 5_000_000_000, job["options"] | {"max_retries": 0}),
    ):
        own = ost.SafetensorsOptions(storage_options=options)
        directory = f"{job['url']}/{name}"
        plan = api.plan_save(
            tree(mesh), directory=directory, metadata=None, max_file_bytes=max_file_bytes, config={"a": 1}, options=own
        )
        found[f"{name} bytes"] = sum(header.data_bytes for _, header in plan.layout.files)
        try:
            api.write(plan, Shards.copied(plan), directory)
        except ost.StorageError as error:
            found[name] = str(error)
            continue
        found[name] = _wrong(directory, mesh, own)
    found["again"] = _again(f"{job['url']}/again", job, mesh)
    return found


def _again(directory: str, job: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Saves where something is already: what is said, what is there then and what after it was forced."""
    own = ost.SafetensorsOptions(storage_options=job["options"])
    names = {"a": array(VALUES["table"], mesh, ("x", "y")), "b": VALUES["table"]}
    fewer = {"a": names["b"]}
    with ost.SafetensorsCheckpointer(options=own) as checkpointer:
        checkpointer.save(directory, names, custom_metadata={"epoch": 1})
        try:
            checkpointer.save(directory, fewer)
            said = ""
        except ost.StorageError as error:
            said = str(error)
        before = sorted(ost.open_checkpoint(directory, options=own).tensors)
        checkpointer.save(directory, fewer, force=True)
        metadata = checkpointer.metadata(directory)
    return {
        "said": said,
        "before": before,
        "after": sorted(metadata.item_metadata.tree),
        "custom": metadata.custom_metadata,
    }


def _wrong(directory: str, mesh: Mesh, own: ost.SafetensorsOptions) -> list[str]:
    """Leaves of which a shard does not come back."""
    item = {
        name: jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=NamedSharding(mesh, P("y") if host.ndim else P()))
        for name, host in expected().items()
    }
    restored = ost.SafetensorsHandler(options=own).restore(directory, ost.SafetensorsRestore(item))
    return [
        name
        for name, host in expected().items()
        for shard in restored[name].addressable_shards
        if np.asarray(shard.data).tobytes() != np.ascontiguousarray(host[shard.index]).tobytes()
    ]
