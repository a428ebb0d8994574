"""Programs that the devices of several processes run together: any number of leaves."""

from tests.multiprocess.workers_programs import tensors
from tests.support.files import write
from tests.support.launch import launch


def test_many_leaves_are_restored_and_saved(tmp_path, s3):
    write(tmp_path / "model.safetensors", tensors())
    job = {"directory": str(tmp_path), "url": f"{s3.url}/x", "options": s3.options}
    wrong = launch("tests.multiprocess.workers_programs:run", job, processes=2, devices=4)
    assert wrong == [{"restored": [], "saved": []}] * 2
