"""Several processes save to an object store: each file by one of them, the work even, and every tensor whole."""

import json

import numpy as np
import obstore
import pytest

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.header_record import HEADERS_NAME
from tests.multiprocess.workers_object_stores import expected, family_values
from tests.support.launch import launch
from tests.support.servers.faults import Answer

PROCESSES = 4


@pytest.fixture
def together(s3):
    s3.server.fail(Answer(403), method="PUT", path="*fails/model-00002-*", times=None)
    job = {"url": s3.url, "options": s3.options}
    return s3, launch("tests.multiprocess.workers_object_stores:run", job, processes=PROCESSES, devices=2)


def test_what_several_processes_save(together):
    s3, found = together
    assert [of_process["one"] for of_process in found] == [[]] * PROCESSES
    assert [of_process["many"] for of_process in found] == [[]] * PROCESSES
    assert [of_process["whole"] for of_process in found] == [[]] * PROCESSES
    options = ost.SafetensorsOptions(storage_options=s3.options)
    for name in ("one", "many", "whole"):
        assert ost.verify(f"{s3.url}/{name}", data=True, options=options) == []
        restored = ost.SafetensorsHandler(options=options).restore(f"{s3.url}/{name}")
        assert restored.keys() == expected().keys()
        for leaf, host in expected().items():
            assert restored[leaf].tobytes() == host.tobytes()
            assert restored[leaf].shape == host.shape
        assert [of_process[f"{name} planned"] for of_process in found] == [
            of_process[f"{name} bytes"] for of_process in found
        ]
    # Every byte is written by one process, and by all of them about as many: the leaves are few and short.
    written = [of_process["one bytes"] for of_process in found]
    assert sum(written) == sum(host.nbytes for host in expected().values())
    assert max(written) <= 1.3 * np.mean(written)
    names = [one["path"] for one in obstore.list(s3.store(), "one").collect()]
    files = [f"one/model-{number + 1:05}-of-{PROCESSES:05}.safetensors" for number in range(PROCESSES)]
    assert names == ["one/config.json", *files, "one/safetensors.checksums.json", f"one/{HEADERS_NAME}"]
    # Whole tensors, in files with an index as one process writes them, which are as long.
    checkpoint = ost.open_checkpoint(f"{s3.url}/whole", options=options)
    assert all(len(tensor.pieces) == 1 and not any(tensor.pieces[0].start) for tensor in checkpoint.tensors.values())
    assert len(checkpoint.files) >= PROCESSES
    assert not any("DCP" in key for key in checkpoint.metadata)
    index = json.loads(bytes(obstore.get(s3.store(), "whole/model.safetensors.index.json").bytes()))
    assert index["weight_map"].keys() == expected().keys()
    written = [of_process["whole bytes"] for of_process in found]
    assert sum(written) == sum(host.nbytes for host in expected().values())
    assert max(written) <= 1.5 * np.mean(written)
    restored = ost.SafetensorsHandler(options=options).restore(f"{s3.url}/family")
    assert {name: array.tobytes() for name, array in restored.items()} == {
        name: host.tobytes() for name, host in family_values().items()
    }
    restored = ost.load(f"{s3.url}/adapter/adapter_model.safetensors", options=options)
    assert {name: array.tobytes() for name, array in restored.items()} == {
        name: host.tobytes() for name, host in family_values().items()
    }
    names = {one["path"] for one in obstore.list(s3.store(), "adapter").collect()}
    assert {name for name in names if name.endswith((".safetensors", "config.json"))} == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    }
    # All fail where one does, and what the others wrote is gone.
    assert all("fails/model-00002-of-00004.safetensors: writing failed" in of_process["fails"] for of_process in found)
    assert obstore.list(s3.store(), "fails").collect() == []
    assert all("whole fails/model-00002" in of_process["whole fails"] for of_process in found)
    # What is there is refused in all processes, and goes as a whole: of four files three are left over.
    for process, of_process in enumerate(found):
        again = of_process["again"]
        assert "several processes save pieces of tensors to an object store, and Orbax cannot find" in again["no index"]
        assert f"{s3.url}/again: already exists" in again["said"]
        assert again["said"].startswith("process 0 failed") == (process > 0)
        assert (again["before"], again["after"], again["custom"]) == (["a", "b"], ["a"], {})
    names = [one["path"].partition("/")[2] for one in obstore.list(s3.store(), "again").collect()]
    assert sorted(names) == [
        "_CHECKPOINT_METADATA",
        "commit_success.txt",
        "model-00001-of-00001.safetensors",
        "safetensors.checksums.json",
        HEADERS_NAME,
    ]
    # One that cannot even use its way to the store ends the save of all, whatever it was about to do there.
    for process, of_process in enumerate(found):
        for failed, said in zip((1, 1, 0), of_process["one alone"], strict=True):
            assert "cannot be used with these storage_options" in said
            assert said.startswith(f"process {failed} failed") == (process != failed)
