"""Several processes restore from the Hub: each its own bytes, and all of one commit, whatever becomes of the branch."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from orbax_safetensors.storage.remote import HEAD_BYTES
from tests.support.launch import launch
from tests.support.servers.faults import Call

PROCESSES = 2
TIMES = 3
SHAPE = (1024, 1024)
NAMES = ["a", "b"]


def files(value):
    array = np.full(SHAPE, value, np.float32)
    return {f"{name}.safetensors": save({name: array}) for name in NAMES}


@pytest.fixture
def moving(hub, monkeypatch, tmp_path):
    """A branch that is something else each time that somebody asks what it is."""
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    hub.commit(files(0))
    for number in range(1, 10):
        move = Call(lambda value=number: hub.commit(files(value)))
        hub.server.fail(move, path="/api/models/*/revision/main", skip=number - 1)
    return hub, {"url": hub.url, "shape": SHAPE, "names": NAMES, "times": TIMES}


@pytest.fixture
def together(moving):
    hub, job = moving
    return hub, launch("tests.multiprocess.workers_hub:run", job, processes=PROCESSES, devices=2)


def test_all_processes_read_one_commit(together, tmp_path):
    hub, found = together
    values = [of_process["values"] for of_process in found]
    assert values == [values[0]] * PROCESSES
    assert all(len(at_a_time) == 1 for at_a_time in values[0])
    assert len({at_a_time[0] for at_a_time in values[0]}) == TIMES
    half = TIMES * len(NAMES) * np.prod(SHAPE) * 4 // PROCESSES
    for of_process in found:
        asked = [one for one in hub.network_server.log if one.headers["User-Agent"] == of_process["user_agent"]]
        tensors = [one for one in asked if one.range[0]]
        assert sum(one.sent for one in tensors) == half
    assert all(one.range[0] or one.sent == HEAD_BYTES for one in hub.network_server.log)
    assert not Path(tmp_path, "home").exists()


def test_what_the_hub_refuses_one_process_fails_in_all(moving):
    """And afterwards they read one commit again, whatever one of them has restored alone."""
    _, job = moving
    found = launch("tests.multiprocess.workers_hub:refused", job, processes=PROCESSES, devices=2)
    for process, of_process in enumerate(found):
        assert len(of_process["errors"]) == 2
        for error in of_process["errors"]:
            assert "you may not" in error
            assert ("process 1 failed: " in error) == (process != 1)
    assert [of_process["values"] for of_process in found] == [found[0]["values"]] * PROCESSES
    assert len(found[0]["values"]) == 1


def test_what_a_process_restores_alone_is_of_the_commit_that_it_finds(moving):
    """However the branch has moved since another did; and what all restore is of one commit, exchanged or not."""
    _, job = moving
    found = launch("tests.multiprocess.workers_hub:alone", job, processes=PROCESSES, devices=2)
    own = [of_process["own"] for of_process in found]
    assert own[0] < own[1], own
    assert [of_process["values"] for of_process in found] == [found[0]["values"]] * PROCESSES
    assert len(found[0]["values"]) == 1
    assert found[0]["of_commit"] > found[0]["values"]


def test_arrays_of_some_processes_are_restored_of_a_commit_only(hub, moving):
    _, job = moving
    job["urls"] = [hub.url, f"{hub.url}@{hub.commit(files(100))}"]
    found = launch("tests.multiprocess.workers_hub:some", job, processes=PROCESSES, devices=2)
    for of_branch, of_commit in found:
        assert "name its commit" in of_branch
        assert of_commit == ""
