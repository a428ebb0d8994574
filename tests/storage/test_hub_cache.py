"""Files of the Hub that the user has downloaded: read from the cache, with the Hub and without."""

import os

import huggingface_hub
import pytest
from huggingface_hub import constants

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage.schemes import store_of

DATA = bytes(os.urandom(700_000))
FILES = {
    "model.safetensors": DATA,
    "config.json": b'{"a": 1}',
    "sub/a b@1.safetensors": DATA[::-1],
}
NAMES = ["config.json", "model.safetensors", "sub"]
FAR = 600_000  # beyond what is read when a file is opened


@pytest.fixture
def commit(hub, monkeypatch) -> str:
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    return hub.commit(FILES)


def read(file, offset, nbytes):
    buffer = bytearray(nbytes)
    file.read([(offset, [memoryview(buffer)])])
    return bytes(buffer)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The user's cache, which is empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def download(hub, name):
    return huggingface_hub.hf_hub_download(hub.name, name, endpoint=hub.server.url, cache_dir=constants.HF_HUB_CACHE)


def forget(hub):
    hub.server.clear()
    hub.network_server.clear()


def test_files_in_the_cache_are_read_from_there(hub, commit, cache):
    copy = download(hub, "model.safetensors")
    download(hub, "config.json")
    forget(hub)
    store, path = store_of(hub.url, {})
    file = store.open(f"{path}/model.safetensors")
    assert (file.path, file.stamp.nbytes) == (copy, len(DATA))
    assert read(file, 0, 10) + read(file, FAR, 20) == DATA[:10] + DATA[FAR : FAR + 20]
    assert read(store.find(f"{path}/config.json"), 0, 8) == FILES["config.json"]
    assert [entry.path for entry in hub.server.log] == ["/api/models/owner/name/revision/main"]
    assert hub.network_server.log == []
    assert read(store.open(f"{path}/sub/a b@1.safetensors"), 3, 4) == DATA[::-1][3:7]  # which is not there
    assert list(store.list(path)) == NAMES


def test_the_cache_has_another_commit(hub, commit, cache):
    download(hub, "model.safetensors")
    later = hub.commit({"model.safetensors": DATA[::-1]})
    store, path = store_of(hub.url, {})
    assert path == f"{hub.url}@{later}"
    assert read(store.open(f"{path}/model.safetensors"), FAR, 9) == DATA[::-1][FAR : FAR + 9]
    store, path = store_of(f"{hub.url}@{commit}", {})
    assert read(store.open(f"{path}/model.safetensors"), FAR, 9) == DATA[FAR : FAR + 9]


def test_a_stamp_is_the_same_with_and_without_a_cache(hub, commit, cache):
    store, path = store_of(f"{hub.url}/model.safetensors", {})
    stamp = store.open(path).stamp
    copy = download(hub, "model.safetensors")
    forget(hub)
    file = store.open(path, stamp)
    assert file.stamp == stamp
    assert read(file, 3, 4) == DATA[3:7]
    assert hub.network_server.log == []
    file.check(stamp)
    with pytest.raises(StorageError, match="changed while it was in use: expected 7 bytes"):
        store.open(path, stamp._replace(nbytes=7))
    with open(copy, "ab") as target:
        target.write(b"more")
    with pytest.raises(StorageError, match="changed while it was in use"):
        file.check(stamp)
    with pytest.raises(StorageError, match="changed while it was in use"):
        store.open(path, stamp)


def test_offline(hub, commit, cache, monkeypatch):
    for name in FILES:
        download(hub, name)
    forget(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for url in (hub.url, f"{hub.url}@main", f"{hub.url}@{commit}"):
        store, path = store_of(url, {})
        assert path == f"{hub.url}@{commit}"
        assert list(store.list(path)) == NAMES
        assert read(store.open(f"{path}/sub/a b@1.safetensors"), 5, 6) == DATA[::-1][5:11]
    for url in (f"{hub.url}@v1", "hf://owner/other"):
        with pytest.raises(StorageError, match=rf"{url}\S*: is not, .* in the cache, .*OFFLINE.*{cache}"):
            store_of(url, {})
    assert hub.server.log == hub.network_server.log == []
