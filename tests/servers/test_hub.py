"""The Hub and its network, as `huggingface_hub` sees them: it is the oracle of the protocol."""

import hashlib
import os
import urllib.error
import urllib.request

import huggingface_hub
import pytest
from huggingface_hub import errors

from tests.support.servers.hub import TOKEN

WEIGHTS = os.urandom(100_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "sub/dir/x y.safetensors": WEIGHTS[:1000],
}


@pytest.fixture
def commit(hub) -> str:
    return hub.commit(FILES)


@pytest.fixture
def api(hub):
    return huggingface_hub.HfApi(endpoint=hub.server.url, token=TOKEN)


@pytest.fixture
def download(hub, tmp_path):
    """Downloads a file; returns its contents and the commit that it is of."""

    def run(path, **options):
        found = huggingface_hub.hf_hub_download(
            hub.name, path, endpoint=hub.server.url, token=TOKEN, cache_dir=tmp_path / "cache", **options
        )
        snapshot = found.removesuffix(path).rstrip("/")
        with open(found, "rb") as file:
            return file.read(), os.path.basename(snapshot)

    return run


def test_download(hub, commit, download):
    for path, content in FILES.items():
        assert download(path) == (content, commit)
    large = 101_000
    assert hub.network_server.sent() == large
    assert not [entry for entry in hub.network_server.log if "Authorization" in entry.headers]


def test_revisions(hub, download, api):
    first = hub.commit({"a.json": b"1"}, "v1")
    second = hub.commit({"a.json": b"2"})
    request = hub.commit({"a.json": b"3"}, "refs/pr/1")
    assert download("a.json") == (b"2", second)
    assert download("a.json", revision="v1") == download("a.json", revision=first) == (b"1", first)
    assert download("a.json", revision="refs/pr/1") == (b"3", request)
    info = api.model_info(hub.name, revision="v1")
    assert (info.id, info.sha, [sibling.rfilename for sibling in info.siblings]) == (hub.name, first, ["a.json"])


def test_metadata(hub, commit):
    def metadata(path):
        url = huggingface_hub.hf_hub_url(hub.name, path, endpoint=hub.server.url)
        return huggingface_hub.get_hf_file_metadata(url, token=TOKEN)

    large = metadata("model.safetensors")
    assert (large.commit_hash, large.size, large.etag) == (commit, len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
    assert large.location.startswith(hub.network_server.url)
    small = metadata("config.json")
    assert (small.commit_hash, small.size) == (commit, len(FILES["config.json"]))


def test_what_is_not_there(hub, commit, api, download):
    with pytest.raises(errors.RemoteEntryNotFoundError):
        download("none")
    with pytest.raises(errors.RevisionNotFoundError):
        api.model_info(hub.name, revision="none")
    with pytest.raises(errors.RepositoryNotFoundError):
        api.model_info("owner/none", revision="main")


def test_links_are_signed_expire_and_take_no_credentials(hub, commit):
    def status(url, **headers):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
                return response.status
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    url = huggingface_hub.hf_hub_url(hub.name, "model.safetensors", endpoint=hub.server.url)
    link = huggingface_hub.get_hf_file_metadata(url).location
    assert [status(link), status(link, Range="bytes=0-9")] == [200, 206]
    for wrong in (link.replace("Signature=", "Signature=0"), link.replace("/repos/", "/repos/0")):
        assert status(wrong) == 403
    assert status(link, Authorization=f"Bearer {TOKEN}") == 400
    hub.network.expire()
    assert status(link) == 403
