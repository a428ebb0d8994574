"""Several processes restore from a store: each the right bits, and of the server no byte more than it has planned."""

import numpy as np
import obstore

from orbax_safetensors.storage.remote import HEAD_BYTES
from tests.support.checkpoints import write_matrix
from tests.support.files import write
from tests.support.launch import launch


def test_every_layout_of_a_tree(s3, tmp_path):
    write_matrix(tmp_path)
    for path in tmp_path.iterdir():
        obstore.put(s3.store(), f"x/{path.name}", path.read_bytes())
    job = {"url": f"{s3.url}/x", "options": s3.options, "directory": str(tmp_path)}
    results = launch("tests.multiprocess.workers_remote:run", job, processes=2, devices=4)
    assert [result["wrong"] for result in results] == [[], []]
    log = [one for one in s3.server.log if one.path.endswith(".safetensors") and one.method == "GET"]
    heads = sum(min(HEAD_BYTES, path.stat().st_size) for path in tmp_path.glob("*.safetensors"))
    # Of all processes: whose a connection was cannot be told once it is closed.
    expected = sum(result["read_bytes"] + result["opened"] * heads for result in results)
    assert sum(one.sent for one in log) == expected


def test_restores_of_one_process_wait_for_nobody(web):
    """As no process reads for another; and the next one that all make finds them in step."""
    write(web.root / "model.safetensors", {"a": np.arange(2**16, dtype=np.float32).reshape(64, 1024)})
    found = launch("tests.multiprocess.workers_remote:alone", web.url, processes=2, devices=1)
    assert found == [{"errors": {}, "wrong": []}] * 2
