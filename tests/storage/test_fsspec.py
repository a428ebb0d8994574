"""File systems of fsspec: what is read from them, and what is said of their faults."""

import os
import threading

import fsspec
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import orbax_safetensors as ost
from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.storage.schemes import store_of
from tests.support.told_secrets import assert_tells_no_secret

TREE = {"w": np.arange(60_000, dtype=np.float32).reshape(300, 200), "b": np.arange(7, dtype=np.int8)}

pytestmark = pytest.mark.usefixtures("soon")


FAULTS = []


class FaultyFileSystem(MemoryFileSystem):
    """Raises `FAULTS` in turn before it reads, and is for one thread at a time."""

    protocol = "faulty"

    def __init__(self, password="SECRET"):
        super().__init__()
        self.password = password
        self.turn = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        assert self.turn.acquire(blocking=False), "used by two threads at once"
        try:
            os.sched_yield()  # to others, which come if they may
            if FAULTS:
                raise FAULTS.pop(0)
            return super().cat_file(path, start, end, **kwargs)
        finally:
            self.turn.release()


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@pytest.fixture(params=["memory", "faulty"])
def place(request, tmp_path):
    """The URL of a checkpoint of two files, with an index."""
    ocp.Checkpointer(ost.SafetensorsHandler()).save(
        tmp_path / "m", args=ost.SafetensorsSave(TREE, max_file_bytes=100_000)
    )
    files = fsspec.filesystem(request.param)
    files.put(str(tmp_path / "m"), "/models/m", recursive=True)
    yield f"{request.param}://models/m"
    files.rm("/models", recursive=True)
    FAULTS.clear()


def restore(url):
    return ost.SafetensorsCheckpointer().restore(url)


def test_a_checkpoint_is_restored(place):
    found = restore(place)
    assert found.keys() == TREE.keys()
    for name, array in TREE.items():
        np.testing.assert_array_equal(found[name], array)
    ost.verify(place)


def test_a_file_that_is_shorter_by_now(place):
    store, path = store_of(place, None)
    file = store.open(f"{path}/model.safetensors.index.json")
    fsspec.filesystem(place.partition("://")[0]).pipe(file.path.replace("faulty://", "memory://"), b"{}")
    with pytest.raises(StorageError, match="returned 0 bytes instead"):
        file.read([(10, [memoryview(bytearray(5))])])


def test_a_save_is_refused(place):
    with pytest.raises(StorageError, match="can only be read from"):
        ost.SafetensorsCheckpointer().save(f"{place}-new", TREE)


@pytest.mark.parametrize("place", ["faulty"], indirect=True)
@pytest.mark.parametrize("fault", [ConnectionResetError("x"), TimeoutError()], ids=repr)
def test_a_lost_connection_is_tried_again(place, fault):
    FAULTS.extend([fault, fault])
    np.testing.assert_array_equal(restore(place)["w"], TREE["w"])


@pytest.mark.parametrize("place", ["faulty"], indirect=True)
def test_other_faults_are_one_error_without_secrets(place):
    FAULTS.append(RuntimeError("GET https://u:SECRET@host/x?Signature=SECRET"))
    with pytest.raises(StorageError, match="failed: RuntimeError: GET https://host/x") as caught:
        restore(place)
    assert_tells_no_secret(caught.value)
    assert FAULTS == []


def test_options_are_for_the_file_system():
    with pytest.raises(SafetensorsError, match="^faulty://models/m: cannot be reached by fsspec: TypeError: .*'user'"):
        store_of("faulty://models/m", {"user": "SECRET"})


def test_urls_that_are_not_for_fsspec():
    for url in ["file:///models/m", "nowhere://x", "simplecache::memory://models/m"]:
        with pytest.raises(StorageError, match="expected a path or one of s3://"):
            store_of(url, None)
