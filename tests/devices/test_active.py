"""Which processes save together, by Orbax's options."""

import jax
import orbax.checkpoint as ocp
import pytest

from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.errors import SafetensorsError


@pytest.fixture(autouse=True)
def four_processes(monkeypatch):
    """This process is the third of four."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 2)


def active(**options):
    return ActiveProcesses.of(ocp.options.MultiprocessingOptions(**options))


def test_all_processes_by_default():
    assert active() == ActiveProcesses.all() == ActiveProcesses((0, 1, 2, 3), primary=0)
    assert active().rank == 2
    assert not active().is_primary


def test_some_processes_and_the_primary_one_of_them():
    some = active(active_processes={3, 2}, primary_host=2, barrier_sync_key_prefix="evaluation")
    assert some == ActiveProcesses((2, 3), primary=2, prefix="evaluation")
    assert (some.count, some.rank, some.is_primary) == (2, 0, True)


def test_without_a_primary_host_each_process_is_alone():
    assert active(primary_host=None) == ActiveProcesses((2,), primary=2)
    assert active(primary_host=None, active_processes={1, 2}) == ActiveProcesses((2,), primary=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active_processes": {1, 2}}, "primary_host is 0, which is not in active_processes: 1, 2"),
        ({"primary_host": 4}, "primary_host is 4, which is not in active_processes: 0, 1, 2, 3"),
        ({"active_processes": {0, 1}}, "this process is 2, which is not in active_processes: 0, 1"),
        ({"active_processes": {2, 4}, "primary_host": 2}, "active_processes has 4, and there are 4 processes"),
    ],
)
def test_processes_that_could_only_wait_are_an_error(options, message):
    with pytest.raises(SafetensorsError, match=message):
        active(**options)
