"""An Orbax checkpoint that several real processes write together, and one that a process was killed over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from orbax_safetensors.errors import StorageError
from orbax_safetensors.orbax_store import open_orbax
from tests.multiprocess import workers_orbax_store as workers
from tests.support.launch import LaunchError, launch
from tests.support.roots import ROOT
from tests.support.sinks import step_sink

FORMATS = ["ocdbt_zarr3", "files_zarr2"]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Where several processes wrote, and what each of them found."""
    root = tmp_path_factory.mktemp("together")
    return root, launch("tests.multiprocess.workers_orbax_store:run", str(root), processes=3, devices=2)


def is_complete(root):
    checkpoint = open_orbax(root)
    for name, array in workers.values().items():
        assert checkpoint.value(name).tobytes() == array.tobytes()
    assert checkpoint.value("step") == 3
    args = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=int if leaf == 3 else np.ndarray), workers.tree())
    restored = ocp.PyTreeCheckpointer().restore(root / "0" / "items", restore_args=args)
    for name, array in workers.values().items():
        assert restored["params"][name.split(".")[1]].tobytes() == array.tobytes()
    assert restored["opt_state"] == {}
    assert not list(root.glob("*tmp*"))


def is_not_there(root):
    with pytest.raises(StorageError):
        open_orbax(root)
    for path in (*root.glob("*"), *root.glob("*/*")):
        if path.is_dir() and path != root / "0":
            with pytest.raises(StorageError):
                open_orbax(path)
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.latest_step() is None


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats(together, name):
    root, found = together
    is_complete(root / name)
    shares = [set(one[name]) for one in found]
    assert all(shares)
    assert sum(map(len, shares)) == len(set.union(*shares))
    # Every process writes where Orbax has it write.
    item = root / name / "0" / "items"
    everyone = {f"process_{number}" for number in range(len(found))}
    assert {path.name for path in (item / "array_metadatas").iterdir()} == everyone
    if name.startswith("ocdbt"):
        assert {path.name for path in item.glob("ocdbt.*")} == {f"ocdbt.{process}" for process in everyone}


def test_below_a_url(orbax_gcs):
    found = launch("tests.multiprocess.workers_orbax_store:remote", orbax_gcs.url, processes=2, devices=2)
    arrays = workers.values()
    args = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=int if leaf == 3 else np.ndarray), workers.tree())
    for name, first in found[0].items():
        checkpoint = open_orbax(f"{orbax_gcs.url}/{name}")
        restored = ocp.PyTreeCheckpointer().restore(f"{orbax_gcs.url}/{name}/0/items", restore_args=args)
        for leaf, array in arrays.items():
            assert checkpoint.value(leaf).tobytes() == array.tobytes()
            assert restored["params"][leaf.split(".")[1]].tobytes() == array.tobytes()
        # What was there already was written by neither.
        chunks = sum(int(np.prod(leaf.grid)) for leaf in checkpoint.leaves.values() if leaf.kind == "jax.Array")
        second = found[1][name]
        assert first
        assert second
        assert not set(first) & set(second)
        assert len(first) + len(second) <= chunks // 2 + 1


def test_a_process_with_nothing_to_write(together):
    is_complete(together[0] / "the_last_process_writes_nothing")


def test_a_tile_that_nobody_wrote(together):
    root, found = together
    first, *others = [one["a_tile_that_nobody_writes"] for one in found]
    assert first.startswith("TensorMismatchError: ")
    assert "'params.scale' were not written" in first
    for other in others:
        assert other == f"StorageError: process 0 failed: {first}"
    is_not_there(root / "a_tile_that_nobody_writes")


@pytest.mark.parametrize(
    ("name", "process", "why"),
    [
        ("the_last_process_gives_up", -1, "the source is gone"),
        ("the_first_process_cannot_finish", 0, "No space left on device"),
    ],
)
def test_a_process_that_fails_fails_all(together, name, process, why):
    root, found = together
    failures = [one[name] for one in found]
    assert all(failure.startswith("StorageError: ") and why in failure for failure in failures)
    number = process % len(found)
    for other, failure in enumerate(failures):
        assert (f"process {number} failed" in failure) == (other != number)
    is_not_there(root / name)


def test_a_step_that_is_there(together):
    root, found = together
    assert all("/0: already exists; choose" in one["a_step_that_is_there"] for one in found)
    assert not list((root / "a_step_that_is_there").glob("*/*"))


def test_taken_up_again_by_all(together):
    root, found = together
    is_complete(root / "taken_up_again")
    first, *others = [one["taken_up_again"] for one in found]
    assert first
    assert all(other == first for other in others)


def test_one_of_several_is_killed_and_fewer_take_it_up(tmp_path):
    """What the process wrote that is no more is used too."""
    with pytest.raises(LaunchError, match=f"exit status {-signal.SIGKILL}"):
        launch("tests.multiprocess.workers_orbax_store:die_together", str(tmp_path), processes=3, devices=1)
    is_not_there(tmp_path)
    with step_sink(tmp_path, workers.tree(), resume=True) as sink:
        missing = workers.tiles(sink)
        assert len(missing) == 4  # of 25, half of what one of three had to write
        workers.write(sink, missing)
        sink.commit()
    is_complete(tmp_path)
    item = tmp_path / "0" / "items"
    assert [path.name for path in (item / "array_metadatas").iterdir()] == ["process_0"]


@pytest.mark.parametrize(("ocdbt", "times"), [(True, ["9", "after the merge"]), (False, ["16"])])
def test_killed_and_taken_up_again(tmp_path, ocdbt, times):
    done = set()
    for when in times:
        worker = subprocess.run(
            [sys.executable, "-m", workers.__name__, tmp_path, when, json.dumps({"ocdbt": ocdbt, "resume": True})],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"},
            check=False,
        )
        assert worker.returncode == -signal.SIGKILL, worker.stderr
        is_not_there(tmp_path)
        fresh = {str(json.loads(line)) for line in worker.stdout.splitlines()}
        assert not fresh & done  # nothing is written twice
        done |= fresh
    with step_sink(tmp_path, workers.tree(), ocdbt=ocdbt, resume=True) as sink:
        missing = workers.tiles(sink)
        assert not done & {str([name, [list(ends) for ends in box]]) for name, box in missing}
        assert missing or ocdbt
        workers.write(sink, missing)
        sink.commit()
    is_complete(tmp_path)
    assert not list(tmp_path.rglob("*lock*"))
    assert not list(tmp_path.rglob("_in_progress*"))
