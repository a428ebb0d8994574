"""What `test_active.py` runs in three processes: saves by some of them, with Orbax's `MultiprocessingOptions`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_safetensors as ost
from orbax_safetensors.devices import agreement
from tests.support.measure import different_shards

VALUES = {
    "rows": np.arange(24 * 16, dtype=np.float32).reshape(24, 16),
    "columns": np.arange(8 * 48, dtype=np.int32).reshape(8, 48),
    "everywhere": np.arange(100, dtype=np.uint8),
    "host": np.arange(1000, dtype=np.int16),
}
SOME = ocp.options.MultiprocessingOptions(
    active_processes={1, 2}, primary_host=1, barrier_sync_key_prefix="of some processes"
)
ALONE = ocp.options.MultiprocessingOptions(primary_host=None)
# For processes that never come.
SHORT = ost.SafetensorsOptions(join_timeout_secs=3)


def tree(processes: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    """Arrays over devices of `processes`, one of all processes, and one of NumPy."""
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
    here = Mesh(np.array([device for device in jax.devices() if device.process_index in processes]), ("x",))
    shardings = {
        "rows": NamedSharding(here, PartitionSpec("x")),
        "columns": NamedSharding(here, PartitionSpec(None, "x")),
        "everywhere": everywhere,
    }
    return {
        name: jax.make_array_from_callback(host.shape, shardings[name], lambda index, host=host: host[index])
        if name in shardings
        else host
        for name, host in VALUES.items()
    }


def run(root: str) -> dict[str, Any]:
    """What each of `CASES` returned, by its name."""
    out = {}
    for case in CASES:
        out[case.__name__] = case(Path(root))
        multihost_utils.sync_global_devices(case.__name__)
    return out


def some_processes_save(root: Path) -> None:
    """With each of Orbax's checkpointers; the first process goes on meanwhile."""
    if jax.process_index() == 0:
        return
    arrays = tree()
    with ocp.Checkpointer(
        ost.SafetensorsHandler(multiprocessing_options=SOME), multiprocessing_options=SOME
    ) as checkpointer:
        checkpointer.save(root / "checkpointer", args=ost.SafetensorsSave(arrays))
    with ost.SafetensorsCheckpointer(multiprocessing_options=SOME) as checkpointer:
        checkpointer.save(root / "ours", args=ost.SafetensorsSave(arrays))
        checkpointer.save(root / "ours", args=ost.SafetensorsSave(arrays), force=True)
        restored = checkpointer.restore(root / "ours", args=ost.SafetensorsRestore(item=arrays))
    assert not [name for name in ("rows", "columns") if different_shards(restored[name], VALUES[name])]
    with ocp.AsyncCheckpointer(
        ost.SafetensorsHandler(multiprocessing_options=SOME), multiprocessing_options=SOME
    ) as checkpointer:
        checkpointer.save(root / "async", args=ost.SafetensorsSave(arrays))


def some_processes_save_with_orbax_handler(root: Path) -> None:
    """The leaves of Orbax's tree that are arrays are ours."""
    if jax.process_index() == 0:
        return
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ost.SafetensorsTypeHandler(multiprocessing_options=SOME))
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, multiprocessing_options=SOME)
    arrays = {name: leaf for name, leaf in tree().items() if isinstance(leaf, jax.Array)}
    with ocp.Checkpointer(handler, multiprocessing_options=SOME) as checkpointer:
        checkpointer.save(root / "type handler", args=ocp.args.PyTreeSave(arrays))


def then_all_save(root: Path) -> None:
    """What some have done does not put all out of step."""
    with ost.SafetensorsCheckpointer() as checkpointer:
        checkpointer.save(root / "ours", args=ost.SafetensorsSave(tree((0, 1, 2))), force=True)


def arrays_that_only_others_hold(root: Path) -> dict[str, Any]:
    """Those who save would leave parts out."""
    if jax.process_index() == 0:
        return {}
    with ocp.Checkpointer(
        ost.SafetensorsHandler(multiprocessing_options=SOME), multiprocessing_options=SOME
    ) as checkpointer:
        return error_of(lambda: checkpointer.save(root / "parts", args=ost.SafetensorsSave(tree((0, 1, 2)))))


def a_handler_that_waits_for_all(root: Path) -> dict[str, Any]:
    """It does not know of the options of its checkpointer."""
    if jax.process_index() == 0:
        return {}
    handler = ost.SafetensorsHandler(options=SHORT)
    with ocp.Checkpointer(handler, multiprocessing_options=SOME) as checkpointer, first_does_not_come():
        return error_of(lambda: checkpointer.save(root / "waits", args=ost.SafetensorsSave(tree())))


def each_process_saves_alone(root: Path) -> None:
    """Into a directory that only it has, what it holds entirely. Orbax waits for a directory of the same name."""
    own = jax.device_put(VALUES["rows"] + jax.process_index(), jax.local_devices()[0])
    arrays = {"own": own, "everywhere": tree((0, 1, 2))["everywhere"], "host": VALUES["host"]}
    (root / f"host {jax.process_index()}").mkdir()
    for name, kind in (("alone", ocp.Checkpointer), ("alone async", ocp.AsyncCheckpointer)):
        with kind(ost.SafetensorsHandler(multiprocessing_options=ALONE), multiprocessing_options=ALONE) as checkpointer:
            checkpointer.save(root / f"host {jax.process_index()}" / name, args=ost.SafetensorsSave(arrays))


def nobody_alone_holds_all_shards(root: Path) -> dict[str, Any]:
    handler = ost.SafetensorsHandler(multiprocessing_options=ALONE)
    directory = root / f"shards {jax.process_index()}"
    directory.mkdir()
    return error_of(lambda: handler.save(directory, ost.SafetensorsSave(tree((0, 1, 2)))))


def a_restore_that_a_process_does_not_make(root: Path) -> dict[str, Any]:
    """The last case: processes no longer count restores alike."""
    if jax.process_index() == 0:
        return {}
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
    item = {"rows": jax.ShapeDtypeStruct((24, 16), np.float32, sharding=everywhere)}
    args = {"rows": ocp.type_handlers.SingleReplicaArrayRestoreArgs(sharding=everywhere)}
    request = ost.SafetensorsRestore(item, args, partial_restore=True)
    with first_does_not_come():
        return error_of(lambda: ost.SafetensorsHandler(options=SHORT).restore(root / "ours", request))


@contextmanager
def first_does_not_come() -> Iterator[None]:
    """Time is up as soon as all processes except the first wait, and not before, however slow they are."""

    def out_of_time(wait: partial[None], say: object) -> None:
        key = wait.args[0].removesuffix("/reached")
        while not agreement._posted(key).keys() >= {1, 2}:
            pass
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    with mock.patch.object(agreement, "_interruptibly", out_of_time):
        yield


def error_of(call: Callable[[], Any]) -> dict[str, Any]:
    """Kind and message of the error that `call` raises."""
    try:
        call()
    except ost.SafetensorsError as error:
        return {"kind": type(error).__name__, "text": str(error)}
    raise AssertionError("expected an error")


CASES = (
    some_processes_save,
    some_processes_save_with_orbax_handler,
    then_all_save,
    arrays_that_only_others_hold,
    a_handler_that_waits_for_all,
    each_process_saves_alone,
    nobody_alone_holds_all_shards,
    a_restore_that_a_process_does_not_make,
)


def to_an_object_store(job: dict[str, Any]) -> dict[str, Any]:
    """Some processes save, first what others would have to send parts of."""
    if jax.process_index() == 0:
        return {}
    options = ost.SafetensorsOptions(storage_options=job["options"])
    with ost.SafetensorsCheckpointer(options=options, multiprocessing_options=SOME) as checkpointer:
        arrays = tree((0, 1, 2))
        error = error_of(lambda: checkpointer.save(f"{job['url']}/parts", args=ost.SafetensorsSave(arrays)))
        checkpointer.save(f"{job['url']}/whole", args=ost.SafetensorsSave(tree()))
    return error
