"""What `test_object_stores.py` runs in several processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.devices import agreement
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry.view import View
from orbax_safetensors.handlers.sidecar_files import write_sidecar_files
from orbax_safetensors.mapping import Family, stack, tensor
from orbax_safetensors.save import delivery
from orbax_safetensors.save.job import SaveJob, prepare
from orbax_safetensors.save.request import SaveRequest
from tests.multiprocess.workers_families import made_by_maxtext, sharded, stored_directory
from tests.multiprocess.workers_save import VALUES, array, value
from tests.support import hang

# JAX has none of 64 bits, except complex numbers, unless it is told to.
DTYPES_OF_JAX = [
    dtype.numpy for dtype in DTYPES.values() if dtype.numpy is not None and (dtype.bits < 64 or dtype.name == "C64")
]
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
    """Saves in few files and in many, restores in other shardings, and fails where one process does."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))
    found: dict[str, Any] = {}
    for name, max_file_bytes, options in (
        ("few", 5_000_000_000, job["options"]),
        ("many", 3000, job["options"]),
        ("fails", 5_000_000_000, job["options"] | {"max_retries": 0}),
    ):
        own = ost.SafetensorsOptions(storage_options=options)
        directory = f"{job['url']}/{name}"
        saving = prepare(
            SaveRequest(directory, tree(mesh), max_file_bytes=max_file_bytes, config={"a": 1}, options=own)
        )
        found[f"{name} bytes"] = sum(saving.layout.files[number][1].data_bytes for number in saving.numbers)
        planned = ost.plan_save(directory, tree(mesh), max_file_bytes=max_file_bytes, config={"a": 1}, options=own)
        found[f"{name} planned"] = planned.processes[jax.process_index()].written_bytes
        # A program of the caller's may run on other devices.
        others = Mesh(np.array(jax.local_devices()), ("z",))
        try:
            with jax.set_mesh(others) if name == "many" else contextlib.nullcontext():
                saving.kept().run()
        except ost.StorageError as error:
            found[name] = str(error)
            continue
        found[name] = _wrong(directory, mesh, own)
    _family(f"{job['url']}/family", job, mesh)
    _adapter(f"{job['url']}/adapter", job, mesh)
    _copied(f"{job['url']}/copied", job, mesh)
    found["some"] = _some(f"{job['url']}/some", job, mesh)
    found["again"] = _again(f"{job['url']}/again", job, mesh)
    found["one alone"] = _one_alone(f"{job['url']}/alone", job, mesh)
    found["no memory"] = _no_memory(f"{job['url']}/memory", job, mesh)
    return found


def _no_memory(directory: str, job: dict[str, Any], mesh: Mesh) -> str:
    """What is said if one process cannot keep what it is sent, while all have programs left to run."""
    own = ost.SafetensorsOptions(storage_options=job["options"])
    saving = prepare(SaveRequest(directory, tree(mesh), max_file_bytes=3000, options=own))
    error = mock.Mock(side_effect=MemoryError("no memory for a copy"))
    broken = mock.patch.object(delivery, "_blocks", error) if jax.process_index() == 1 else contextlib.nullcontext()
    with mock.patch.object(delivery, "MAX_IN_FLIGHT", 1), broken:
        return _said(saving.kept)


def _one_alone(directory: str, job: dict[str, Any], mesh: Mesh) -> list[str]:
    """What is said where one process alone cannot use its way to the store, in every step of a save."""

    def options(process: int) -> ost.SafetensorsOptions:
        wrong = {"no_such_option": "x"} if jax.process_index() == process else {}
        return ost.SafetensorsOptions(storage_options=job["options"] | wrong, join_timeout_secs=hang.SECONDS / 2)

    def prepared(own: ost.SafetensorsOptions) -> SaveJob:
        return prepare(SaveRequest(directory, {"a": array(VALUES["table"], mesh, ("x", "y"))}, options=own))

    saving = prepared(options(-1))
    saving.files.store = unusable = mock.Mock(wraps=saving.files.store, is_local=False)
    if jax.process_index() == 1:
        unusable.below.side_effect = ost.StorageError("cannot be used with these storage_options")
    return [
        _said(lambda: prepared(options(1))),
        _said(saving.run),
        _said(lambda: write_sidecar_files(directory, {"x": ""}, options=options(0), active=ActiveProcesses.all())),
    ]


def _said(call: Callable[[], Any]) -> str:
    with mock.patch.object(agreement, "_TIMEOUT_SECONDS", hang.SECONDS / 2):
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
    """Saves a model's own tree."""
    own = ost.SafetensorsOptions(storage_options=job["options"])
    values = family_values()
    item = {
        "layers": array(np.stack([values[f"{layer}.w"].T for layer in range(6)], 1), mesh, "x", None, "y"),
        "gates": array(np.stack([values["up"], values["gate"]], 2), mesh, "x", "y"),
    }
    handler = ost.SafetensorsHandler(family=Family("toy.model", (), _model), options=own)
    handler.save(directory, ost.SafetensorsSave(item))


def _adapter(directory: str, job: dict[str, Any], mesh: Mesh) -> None:
    """Saves an adapter, whose readers expect one file."""
    own = ost.SafetensorsOptions(storage_options=job["options"])
    item = {name: array(values, mesh, "x", "y") for name, values in family_values().items()}
    ost.save(directory, item, config={"peft_type": "LORA"}, max_file_bytes=1000, options=own)


def _copied(directory: str, job: dict[str, Any], mesh: Mesh) -> None:
    """Saves a model whose towers have no leaf, like files on a disk."""
    item = sharded(made_by_maxtext("gemma4_small", "unscanned"), mesh, ("x", "y"))
    own = ost.SafetensorsOptions(storage_options=job["options"])
    ost.save(directory, item, family="maxtext", like=stored_directory("gemma4_small"), options=own)


def some_values() -> dict[str, np.ndarray]:
    """What the files hold of leaves that some of the processes have."""
    named = {name: VALUES[name] for name in ("kernel", "table", "levels", "cube", "line")}
    return named | {"pinned": VALUES["kernel"]} | {str(dtype): bits(dtype) for dtype in DTYPES_OF_JAX}


def bits(dtype: np.dtype) -> np.ndarray:
    """Random ones, which a boolean does not have."""
    return value(str(dtype), dtype, (8, 24)) if dtype != np.bool_ else value("bool", np.dtype(np.int8), (8, 24)) > 0


def _halves(config: Any) -> dict[str, View]:
    """Two leaves that are stored in one tensor."""
    whole = tensor("whole", (16, 24))
    return {"a": whole.slice(slice(8)), "b": whole.slice(slice(8, 16))}


def _some(directory: str, job: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Saves leaves of all dtypes, over devices of all processes, of some and of one; the bytes planned and written."""

    def over(*processes: int) -> Mesh:
        return Mesh(np.array([device for device in jax.devices() if device.process_index in processes]), ("d",))

    ends = Mesh(np.array([jax.devices()[0], jax.devices()[-1]]), ("d",))
    item = {
        "kernel": array(VALUES["kernel"], over(1, 2), None, "d"),
        "table": array(VALUES["table"], over(3), "d"),
        "levels": array(VALUES["levels"], over(2, 3)),
        "cube": array(VALUES["cube"], ends, None, "d"),
        "line": array(VALUES["line"], mesh, ("x", "y")),
        "pinned": jax.make_array_from_callback(
            (16, 24), NamedSharding(mesh, P("y", "x"), memory_kind="pinned_host"), lambda index: VALUES["kernel"][index]
        ),
        **{str(dtype): array(bits(dtype), mesh, None, ("x", "y")) for dtype in DTYPES_OF_JAX},
    }
    own = ost.SafetensorsOptions(storage_options=job["options"])
    saving = prepare(SaveRequest(directory, item, options=own))
    saving.run()
    parts = {"a": array(VALUES["kernel"][:8], over(0, 1), "d"), "b": array(VALUES["kernel"][8:], over(2, 3), "d")}
    return {
        "planned": ost.plan_save(directory, item, options=own).processes[jax.process_index()].written_bytes,
        "written": sum(saving.layout.files[number][1].data_bytes for number in saving.numbers),
        "apart": _said(
            lambda: ost.save(f"{directory}/apart", parts, family=Family("toy.halves", (), _halves), options=own)
        ),
    }


def _again(directory: str, job: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Saves where something is already: what is said, what is there then and what after it was forced."""
    own = ost.SafetensorsOptions(storage_options=job["options"])
    names = {"a": array(VALUES["table"], mesh, ("x", "y")), "b": VALUES["table"]}
    fewer = {"a": names["b"]}
    with ost.SafetensorsCheckpointer(options=own) as checkpointer:
        checkpointer.save(directory, args=ost.SafetensorsSave(names, index=True), custom_metadata={"epoch": 1})
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
