"""Several processes restore from the Hub: each its own bytes, and all of one commit, whatever becomes of the branch."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from orbax_safetensors.io.remote import HEAD_BYTES
from tests.multiprocess.launch import launch
from tests.servers.faults import Call

PROCESSES = 2
TIMES = 3
SHAPE = (1024, 1024)
NAMES = ["a", "b"]


def files(value):
    array = np.full(SHAPE, value, np.float32)
    return {f"{name}.safetensors": save({name: array}) for name in NAMES}


@pytest.fixture
def together(hub, monkeypatch, tmp_path):
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    hub.commit(files(0))
    # Each time that somebody asks what the branch is, it is something else.
    for number in range(1, 10):
        move = Call(lambda value=number: hub.commit(files(value)))
        hub.server.fail(move, path="/api/models/*/revision/main", skip=number - 1)
    job = {"url": hub.url, "shape": SHAPE, "names": NAMES, "times": TIMES}
    return hub, launch("tests.multiprocess.workers_hub:run", job, processes=PROCESSES, devices=2)


def test_all_processes_read_one_commit(together, tmp_path):
    hub, found = together
    values = [of_process["values"] for of_process in found]
    assert values == [values[0]] * PROCESSES
    assert all(len(at_a_time) == 1 for at_a_time in values[0])
    assert len({at_a_time[0] for at_a_time in values[0]}) == TIMES
    half = TIMES * len(NAMES) * np.prod(SHAPE) * 4 // PROCESSES
    for of_process in found:
        tensors = [one for one in hub.network_server.log if one.process == of_process["process"] and one.range[0]]
        assert sum(one.sent for one in tensors) == half
    assert all(one.range[0] or one.sent == HEAD_BYTES for one in hub.network_server.log)
    assert not Path(tmp_path, "home").exists()
