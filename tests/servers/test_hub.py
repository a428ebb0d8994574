"""The Hub and its network, as `huggingface_hub` sees them: it is the oracle of the protocol."""

import hashlib
import os
import urllib.error
import urllib.request

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors

from tests.support.servers.faults import Answer, Cut
from tests.support.servers.hub import STRANGER, TOKEN

WEIGHTS = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8).tobytes()
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "sub/dir/x y.safetensors": WEIGHTS[:1000],
    "sub/note.md": b"# Note",
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

    def run(path, token=TOKEN, **options):
        found = huggingface_hub.hf_hub_download(
            hub.name, path, endpoint=hub.server.url, token=token, cache_dir=tmp_path / "cache", **options
        )
        snapshot = found.removesuffix(path).rstrip("/")
        with open(found, "rb") as file:
            return file.read(), os.path.basename(snapshot)

    return run


@pytest.mark.parametrize("redirects", [True, False])
@pytest.mark.parametrize("path", FILES)
def test_download(hub, commit, download, path, redirects):
    hub.hub.redirects_small = redirects
    assert download(path) == (FILES[path], commit)
    large = len(FILES[path]) if path.endswith(".safetensors") else 0
    assert hub.network_server.sent(process=os.getpid()) == large
    assert hub.server.sent(method="GET") == len(FILES[path]) - large
    assert not [entry for entry in hub.network_server.log if "Authorization" in entry.headers]


def test_a_file_of_this_machine(hub, download, tmp_path):
    (tmp_path / "large").write_bytes(WEIGHTS)
    hub.commit({"model.safetensors": tmp_path / "large"})
    assert download("model.safetensors")[0] == WEIGHTS


def test_revisions(hub, download, api):
    first = hub.commit({"a.json": b"1"}, "v1")
    second = hub.commit({"a.json": b"2"})
    request = hub.commit({"a.json": b"3"}, "refs/pr/1")
    assert download("a.json") == (b"2", second)
    assert download("a.json", revision="v1") == download("a.json", revision=first) == (b"1", first)
    assert download("a.json", revision="refs/pr/1") == (b"3", request)
    assert api.model_info(hub.name, revision="v1").sha == first


def test_metadata(hub, commit):
    def metadata(path):
        url = huggingface_hub.hf_hub_url(hub.name, path, endpoint=hub.server.url)
        return huggingface_hub.get_hf_file_metadata(url, token=TOKEN)

    large = metadata("model.safetensors")
    assert (large.commit_hash, large.size, large.etag) == (commit, len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
    assert large.location.startswith(hub.network_server.url)
    assert large.xet_file_data is None
    small = metadata("config.json")
    assert (small.commit_hash, small.size) == (commit, len(FILES["config.json"]))


def test_model_info(hub, commit, api):
    info = api.model_info(hub.name)
    assert info.sha == commit
    assert [sibling.rfilename for sibling in info.siblings] == sorted(FILES)
    info = api.model_info(hub.name, files_metadata=True)
    assert {sibling.rfilename: sibling.size for sibling in info.siblings} == {p: len(d) for p, d in FILES.items()}
    assert [s.rfilename for s in info.siblings if s.lfs] == ["model.safetensors", "sub/dir/x y.safetensors"]
    assert api.list_repo_files(hub.name) == sorted(FILES)


def test_a_name_of_old(hub, commit, api):
    hub.hub.moved["gpt2"] = hub.name
    info = api.model_info("gpt2", revision="main")
    assert (info.id, info.sha) == (hub.name, commit)


@pytest.mark.parametrize("entries", [1000, 2, 1])
def test_list_repo_tree(hub, commit, api, entries):
    hub.hub.page_entries = entries
    listed = list(api.list_repo_tree(hub.name, recursive=True))
    files = {entry.path: entry for entry in listed if isinstance(entry, huggingface_hub.hf_api.RepoFile)}
    assert {path: entry.size for path, entry in files.items()} == {p: len(d) for p, d in FILES.items()}
    assert files["model.safetensors"].lfs.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert [entry.path for entry in listed if entry.path not in files] == ["sub", "sub/dir"]
    assert [e.path for e in api.list_repo_tree(hub.name)] == ["config.json", "model.safetensors", "sub"]
    assert [e.path for e in api.list_repo_tree(hub.name, "sub")] == ["sub/dir", "sub/note.md"]
    with pytest.raises(errors.EntryNotFoundError):
        list(api.list_repo_tree(hub.name, "none"))


def test_file_system(hub, commit):
    system = huggingface_hub.HfFileSystem(
        endpoint=hub.server.url, token=TOKEN, skip_instance_cache=True, use_listings_cache=False
    )
    assert system.ls(f"{hub.name}/sub", detail=False) == [f"{hub.name}/sub/dir", f"{hub.name}/sub/note.md"]
    with system.open(f"{hub.name}/model.safetensors", "rb", block_size=1000, cache_type="none") as file:
        file.seek(5000)
        assert file.read(10) == WEIGHTS[5000:5010]
    (entry,) = hub.network_server.log
    assert (entry.range, entry.status, entry.sent) == ((5000, 5010), 206, 10)


def test_snapshot(hub, commit, tmp_path):
    path = huggingface_hub.snapshot_download(
        hub.name, endpoint=hub.server.url, token=TOKEN, cache_dir=tmp_path / "cache", max_workers=2
    )
    for name, data in FILES.items():
        with open(os.path.join(path, name), "rb") as file:
            assert file.read() == data


def test_what_is_not_there(hub, commit, api, download):
    with pytest.raises(errors.RemoteEntryNotFoundError) as refused:
        download("none")
    assert refused.value.response.headers["X-Repo-Commit"] == commit
    with pytest.raises(errors.RevisionNotFoundError):
        download("config.json", revision="none")
    with pytest.raises(errors.RevisionNotFoundError):
        api.model_info(hub.name, revision="none")
    with pytest.raises(errors.RepositoryNotFoundError):
        api.model_info("owner/none")
    # This may be a repository that one has to log in for: the Hub does not say.
    with pytest.raises(errors.HfHubHTTPError) as refused:
        api.model_info("owner/none", token=False)
    assert refused.value.response.status_code == 401


def cause(error):
    """The refusal that a download ended with, which looks for the file elsewhere first."""
    while error is not None and not isinstance(error, errors.HfHubHTTPError):
        error = error.__cause__
    return error


@pytest.mark.parametrize(("token", "status"), [(False, 401), (STRANGER, 403)])
def test_gated(hub, commit, api, download, token, status):
    hub.hub.repositories[hub.name].gated = True
    for path in FILES:
        with pytest.raises((errors.GatedRepoError, errors.LocalEntryNotFoundError)) as refused:
            download(path, token=token)
        assert isinstance(cause(refused.value), errors.GatedRepoError)
        assert cause(refused.value).response.status_code == status
        assert download(path)[0] == FILES[path]
    assert api.model_info(hub.name, token=token).sha == commit


@pytest.mark.parametrize(("token", "status"), [(False, 401), (STRANGER, 404)])
def test_private(hub, commit, api, token, status):
    hub.hub.repositories[hub.name].private = True
    assert api.model_info(hub.name).private
    with pytest.raises(errors.HfHubHTTPError) as refused:
        api.model_info(hub.name, token=token)
    assert refused.value.response.status_code == status


def test_a_token_that_is_none(hub, commit, api):
    with pytest.raises(errors.HfHubHTTPError, match="Invalid credentials in Authorization header"):
        api.model_info(hub.name, token="hf_other")


def status(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@pytest.fixture
def link(hub, commit) -> str:
    """A signed link to the large file."""
    url = huggingface_hub.hf_hub_url(hub.name, "model.safetensors", endpoint=hub.server.url)
    return huggingface_hub.get_hf_file_metadata(url).location


def test_links_expire(hub, link):
    assert [status(link), status(link)] == [200, 200]
    hub.network.uses = 3
    assert [status(link, Range="bytes=0-9"), status(link)] == [206, 403]
    hub.network.uses = None
    assert status(link) == 200
    hub.network.expire()
    assert status(link) == 403


def test_links_are_signed(link):
    assert status(link.replace("Signature=", "Signature=0")) == 403
    assert status(link.replace("/repos/", "/repos/0")) == 403
    assert status(link.partition("?")[0]) == 403


def test_credentials_stay_with_the_hub(link):
    assert status(link, Authorization=f"Bearer {TOKEN}") == 400


def test_faults(hub, commit, download, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.network_server.fail(Cut(1000, "close"))
    hub.network_server.fail(Answer(429, {"Retry-After": "0"}), skip=1)
    assert download("model.safetensors")[0] == WEIGHTS
    assert [(entry.status, entry.sent) for entry in hub.network_server.log][:2] == [(200, 1000), (429, 0)]
