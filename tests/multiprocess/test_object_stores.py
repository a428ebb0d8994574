"""Several processes save to an object store: each file by one of them, the work even, and every tensor whole."""

import json

import numpy as np
import obstore
import pytest

import orbax_safetensors as ost
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.format.layout import INDEX_NAME, file_names
from tests.multiprocess.workers_families import stored_directory
from tests.multiprocess.workers_object_stores import expected, family_values, some_values
from tests.support.conversions import unused
from tests.support.launch import launch
from tests.support.maxtext_trees import stored
from tests.support.servers.faults import Answer

PROCESSES = 4


@pytest.fixture
def together(s3):
    s3.server.fail(Answer(403), method="PUT", path="*fails/model-00002-*", times=None)
    job = {"url": s3.url, "options": s3.options}
    return s3, launch("tests.multiprocess.workers_object_stores:run", job, processes=PROCESSES, devices=2)


def test_what_several_processes_save(together):
    s3, found = together
    options = ost.SafetensorsOptions(storage_options=s3.options)
    source, copied = stored(stored_directory("gemma4_small")), ost.load(f"{s3.url}/copied", options=options)
    towers = unused("gemma4_small", source)
    assert copied.keys() == source.keys() >= towers
    assert all(copied[name].tobytes() == source[name].tobytes() for name in towers)
    assert ost.verify(f"{s3.url}/copied", data=True, options=options) == []
    for name in ("few", "many"):
        assert [of_process[name] for of_process in found] == [[]] * PROCESSES
        assert ost.verify(f"{s3.url}/{name}", data=True, options=options) == []
        restored = ost.SafetensorsHandler(options=options).restore(f"{s3.url}/{name}")
        assert restored.keys() == expected().keys()
        for leaf, host in expected().items():
            assert restored[leaf].tobytes() == host.tobytes()
            assert restored[leaf].shape == host.shape
        # Every byte is written by one process, and by all of them about as many: the leaves are few and short.
        written = [of_process[f"{name} bytes"] for of_process in found]
        assert [of_process[f"{name} planned"] for of_process in found] == written
        assert sum(written) == sum(host.nbytes for host in expected().values())
        assert max(written) <= 1.5 * np.mean(written)
        # Whole tensors, in files with an index as one process writes them.
        checkpoint = ost.open_checkpoint(f"{s3.url}/{name}", options=options)
        assert not any("DCP" in key for key in checkpoint.metadata)
        index = json.loads(bytes(obstore.get(s3.store(), f"{name}/{INDEX_NAME}").bytes()))
        assert index["weight_map"].keys() == expected().keys()
        files = file_names(len(checkpoint.files))
        assert len(files) >= PROCESSES
        names = [one["path"] for one in obstore.list(s3.store(), name).collect()]
        others = ["config.json", CHECKSUMS_NAME, INDEX_NAME]
        assert names == sorted(f"{name}/{file}" for file in [*files, *others])
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
    # Leaves that some processes have are written by these.
    restored = ost.load(f"{s3.url}/some", options=options)
    assert {name: array.tobytes() for name, array in restored.items()} == {
        name: host.tobytes() for name, host in some_values().items()
    }
    some = [of_process["some"] for of_process in found]
    assert [of_process["written"] for of_process in some] == [of_process["planned"] for of_process in some]
    for of_process in some:
        assert "no process holds parts of all leaves that are stored in whole" in of_process["apart"]
    # All fail where one does, and what the others wrote is gone.
    assert all("fails/model-00002-of-" in of_process["fails"] for of_process in found)
    assert all("safetensors: writing failed" in of_process["fails"] for of_process in found)
    assert obstore.list(s3.store(), "fails").collect() == []
    # What is there is refused in all processes, and goes as a whole: of four files three are left over.
    for process, of_process in enumerate(found):
        again = of_process["again"]
        assert f"{s3.url}/again: already exists" in again["said"]
        assert again["said"].startswith("process 0 failed") == (process > 0)
        assert (again["before"], again["after"], again["custom"]) == (["a", "b"], ["a"], {})
    names = [one["path"].partition("/")[2] for one in obstore.list(s3.store(), "again").collect()]
    index = {"_METADATA", "_sharding", "_LINKED_FILES", "manifest.ocdbt", "array_metadatas/process_0"}
    others = {"_CHECKPOINT_METADATA", "commit_success.txt", "model.safetensors", CHECKSUMS_NAME}
    assert {name for name in names if not name.startswith("d/")} == index | others
    # So does one that has no memory for what it is sent; no process waits in a program for it.
    for process, of_process in enumerate(found):
        assert "no memory for a copy" in of_process["no memory"]
        assert of_process["no memory"].startswith("process 1 failed") == (process != 1)
    # One that cannot even use its way to the store ends the save of all, whatever it was about to do there.
    for process, of_process in enumerate(found):
        for failed, said in zip((1, 1, 0), of_process["one alone"], strict=True):
            assert "cannot be used with these storage_options" in said
            assert said.startswith(f"process {failed} failed") == (process != failed)
