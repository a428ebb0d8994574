"""Saves in several real processes: the bytes of one, each written once, and nothing half done that restores."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from tests.multiprocess import workers_save
from tests.multiprocess.workers_save import SCENARIOS, TREES, VALUES, full_mesh, save
from tests.support.launch import LaunchError, check_scenarios, launch

# The scenarios in which every process fails for the reason that one of them has.
TOLD = [
    "agreement",
    "the_last_process_cannot_write_in_the_background",
    "the_first_process_cannot_write_headers",
    "all_processes_fail",
    "one_process_has_no_memory_for_its_copies",
]
REFUSED = ["an_array_of_each_process_alone", "a_tree_that_one_process_cannot_save"]
DIFFERENT = ["shardings_that_differ", "an_order_that_differs"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process with all eight devices saves."""
    root = tmp_path_factory.mktemp("alone")
    for name, make in TREES.items():
        save(root / name, make(full_mesh()))
    return root


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Where several processes saved, and what each of them found."""
    root = tmp_path_factory.mktemp("together")
    return root, launch("tests.multiprocess.workers_save:run", str(root), processes=4, devices=2)


def values(together, scenario):
    return [of_process[scenario]["value"] for of_process in together[1]]


def content(directory):
    """Every file that is of the format, with its bytes."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if "safetensors" in path.name}


def data_bytes(directory):
    return ost.open_checkpoint(directory).nbytes


def test_in_every_process(together):
    assert [list(of_process) for of_process in together[1]] == [list(SCENARIOS)] * 4
    check_scenarios(together[1])


@pytest.mark.parametrize("tree", list(TREES))
def test_the_bytes_are_those_of_one_process_and_each_is_written_once(alone, together, tree):
    expected = content(alone / tree)
    assert len(expected) >= 2
    assert content(together[0] / tree) == expected
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
def test_all_processes_fail_together(together, scenario):
    found = values(together, scenario)
    assert None not in found, "see test_in_every_process"
    assert [error["kind"] for error in found] == ["StorageError"] * len(found), found


@pytest.mark.parametrize("scenario", [*REFUSED, *DIFFERENT])
def test_a_save_that_cannot_be_is_refused_everywhere(together, scenario):
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
    """What a save leaves that another one to the same path replaces, `workers_save` looks at in between."""
    root, _ = together
    partial_directories = [path for name in ("all full", "alone", "one wrong") for path in root.glob(f"{name}.orbax*")]
    assert len(partial_directories) == 3
    for partial in partial_directories:
        with pytest.raises(ost.SafetensorsError):
            ost.open_checkpoint(partial)


def test_those_that_survive_a_killed_process_do_not_wait_for_it_and_lose_no_checkpoint(tmp_path):
    """It is killed amid the data of a forced save."""
    with pytest.raises(LaunchError, match=r"process 1, exit status -9"):
        launch(
            "tests.multiprocess.workers_save:killed_amid_the_data",
            str(tmp_path),
            processes=2,
            devices=4,
            killed=[1],
            heartbeat_seconds=20,  # nothing else tells the other that it is gone
        )
    restored = ost.load(tmp_path / "model")
    assert {name: array.tobytes() for name, array in restored.items()} == {
        name: array.tobytes() for name, array in VALUES.items()
    }
    assert ost.verify(tmp_path / "model", data=True) == []
    partial_directories = list(tmp_path.glob("model.*"))
    assert partial_directories
    for partial in partial_directories:
        with pytest.raises(ost.SafetensorsError):
            ost.open_checkpoint(partial)
