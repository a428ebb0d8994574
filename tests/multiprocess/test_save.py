"""Saves in several real processes: the bytes of one, each written once, and nothing half done that restores."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from tests.multiprocess import workers_killed_save, workers_save
from tests.multiprocess.workers_killed_save import STAGES, SURVIVED
from tests.multiprocess.workers_save import (
    SCENARIOS,
    TREES,
    VALUES,
    arguments,
    full_mesh,
    save,
)
from tests.support import hang
from tests.support.launch import launch
from tests.support.roots import ROOT

LAYOUTS = {"2 processes x 4 devices": (2, 4), "4 processes x 2 devices": (4, 2)}

# The scenarios in which every process fails for the reason that one of them has.
TOLD = [
    "agreement",
    "the_last_process_cannot_write",
    "the_last_process_cannot_write_in_the_background",
    "the_first_process_cannot_write_headers",
    "the_first_process_cannot_write_headers_in_the_background",
    "all_processes_fail",
    "one_process_has_no_memory_for_its_copies",
]
REFUSED = ["an_array_of_each_process_alone", "a_tree_that_one_process_cannot_save"]
DIFFERENT = ["metadata_that_differs", "shapes_that_differ", "shardings_that_differ", "an_order_that_differs"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process with all eight devices saves."""
    root = tmp_path_factory.mktemp("alone")
    for name, make in TREES.items():
        save(root / name, make(full_mesh()))
    return root


@pytest.fixture(scope="module", params=list(LAYOUTS))
def together(request, tmp_path_factory):
    """Where several processes saved, and what each of them found."""
    processes, devices = LAYOUTS[request.param]
    root = tmp_path_factory.mktemp("together")
    return root, launch("tests.multiprocess.workers_save:run", str(root), processes=processes, devices=devices)


def values(together, scenario):
    return [of_process[scenario]["value"] for of_process in together[1]]


def content(directory):
    """Every file that is of the format, with its bytes."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if "safetensors" in path.name}


def data_bytes(directory):
    return ost.open_checkpoint(directory).nbytes


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_in_every_process(together, scenario):
    alike: dict[str, list[int]] = {}
    for process, of_process in enumerate(together[1]):
        if failure := of_process[scenario]["failure"]:
            alike.setdefault(failure, []).append(process)
    text = "\n".join(f"--- processes {processes}:\n{failure}" for failure, processes in alike.items())
    assert not alike, f"[{scenario}]\n{text}"


@pytest.mark.parametrize("tree", list(TREES))
def test_the_bytes_do_not_depend_on_the_number_of_processes(alone, together, tree):
    expected = content(alone / tree)
    assert len(expected) >= 2
    assert content(together[0] / tree) == expected


@pytest.mark.parametrize("tree", list(TREES))
def test_every_byte_is_written_by_one_process_once(together, tree):
    counted = [of_process[tree] for of_process in values(together, "every_tree")]
    assert all(len(scalars) == 1 for found in counted for scalars in found.values()), counted
    assert sum(found["bytes_written"][0] for found in counted) == data_bytes(together[0] / tree)
    assert all(found["num_writes"] == found["storage_writes"] for found in counted), counted


def test_what_all_processes_have_is_shared_evenly(together):
    written = [of_process["copies"]["bytes_written"][0] for of_process in values(together, "every_tree")]
    assert max(written) <= 1.1 * np.mean(written), written


def test_what_each_process_has_alone_it_writes(together):
    """A process cannot write less than its own shards, and need not write more."""
    written = [of_process["leading"]["bytes_written"][0] for of_process in values(together, "every_tree")]
    assert max(written) - min(written) <= 2, written  # except a scalar


def test_in_the_background(alone, together):
    assert content(together[0] / "async") == content(alone / "mixed")
    counted = values(together, "asynchronously")
    assert sum(found["bytes_written"][0] for found in counted) == data_bytes(together[0] / "async")


@pytest.mark.parametrize(
    ("scenario", "directory"), [("a_leaf_that_some_processes_have", "some"), ("a_leaf_that_one_process_has", "one")]
)
def test_leaves_that_only_some_processes_have_are_written_once(together, scenario, directory):
    counted = values(together, scenario)
    assert None not in counted, "see test_in_every_process"
    assert sum(found["bytes_written"][0] for found in counted) == data_bytes(together[0] / directory)


def test_a_callback_that_fails_in_one_process(together):
    *others, failed = values(together, "a_callback_that_fails_in_one_process")
    assert failed == "KeyError"
    assert set(others) == {"StorageError"}


def test_one_process_restores_it_with_stock_orbax(together):
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=workers_save.array(leaf, full_mesh(), "y").sharding)
        for name, leaf in workers_save.VALUES.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(together[0] / "for orbax", wanted)
    assert sorted(restored) == sorted(workers_save.VALUES)
    for name, host in workers_save.VALUES.items():
        assert np.asarray(restored[name]).tobytes() == host.tobytes(), name


def test_a_manager_keeps_the_last_steps(together):
    assert values(together, "managed") == [[2, 3]] * len(together[1])
    assert sorted(path.name for path in (together[0] / "managed").iterdir()) == ["2", "3"]


@pytest.mark.parametrize("scenario", TOLD)
def test_all_processes_fail_together_and_soon(together, scenario):
    found = values(together, scenario)
    assert None not in found, "see test_in_every_process"
    assert [error["kind"] for error in found] == ["StorageError"] * len(found), found


@pytest.mark.parametrize("scenario", [*REFUSED, *DIFFERENT])
def test_a_save_that_cannot_be_is_refused_everywhere_and_soon(together, scenario):
    found = values(together, scenario)
    assert None not in found, "see test_in_every_process"
    # The process whose fault it is says so, in its own words.
    assert "TensorMismatchError" in [error["kind"] for error in found], found


def test_no_process_saves_over_a_checkpoint(together):
    for first, *others in zip(*values(together, "over_a_checkpoint"), strict=True):
        assert first["kind"] == "StorageError"
        assert ": already exists, and holds model" in first["text"]
        for other in others:
            assert other["kind"] == "StorageError"
            assert other["text"] == f"process 0 failed: StorageError: {first['text']}"


def test_an_interrupt_is_told_to_the_others(together):
    _, *others = values(together, "an_interrupt_and_another_one")
    assert others == ["process 0 failed: KeyboardInterrupt: "] * len(others)


def test_nothing_that_failed_is_a_checkpoint(together):
    root, _ = together
    for name in ("all full", "alone", "one wrong", "full", "headless"):
        for partial in root.glob(f"{name}.orbax*"):
            with pytest.raises(ost.SafetensorsError):
                ost.open_checkpoint(partial)


# --- processes that are killed ---


@pytest.fixture(scope="module", params=[1, 2], ids=["1 process", "2 processes"])
def killed(request, tmp_path_factory):
    """The directories of saves that were killed, one for each stage."""
    root = tmp_path_factory.mktemp("killed")
    with contextlib.ExitStack() as reserved:
        ports = [str(_free_port(reserved)) for _ in range(len(STAGES) + 1)]
        command = [sys.executable, "-m", workers_killed_save.__name__, str(root), str(request.param), *ports]
        subprocess.run(command, cwd=ROOT, check=True, timeout=hang.SECONDS, stdin=subprocess.DEVNULL)
    return root


def _free_port(reserved):
    """Bound and never listening: it keeps the port from others, and shares it with the coordinator."""
    bound = reserved.enter_context(socket.socket())
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", 0))
    return bound.getsockname()[1]


def abstract():
    return {name: jax.ShapeDtypeStruct(host.shape, host.dtype) for name, host in VALUES.items()}


def assert_whole(tree):
    assert {name: (found.dtype, found.shape, np.asarray(found).tobytes()) for name, found in tree.items()} == {
        name: (host.dtype, host.shape, host.tobytes()) for name, host in VALUES.items()
    }


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_killed_save_leaves_nothing_that_restores(killed, stage):
    logs = "\n".join(log.read_text() for log in sorted(killed.glob(f"{stage}.*.log")))
    assert json.loads((killed / f"{stage}.json").read_text()) == [-9], logs
    _, whole = STAGES[stage]
    root = killed / stage
    assert not (root / "2").exists()
    (left,) = root.glob("2.*")
    (item,) = filter(Path.is_dir, left.iterdir())
    wanted = ost.SafetensorsRestore(item=abstract())
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        for path in (root / "2", root / "2" / "default", left, item):
            with pytest.raises((ValueError, FileNotFoundError)):
                checkpointer.restore(path, args=wanted)
    if whole:  # every byte is there, and only its name says that nobody vouched for them
        (fault,) = ost.verify(item)
        assert "was never finished" in str(fault)
    else:
        with pytest.raises(ost.SafetensorsError):
            ost.open_checkpoint(item)
        with pytest.raises(ost.SafetensorsError):
            ost.SafetensorsHandler().restore(item, wanted)


# After the test above, which needs what was left.
@pytest.mark.parametrize("stage", list(STAGES))
def test_after_a_kill_the_same_step_can_be_saved(killed, stage):
    with ocp.CheckpointManager(killed / stage, item_handlers=ost.SafetensorsHandler()) as manager:
        assert list(manager.all_steps()) == [1]
        assert_whole(manager.restore(1, args=ost.SafetensorsRestore(item=abstract())))
        manager.save(2, args=arguments(dict(VALUES)))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [1, 2]
        assert_whole(manager.restore(2, args=ost.SafetensorsRestore(item=abstract())))


def test_those_that_survive_a_killed_process_do_not_wait_for_it(killed):
    report = killed / f"{SURVIVED}.json"
    if not report.exists():
        pytest.skip("a single process has nobody to survive it")
    codes = json.loads(report.read_text())
    assert codes[-1] == -9, codes
    assert all(codes), codes
    assert sorted(os.listdir(killed / SURVIVED))[0] == "1"
    (left,) = (killed / SURVIVED).glob("2.*")
    (item,) = filter(Path.is_dir, left.iterdir())
    with pytest.raises(ost.SafetensorsError):
        ost.open_checkpoint(item)
