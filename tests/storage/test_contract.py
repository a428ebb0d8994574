"""Every store keeps the contract of stores, and those behind a network that of faults."""

from typing import ClassVar

import fsspec
import obstore
import pytest
from obstore.store import MemoryStore

from orbax_safetensors.storage import schemes
from orbax_safetensors.storage.bucket import BucketStore
from orbax_safetensors.storage.retries import Retries
from tests.support.failing_clients import FailingObstore, FailingUrllib
from tests.support.store_contract import (
    AT,
    DATA,
    NAME,
    BucketContract,
    FaultContract,
    Place,
    ReadOnlyContract,
    WritableContract,
    read,
)


def in_directory(root, url, **options):
    """A place whose files are in a directory."""

    def put(name, content):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)

    return Place(url, put, lambda name: (root / name).unlink(), options)


def in_bucket(url, objects, options):
    """A place whose files are objects."""

    def put(name, content):
        obstore.put(objects, f"d/{name}", content)

    options = {**options, "max_retries": 2}
    return Place(f"{url}/d", put, lambda name: obstore.delete(objects, f"d/{name}"), options)


class TestLocal(WritableContract):
    @pytest.fixture
    def place(self, tmp_path):
        return in_directory(tmp_path, str(tmp_path))


class TestMemory(BucketContract, FaultContract):
    """Objects in this process: what is common to all object stores, without a server."""

    test_an_empty_file = None  # obstore's store in memory has its own error for those

    @pytest.fixture
    def place(self, monkeypatch):
        objects = MemoryStore()
        store = BucketStore("s3://bucket", objects, Retries(3, 60.0), lambda: objects)
        monkeypatch.setattr(schemes, "from_url", lambda *_, **__: objects)
        return in_bucket(store.root, objects, {"access_key_id": "SECRET", "secret_access_key": "SECRET"})

    @pytest.fixture
    def client(self, monkeypatch):
        return FailingObstore(monkeypatch, "Memory")


class TestFsspec(ReadOnlyContract):
    @pytest.fixture
    def place(self):
        files = fsspec.filesystem("memory")
        yield Place(
            "memory://models/contract",
            lambda name, content: files.pipe(f"/models/contract/{name}", content),
            lambda name: files.rm(f"/models/contract/{name}"),
        )
        files.store.clear()


class TestWeb(ReadOnlyContract, FaultContract):
    test_names_in_a_directory = None  # a plain server does not tell them

    @pytest.fixture
    def place(self, web):
        return in_directory(web.root, web.url, max_retries=2)

    @pytest.fixture
    def client(self, monkeypatch):
        return FailingObstore(monkeypatch)


class TestWebWithSecrets(TestWeb):
    """Requests that carry a secret are made by a client of ours."""

    @pytest.fixture
    def place(self, web):
        return in_directory(web.root, web.url, max_retries=2, default_headers={"X-Auth-Token": "SECRET"})

    @pytest.fixture
    def client(self, monkeypatch):
        return FailingUrllib(monkeypatch)


class TestS3(BucketContract, FaultContract):
    @pytest.fixture
    def place(self, s3):
        return in_bucket(s3.url, s3.store(), s3.options)

    @pytest.fixture
    def client(self, monkeypatch):
        return FailingObstore(monkeypatch, "S3")


class TestGcs(BucketContract, FaultContract):
    @pytest.fixture
    def place(self, gcs):
        return in_bucket(gcs.url, gcs.store(), gcs.options)

    @pytest.fixture
    def client(self, monkeypatch):
        return FailingObstore(monkeypatch, "GCS")


class TestAzure(BucketContract, FaultContract):
    @pytest.fixture
    def place(self, azure):
        return in_bucket(azure.url, azure.store(), azure.options)

    @pytest.fixture
    def client(self, monkeypatch):
        return FailingObstore(monkeypatch, "MicrosoftAzure")


class TestHub(ReadOnlyContract, FaultContract):
    """Files of one commit, which does not change."""

    PASSING: ClassVar = {**FaultContract.PASSING, "404": "the file is not where the Hub said that it is"}
    LASTING: ClassVar = {fault: said for fault, said in FaultContract.LASTING.items() if fault != "404"}
    REQUESTS: ClassVar = {"403": 2}  # the link may have expired, and is renewed once

    @pytest.fixture
    def place(self, hub, nobody):
        files = {}

        def put(name, content):
            files[f"d/{name}"] = content
            hub.commit(files)

        def remove(name):
            del files[f"d/{name}"]
            hub.commit(files)

        options = {"endpoint": hub.server.url, "token": hub.environment["HF_TOKEN"], "max_retries": 2}
        return Place(f"{hub.url}/d", put, remove, options)

    @pytest.fixture
    def client(self, monkeypatch):
        return FailingObstore(monkeypatch)

    @pytest.mark.parametrize("change", ["replaced", "removed"])
    def test_a_file_that_changes_is_noticed(self, place, change):
        """A branch that moves on is not followed."""
        place.put(NAME, DATA)
        file = place.open(NAME)
        if change == "replaced":
            place.put(NAME, DATA[:-1])
        else:
            place.remove(NAME)
        assert read(file, (AT, 5)) == [DATA[AT : AT + 5]]

    def test_an_answer_of_another_state(self, file, client):
        """Which the commit rules out, whatever the server calls it."""
        client.fail("other version", times=1)
        assert read(file, (AT, 10)) == [DATA[AT : AT + 10]]
