"""Restores in several real processes: Orbax's ways in, leaves of every kind, errors, and what is left behind."""

from typing import Any

import pytest

from tests.multiprocess.workers_restore import SCENARIOS
from tests.support.checkpoints import write_steps
from tests.support.launch import launch


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    """What each process found."""
    root = tmp_path_factory.mktemp("steps")
    write_steps(root)
    return launch("tests.multiprocess.workers_restore:run", str(root), processes=4, devices=2)


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_in_every_process(results, scenario):
    alike: dict[str, list[int]] = {}
    for process, of_process in enumerate(results):
        if failure := of_process[scenario]["failure"]:
            alike.setdefault(failure, []).append(process)
    text = "\n".join(f"--- processes {processes}:\n{failure}" for failure, processes in alike.items())
    assert not alike, f"[{scenario}]\n{text}"
    values = [of_process[scenario]["value"] for of_process in results]
    assert values == [values[0]] * len(values), f"[{scenario}] differs between processes: {values}"
