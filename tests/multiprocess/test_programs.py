"""Programs that the devices of several processes run together: any number of leaves; SIGTERM ends waiting processes."""

import pytest

from tests.multiprocess.workers_programs import tensors
from tests.support.files import write
from tests.support.launch import LaunchError, launch


@pytest.fixture
def directory(tmp_path):
    write(tmp_path / "model.safetensors", tensors())
    return str(tmp_path)


@pytest.mark.parametrize("what", ["exchanged", "broadcast"])
def test_many_leaves_are_restored(what, directory):
    wrong = launch(f"tests.multiprocess.workers_programs:{what}", directory, processes=2, devices=4)
    assert wrong == [[], []]


def test_many_leaves_are_saved(s3):
    job = {"url": f"{s3.url}/x", "options": s3.options}
    assert launch("tests.multiprocess.workers_programs:saved", job, processes=2, devices=4) == [[], []]


@pytest.mark.parametrize("where", ["agreement", "devices"])
def test_sigterm_ends_a_process_that_waits_in_a_joint_restore(where, directory):
    """As it does by default, although `jax.distributed` catches it."""
    with pytest.raises(LaunchError, match="process 0, exit status -15:"):
        launch(f"tests.multiprocess.workers_programs:waits_for_{where}", directory, processes=2, devices=1)
