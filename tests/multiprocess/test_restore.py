"""Restores in several real processes: Orbax's ways in, leaves of every kind, errors, and what is left behind."""

from typing import Any

import pytest

from tests.multiprocess.workers_restore import SCENARIOS
from tests.support.checkpoints import write_steps
from tests.support.launch import check_scenarios, launch


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    """What each process found."""
    root = tmp_path_factory.mktemp("steps")
    write_steps(root)
    return launch("tests.multiprocess.workers_restore:run", str(root), processes=4, devices=2)


def test_in_every_process(results):
    assert [list(of_process) for of_process in results] == [list(SCENARIOS)] * 4
    check_scenarios(results)


def test_processes_agree_on_what_they_find(results):
    for scenario in SCENARIOS:
        values = [of_process[scenario]["value"] for of_process in results]
        assert values == [values[0]] * len(values), scenario
