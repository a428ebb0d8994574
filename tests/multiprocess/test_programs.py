"""Programs that the devices of several processes run together: any number of leaves."""

import pytest

from tests.multiprocess.workers_programs import tensors
from tests.support.files import write
from tests.support.launch import launch


@pytest.fixture
def directory(tmp_path):
    write(tmp_path / "model.safetensors", tensors())
    return str(tmp_path)


def test_many_leaves_are_restored(directory):
    wrong = launch("tests.multiprocess.workers_programs:broadcast", directory, processes=2, devices=4)
    assert wrong == [[], []]


def test_many_leaves_are_saved(s3):
    job = {"url": f"{s3.url}/x", "options": s3.options}
    assert launch("tests.multiprocess.workers_programs:saved", job, processes=2, devices=4) == [[], []]
