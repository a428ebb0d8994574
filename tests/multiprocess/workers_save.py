"""What `test_save.py` runs in several processes: scenarios one after the other.

A scenario asserts what holds for its own process, and returns what only the test can judge, which sees all of them.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.multihost import multihost

import orbax_safetensors as ost
from orbax_safetensors.devices import agreement as processes
from orbax_safetensors.save import job
from orbax_safetensors.save import shards as saved_shards
from orbax_safetensors.storage import local
from tests.support import hang
from tests.support.files import nothing_left
from tests.support.measure import different_shards

SCENARIOS: dict[str, Callable[[Site], Any]] = {}

BF16, F32, I8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.int8)

# Leaves by name: dtype and shape. Every dimension is a multiple of 8, or there is none to share.
LEAVES: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
    "kernel": (F32, (16, 24)),
    "table": (BF16, (32, 8)),
    "levels": (I8, (8, 40)),
    "cube": (BF16, (8, 16, 24)),
    "line": (I8, (1000,)),
    "none": (F32, (0, 8)),
    "point": (BF16, ()),
}

# Several files, of which one is a tensor that is longer than this.
MAX_FILE_BYTES = 5000

# A process that does not come fails the scenario and not the launch.
PROMPT = ost.SafetensorsOptions(join_timeout_secs=hang.SECONDS / 2)


def value(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The same random bits in every process."""
    rng = np.random.default_rng(list(name.encode()))
    return rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8).view(dtype).reshape(shape)


VALUES = {name: value(name, dtype, shape) for name, (dtype, shape) in LEAVES.items()}


def array(host: np.ndarray, mesh: Mesh, *spec: Any) -> jax.Array:
    """`host`, sharded as far as it has dimensions."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec[: host.ndim]))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index], dtype=host.dtype)


def _all(*spec: Any) -> Callable[[Mesh], dict[str, Any]]:
    return lambda mesh: {name: array(host, mesh, *spec) for name, host in VALUES.items()}


def _mixed(mesh: Mesh) -> dict[str, Any]:
    """Leaves with various shardings, two of them over a mesh whose order is not that of the processes."""
    devices = list(mesh.devices.flat)
    woven = Mesh(np.array(devices[::2] + devices[1::2]).reshape(2, 4), ("x", "y"))
    turned = Mesh(np.array(devices[::-1]).reshape(4, 2).T, ("x", "y"))
    return {
        "a": [array(VALUES["kernel"], woven, "x", "y"), VALUES["table"]],
        "b": array(VALUES["cube"], turned, None, "y", "x"),
        "c": {"d": array(VALUES["levels"], mesh, None, ("x", "y")), "e": 3, "f": 2.5, "g": True},
        "h": array(VALUES["line"], turned, ("y", "x")),
        "i": VALUES["kernel"].T,
        "j": array(VALUES["table"], woven, "y"),
        "k": array(VALUES["point"], mesh),
    }


def _copies(mesh: Mesh) -> dict[str, Any]:
    """Many leaves that all processes have, of sizes that differ by a factor of ten."""
    sizes = [500 + 4500 * (number * 7 % 20) // 20 for number in range(60)]
    whole = {f"w{number:02}": value(f"w{number}", F32, (size,)) for number, size in enumerate(sizes)}
    return {name: host if name.endswith("7") else array(host, mesh) for name, host in whole.items()}


# Global trees by name, each made from the mesh of all eight devices.
TREES: dict[str, Callable[[Mesh], Any]] = {
    "leading": _all(("x", "y")),
    "leading, in pairs": _all("x"),
    "inner": _all(None, ("x", "y")),
    "inner, in pairs": _all(None, "x"),
    "both": _all("x", "y"),
    "replicated": _all(),
    "mixed": _mixed,
    "copies": _copies,
    "no arrays": lambda mesh: {"a": (), "b": [None]},
}


def full_mesh() -> Mesh:
    """All devices, process by process."""
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))


def arguments(tree: Any) -> ost.SafetensorsSave:
    """A save as all of them are here: with metadata, into several files."""
    return ost.SafetensorsSave(tree, metadata={"made by": "a test"}, max_file_bytes=MAX_FILE_BYTES)


class Site:
    """Where a scenario runs: a directory that all processes share, and this process's place."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = jax.process_index()
        self.count = jax.process_count()
        self.mesh = full_mesh()

    def check(self, directory: Path, tree: dict[str, Any]) -> None:
        """Fails where restoring a flat tree of sharded arrays does not give what went in."""
        with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
            restored = checkpointer.restore(directory, args=ost.SafetensorsRestore(item=tree))
        assert sorted(restored) == sorted(tree)
        for name, found in restored.items():
            assert not (wrong := different_shards(found, VALUES[name])), (name, wrong)


def scenario(function: Callable[[Site], Any]) -> Callable[[Site], Any]:
    SCENARIOS[function.__name__] = function
    return function


def run(root: str) -> dict[str, dict[str, Any]]:
    """By the name of each scenario what it returned, and the traceback with which it failed."""
    site = Site(Path(root))
    out: dict[str, dict[str, Any]] = {}
    for name, function in SCENARIOS.items():
        try:
            out[name] = {"value": function(site), "failure": None}
        except Exception:
            out[name] = {"value": None, "failure": traceback.format_exc()}
        multihost_utils.sync_global_devices(name)
    return out


def error_of(call: Callable[[], Any]) -> dict[str, Any]:
    """The error of the package that `call` raises."""
    try:
        call()
    except ost.SafetensorsError as error:
        return {"kind": type(error).__name__, "text": str(error)}
    raise AssertionError("expected an error")


@contextmanager
def written() -> Iterator[dict[str, list[int]]]:
    """The scalars that saves report meanwhile, by the last part of their names."""
    found: dict[str, list[int]] = {}

    def listen(event: str, number: float, **_: Any) -> None:
        if event.startswith("/jax/orbax/write/safetensors/"):
            found.setdefault(event.rsplit("/", 1)[1], []).append(int(number))

    jax.monitoring.register_scalar_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_scalar_listener(listen)


@contextmanager
def failing(when: Callable[[int], bool]) -> Iterator[None]:
    """A disk that is full for every write at an offset for which `when` holds."""
    real = os.pwritev

    def pwritev(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if when(offset):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, buffers, offset, *flags)

    with mock.patch.object(local.os, "pwritev", pwritev):
        yield


def save(directory: Path, tree: Any) -> None:
    """A save with Orbax around it."""
    with ocp.Checkpointer(ost.SafetensorsHandler(options=PROMPT)) as checkpointer:
        checkpointer.save(directory, args=arguments(tree))


# What is written, and by whom.


@scenario
def every_tree(site: Site) -> dict[str, dict[str, list[int]]]:
    counted = {}
    for name, make in TREES.items():
        with written() as counted[name]:
            save(site.root / name, make(site.mesh))
    return counted


@scenario
def a_callback_that_fails_in_one_process(site: Site) -> str:
    """Return the kind of the error: no process saves."""

    fail = mock.Mock(side_effect=KeyError("enough"))
    options = ost.SafetensorsOptions(progress=fail if site.index == site.count - 1 else None)
    try:
        with ocp.Checkpointer(ost.SafetensorsHandler(options=options)) as checkpointer:
            checkpointer.save(site.root / "progress", args=arguments(TREES["mixed"](site.mesh)))
    except (KeyError, ost.StorageError) as error:
        return type(error).__name__
    return "saved"


@scenario
def asynchronously(site: Site) -> dict[str, list[int]]:
    """Arrays are deleted and NumPy arrays overwritten as soon as the call returns."""
    tree = _mixed(site.mesh)
    tree["a"][1], tree["i"] = tree["a"][1].copy(), tree["i"].copy()
    with ocp.AsyncCheckpointer(ost.SafetensorsHandler()) as checkpointer, written() as counted:
        checkpointer.save(site.root / "async", args=arguments(tree))
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        tree["a"][1].view(np.uint8)[...] = 0
        tree["i"][...] = 0
        checkpointer.wait_until_finished()
    return counted


@scenario
def restored_by_stock_orbax(site: Site) -> None:
    """What several processes save, Orbax restores in as many, into other shardings and into those that were saved."""
    tree = _all("x", "y")(site.mesh)
    save(site.root / "for orbax", tree)
    other = _all(None, ("y", "x"))(site.mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        for restored, like in (
            (checkpointer.restore(site.root / "for orbax"), tree),
            (checkpointer.restore(site.root / "for orbax", other), other),
            (ost.SafetensorsHandler().restore(epath.Path(site.root / "for orbax")), tree),
        ):
            assert sorted(restored) == sorted(like)
            for name, found in restored.items():
                assert found.sharding == like[name].sharding
                assert not (wrong := different_shards(found, VALUES[name])), (name, wrong)


@scenario
def a_leaf_that_some_processes_have(site: Site) -> dict[str, list[int]]:
    """Half of the processes, or two of eight devices, hold a leaf; with two processes that is one process."""
    devices = jax.devices()
    half = Mesh(np.array(devices[:4]), ("d",))
    across = Mesh(np.array([devices[0], devices[-1]]), ("d",))
    tree = {"kernel": array(VALUES["kernel"], across, "d"), "line": array(VALUES["line"], site.mesh)}
    if site.count > 2:
        tree["table"] = array(VALUES["table"], half, None, "d")
    with written() as counted:
        save(site.root / "some", tree)
    site.check(site.root / "some", tree)
    return counted


@scenario
def managed(site: Site) -> list[int]:
    """Steps of a manager, one after the other in the background, the oldest deleted."""
    tree = _all(("x", "y"))(site.mesh)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(
        epath.Path(site.root / "managed"), item_handlers=ost.SafetensorsHandler(), options=options
    ) as manager:
        for step in range(4):
            manager.save(step, args=arguments(tree))
        manager.wait_until_finished()
        found = [int(step) for step in manager.all_steps()]
        restored = manager.restore(3, args=ost.SafetensorsRestore(item=tree))
        for name, leaf in restored.items():
            assert not (wrong := different_shards(leaf, VALUES[name])), (name, wrong)
    return found


# Agreement.


@scenario
def agreement(site: Site) -> dict[str, Any]:
    processes.agree(processes.new_key("test"), None)
    last = site.count - 1
    failure = ValueError("no luck") if site.index == last else None
    found = error_of(lambda: processes.agree(processes.new_key("test"), failure))
    said = "ValueError: no luck" if failure else f"process {last} failed: ValueError: no luck"
    assert found["text"] == said, found
    own = ost.TensorMismatchError(f"here {site.index}")
    assert error_of(lambda: processes.agree(processes.new_key("test"), own))["text"] == f"here {site.index}"
    processes.agree(processes.new_key("test"), None)
    return found


# One process that fails.


def _fails_everywhere(site: Site, name: str, victim: int, when: Callable[[int], bool], *, background: bool) -> Any:
    """Every process raises; another save to the same path then succeeds. Nothing of the first restores."""
    tree = _all("x")(site.mesh)
    directory = site.root / name
    kind = ocp.AsyncCheckpointer if background else ocp.Checkpointer
    with nothing_left(site.root), kind(ost.SafetensorsHandler()) as checkpointer:

        def attempt() -> None:
            with failing(when if site.index == victim else lambda _: False):
                checkpointer.save(directory, args=arguments(tree))
                if background:
                    checkpointer.wait_until_finished()

        found = error_of(attempt)
        assert not directory.exists()
        left = list(site.root.glob(f"{name}.*"))
        assert left, "Orbax has cleaned up: there is nothing to look at"
        for partial in left:
            error_of(lambda partial=partial: ost.open_checkpoint(partial))
        multihost_utils.sync_global_devices(f"{name}: looked at")
        checkpointer.save(directory, args=arguments(tree))
        if background:
            checkpointer.wait_until_finished()
    site.check(directory, tree)
    return found


@scenario
def the_last_process_cannot_write_in_the_background(site: Site) -> Any:
    return _fails_everywhere(site, "full async", site.count - 1, lambda offset: offset > 0, background=True)


@scenario
def the_first_process_cannot_write_headers(site: Site) -> Any:
    return _fails_everywhere(site, "headless", 0, lambda offset: offset == 0, background=False)


@scenario
def over_a_checkpoint(site: Site) -> list[dict[str, Any]]:
    """Handlers alone, twice into one directory. The first saves of all processes are looked at before the second."""
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, ost.SafetensorsTypeHandler()))
    handler, of_trees = ost.SafetensorsHandler(), ocp.PyTreeCheckpointHandler(type_handler_registry=registry)

    def wait(futures: Any) -> None:
        for one in futures:
            one.result()

    calls: dict[str, Callable[[epath.Path, Any], Any]] = {
        "over": lambda directory, tree: handler.save(directory, arguments(tree)),
        "over async": lambda directory, tree: wait(asyncio.run(handler.async_save(directory, arguments(tree)))),
        "over tree": lambda directory, tree: of_trees.save(directory, args=ocp.args.PyTreeSave(tree)),
    }
    found = []
    for name, call in calls.items():
        directory = epath.Path(site.root / name)
        directory.mkdir(exist_ok=True)
        call(directory, _all("x")(site.mesh))
        multihost_utils.sync_global_devices(f"{name} saved")
        before = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        multihost_utils.sync_global_devices(f"{name} read")
        found.append(error_of(lambda call=call, directory=directory: call(directory, _all("y")(site.mesh))))
        multihost_utils.sync_global_devices(f"{name} refused")
        assert {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()} == before
    site.check(site.root / "over", _all("x")(site.mesh))
    return found


@scenario
def all_processes_fail(site: Site) -> dict[str, Any]:
    with failing(lambda _: True):
        found = error_of(lambda: save(site.root / "all full", _all("x")(site.mesh)))
    assert "No space left on device" in found["text"], found
    return found


@scenario
def nothing_is_left_with_the_coordinator(site: Site) -> None:
    """Neither those that succeeded so far nor those that failed, in a program that goes on for weeks."""
    multihost_utils.sync_global_devices("all are past their agreements")
    assert multihost.get_jax_distributed_client().key_value_dir_get("orbax_safetensors") == []


# Trees that cannot be saved.


@contextmanager
def _short_waits() -> Iterator[None]:
    """An agreement that is never reached fails the scenario and not the launch."""
    with mock.patch.object(processes, "_TIMEOUT_SECONDS", hang.SECONDS / 2):
        yield


def _disagreeing(site: Site, name: str, args: ost.SafetensorsSave) -> dict[str, Any]:
    """Processes that would write different files say so, rather than mix them."""
    with ocp.Checkpointer(ost.SafetensorsHandler(options=PROMPT)) as checkpointer:
        found = error_of(lambda: checkpointer.save(site.root / name, args=args))
    assert "did not come" not in found["text"], found
    return found


@scenario
def shardings_that_differ(site: Site) -> dict[str, Any]:
    """A program that is not the same everywhere: some bytes would be nobody's."""
    spec = ("x", "y") if site.index else ("y", "x")
    return _disagreeing(site, "other shardings", ost.SafetensorsSave(_all(*spec)(site.mesh)))


@scenario
def an_order_that_differs(site: Site) -> dict[str, Any]:
    """JAX keeps the order of an OrderedDict, in which boxes are dealt: some would be nobody's."""
    names = ["a", "b", "c"] if site.index else ["b", "a", "c"]
    tree = collections.OrderedDict((name, np.full(1000, 7.0)) for name in names)
    return _disagreeing(site, "another order", ost.SafetensorsSave(tree))


@scenario
def an_interrupt_and_another_one(site: Site) -> str:
    """With the second, the first process no longer waits for the others, which are told when they come."""
    key, client = processes.new_key("test"), processes._client()
    if site.index:
        client.blocking_key_value_get(f"{key}/ended", int(hang.SECONDS * 1000))
        return error_of(lambda: processes.together(key, lambda: None))["text"]

    def interrupted() -> None:
        raise KeyboardInterrupt

    def interrupted_again(wait: Callable[[], None], say: None) -> None:
        interruptibly(lambda: (os.kill(os.getpid(), signal.SIGINT), wait())[1], say)

    interruptibly = processes._interruptibly
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with mock.patch.object(processes, "_interruptibly", interrupted_again), pytest.raises(KeyboardInterrupt):
        processes.together(key, interrupted)
    client.key_value_set(f"{key}/ended", "")
    return ""


@scenario
def two_saves_from_two_threads(site: Site) -> None:
    """The processes begin them in another order."""
    trees = {name: {"w": np.full(1000, number)} for number, name in enumerate(("first", "second"))}

    def work(name: str) -> None:
        directory = site.root / f"of {name}"
        directory.mkdir(exist_ok=True)
        ost.SafetensorsHandler().save(epath.Path(directory), ost.SafetensorsSave(trees[name]))

    begun = threading.Semaphore(0)

    def new_key(*args: Any) -> str:
        return (processes.new_key(*args), begun.release())[0]

    order = ["first", "second"] if site.index else ["second", "first"]
    threads = [threading.Thread(target=work, args=(name,)) for name in order]
    with mock.patch.object(job, "new_key", new_key):
        for thread in threads:
            thread.start()
            assert begun.acquire(timeout=hang.SECONDS)
        for thread in threads:
            thread.join()
    for name, tree in trees.items():
        found = safetensors.numpy.load_file(site.root / f"of {name}" / "model.safetensors")
        assert (found["w"] == tree["w"]).all(), name


@scenario
def an_array_of_each_process_alone(site: Site) -> dict[str, Any]:
    local_array = jax.device_put(VALUES["kernel"], jax.local_devices()[0])
    found = error_of(lambda: save(site.root / "alone", {"a.b": local_array}))
    assert "global array" in found["text"], found
    return found


@scenario
def a_tree_that_one_process_cannot_save(site: Site) -> dict[str, Any]:
    """The others do not wait for it for ever, and all of them can save again."""
    tree = _all("x")(site.mesh)
    wrong = {**tree, "word": "a string" if site.index == site.count - 1 else VALUES["line"]}
    found = error_of(lambda: save(site.root / "one wrong", wrong))
    save(site.root / "one wrong, then right", tree)
    site.check(site.root / "one wrong, then right", tree)
    return found


@scenario
def a_leaf_that_one_process_has(site: Site) -> dict[str, list[int]]:
    """A global array over the devices of one process: the others have no shard of it."""
    own = Mesh(np.array([device for device in jax.devices() if device.process_index == 0]), ("d",))
    tree = {"kernel": array(VALUES["kernel"], own, None, "d"), "line": array(VALUES["line"], site.mesh)}
    with _short_waits(), written() as counted:
        save(site.root / "one", tree)
    site.check(site.root / "one", tree)
    return counted


@scenario
def one_process_has_no_memory_for_its_copies(site: Site) -> dict[str, Any]:
    """The others do not wait for what it will never write."""
    tree = _all("x")(site.mesh)
    error = MemoryError("no memory for the copies") if site.index == site.count - 1 else None

    def attempt() -> None:
        with mock.patch.object(saved_shards, "allocate", side_effect=error, wraps=saved_shards.allocate):
            checkpointer.save(site.root / "no memory", args=arguments(tree))
            checkpointer.wait_until_finished()

    with ocp.AsyncCheckpointer(ost.SafetensorsHandler()) as checkpointer, _short_waits():
        found = error_of(attempt)
        assert "no memory for the copies" in found["text"], found
        # Elsewhere: Orbax may still be writing its own metadata there in the background.
        checkpointer.save(site.root / "memory", args=arguments(tree))
        checkpointer.wait_until_finished()
    site.check(site.root / "memory", tree)
    return found


def killed_amid_the_data(root: str) -> None:
    """The last process is killed in a save that replaces the checkpoint of another one."""
    tree = _all("x")(full_mesh())
    ost.save(Path(root, "model"), tree, max_file_bytes=MAX_FILE_BYTES)
    if jax.process_index() == jax.process_count() - 1:
        kill = mock.Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        mock.patch.object(local.os, "pwritev", kill).start()
    ost.save(Path(root, "model"), jax.tree.map(jax.numpy.zeros_like, tree), force=True, max_file_bytes=MAX_FILE_BYTES)
