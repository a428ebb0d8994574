"""The harness itself: results in order, and no process left over whatever goes wrong."""

import os
import subprocess

import pytest

from tests.support.launch import LaunchError, launch

WORKERS = "tests.multiprocess.workers_launch"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the processes that are started while a test runs."""
    ids: list[int] = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            ids.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return ids


def _alive(ids: list[int]) -> list[int]:
    return [pid for pid in ids if os.path.exists(f"/proc/{pid}")]


def test_results_come_in_the_order_of_the_processes():
    results = launch(f"{WORKERS}:describe", {"a": [1, "b"]}, processes=3, devices=2)
    assert results == [
        {"arguments": {"a": [1, "b"]}, "process": index, "processes": 3, "local": 2, "devices": 6} for index in range(3)
    ]


def test_a_failure_is_shown_and_ends_the_others(started):
    with pytest.raises(LaunchError, match=r"(?s)--- process 1, exit status 1:.*RuntimeError: this one fails"):
        launch(f"{WORKERS}:fail_in_one", {"process": 1}, processes=2, devices=1)
    assert len(started) == 2
    assert not _alive(started)


def test_warnings_are_errors_in_every_process():
    with pytest.raises(LaunchError, match="UserWarning: look out"):
        launch(f"{WORKERS}:warn", None, processes=1, devices=1)
