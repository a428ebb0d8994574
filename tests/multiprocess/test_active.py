"""Saves by some processes of a program, or by each into its own storage, as `MultiprocessingOptions` say."""

import numpy as np
import pytest
import safetensors.numpy

import orbax_safetensors as ost
from tests.multiprocess.workers_active import SHORT, VALUES
from tests.support.launch import launch


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where three processes have saved, and what each of them found."""
    root = tmp_path_factory.mktemp("active")
    return root, launch("tests.multiprocess.workers_active:run", str(root), processes=3, devices=2)


@pytest.mark.parametrize("name", ["checkpointer", "async", "type handler"])
def test_some_processes_save_the_whole_tree(saved, name):
    directory = saved[0] / name
    expected = {leaf: value for leaf, value in VALUES.items() if leaf != "host" or name != "type handler"}
    same(safetensors.numpy.load_file(directory / "model.safetensors"), expected)
    ost.verify(directory)


def test_all_processes_save_after_some_have(saved):
    same(safetensors.numpy.load_file(saved[0] / "ours" / "model.safetensors"), VALUES)


def test_arrays_that_only_other_processes_hold_are_an_error(saved):
    for found in found_by(saved, "arrays_that_only_others_hold")[1:]:
        assert found["kind"] == "TensorMismatchError", found
        assert "'columns': parts of it are only on devices of processes that do not save" in found["text"], found


@pytest.mark.parametrize("case", ["a_handler_that_waits_for_all", "a_restore_that_a_process_does_not_make"])
def test_processes_that_do_not_come_are_named(saved, case):
    for found in found_by(saved, case)[1:]:
        assert found["kind"] == "StorageError", found
        assert found["text"].startswith(f"process 0 did not come within {SHORT.join_timeout_secs} s"), found
        assert "active_processes" in found["text"], found


@pytest.mark.parametrize("name", ["alone", "alone async"])
def test_each_process_saves_into_its_own_storage(saved, name):
    for process in range(3):
        directory = saved[0] / f"host {process}" / name
        expected = {"own": VALUES["rows"] + process, "everywhere": VALUES["everywhere"], "host": VALUES["host"]}
        same(safetensors.numpy.load_file(directory / "model.safetensors"), expected)
        ost.verify(directory)


def test_a_process_alone_does_not_hold_what_is_sharded_over_others(saved):
    for found in found_by(saved, "nobody_alone_holds_all_shards"):
        assert found["kind"] == "TensorMismatchError", found
        assert "primary_host" in found["text"], found


def test_some_processes_save_to_an_object_store(s3):
    job = {"url": f"{s3.url}/active", "options": s3.options}
    found = launch("tests.multiprocess.workers_active:to_an_object_store", job, processes=3, devices=2)
    for of_process in found[1:]:
        assert of_process["kind"] == "TensorMismatchError", of_process
        assert "'columns': is sharded over devices of processes 0, 1, 2, and only 1, 2 save" in of_process["text"]
    options = ost.SafetensorsOptions(storage_options=s3.options)
    same(ost.load(f"{job['url']}/whole", options=options), VALUES)


def found_by(saved, case):
    return [of_process[case] for of_process in saved[1]]


def same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert np.array_equal(np.asarray(found[name]), value), name
