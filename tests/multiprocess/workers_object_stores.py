"""What `test_object_stores.py` runs in several processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.devices import agreement
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping import Family, stack, tensor
from orbax_safetensors.save.prepare import Save, prepare_save
from orbax_safetensors.save.shards import Shards
from orbax_safetensors.save.write import write_beside, write_save
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
        ("whole", 5_000_000_000, job["options"]),
        ("fails", 5_000_000_000, job["options"] | {"max_retries": 0}),
        ("whole fails", 5_000_000_000, job["options"] | {"max_retries": 0}),
    ):
        own = ost.SafetensorsOptions(storage_options=options, whole_tensors=name.startswith("whole"))
        directory = f"{job['url']}/{name}"
        plan = prepare_save(
            tree(mesh), directory=directory, metadata=None, max_file_bytes=max_file_bytes, config={"a": 1}, options=own
        )
        found[f"{name} bytes"] = sum(header.data_bytes for _, header in plan.layout.files)
        planned = ost.plan_save(directory, tree(mesh), max_file_bytes=max_file_bytes, config={"a": 1}, options=own)
        found[f"{name} planned"] = planned.processes[jax.process_index()].written_bytes
        try:
            write_save(plan, Shards.kept(plan), directory)
        except ost.StorageError as error:
            found[name] = str(error)
            continue
        found[name] = _wrong(directory, mesh, own)
    _family(f"{job['url']}/family", job, mesh)
    _adapter(f"{job['url']}/adapter", job, mesh)
    found["again"] = _again(f"{job['url']}/again", job, mesh)
    found["one alone"] = _one_alone(f"{job['url']}/alone", job, mesh)
    return found


def _one_alone(directory: str, job: dict[str, Any], mesh: Mesh) -> list[str]:
    """What is said where one process alone cannot use its way to the store, in every step of a save."""

    def options(process: int) -> ost.SafetensorsOptions:
        wrong = {"no_such_option": "x"} if jax.process_index() == process else {}
        return ost.SafetensorsOptions(storage_options=job["options"] | wrong, join_timeout_secs=10)

    def planned(own: ost.SafetensorsOptions) -> Save:
        leaves = {"a": array(VALUES["table"], mesh, ("x", "y"))}
        return prepare_save(leaves, directory=directory, metadata=None, max_file_bytes=10**9, options=own)

    plan = planned(options(-1))
    return [
        _said(lambda: planned(options(1))),
        _said(lambda: write_save(dataclasses.replace(plan, options=options(1)), Shards.of(plan), directory)),
        _said(lambda: write_beside(directory, {"x": ""}, options=options(0))),
    ]


def _said(call: Callable[[], Any]) -> str:
    with mock.patch.object(agreement, "_TIMEOUT_SECONDS", 10):
        try:
            call()
        except ost.SafetensorsError as error:
            return str(error)
    return ""


def _model(config: Any) -> dict[str, View]:
    """A leaf that many tensors are stacked in, transposed, and one whose two tensors alternate."""
    layers = stack([tensor(f"{layer}.w", (24, 16)).T for layer in range(6)], axis=1)
    return {"layers": layers, "gates": stack([tensor("up", (16, 8)), tensor("gate", (16, 8))], axis=2)}


def family_values() -> dict[str, np.ndarray]:
    """What the files hold of it."""
    rng = np.random.default_rng(3)
    names = {f"{layer}.w": (24, 16) for layer in range(6)} | {"up": (16, 8), "gate": (16, 8)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in names.items()}


def _family(directory: str, job: dict[str, Any], mesh: Mesh) -> None:
    """Saves a model's own tree as whole tensors."""
    own = ost.SafetensorsOptions(storage_options=job["options"], whole_tensors=True)
    values = family_values()
    item = {
        "layers": array(np.stack([values[f"{layer}.w"].T for layer in range(6)], 1), mesh, "x", None, "y"),
        "gates": array(np.stack([values["up"], values["gate"]], 2), mesh, "x", "y"),
    }
    handler = ost.SafetensorsHandler(family=Family("toy.model", (), _model), options=own)
    handler.save(directory, ost.SafetensorsSave(item))


def _adapter(directory: str, job: dict[str, Any], mesh: Mesh) -> None:
    """Saves an adapter, whose readers expect one file, without being asked for whole tensors."""
    own = ost.SafetensorsOptions(storage_options=job["options"])
    item = {name: array(values, mesh, "x", "y") for name, values in family_values().items()}
    ost.save(directory, item, config={"peft_type": "LORA"}, max_file_bytes=1000, options=own)


def _again(directory: str, job: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Saves where something is already: what is said, what is there then and what after it was forced."""
    own = ost.SafetensorsOptions(storage_options=job["options"])
    names = {"a": array(VALUES["table"], mesh, ("x", "y")), "b": VALUES["table"]}
    fewer = {"a": names["b"]}
    with ost.SafetensorsCheckpointer(options=own) as checkpointer:
        try:
            checkpointer.save(directory, args=ost.SafetensorsSave(names, index=True))
            no_index = ""
        except ost.SafetensorsError as error:
            no_index = str(error)
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
        "no index": no_index,
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
