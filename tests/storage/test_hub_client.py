"""The user's own settings of the Hub: endpoints, proxies, tokens, offline mode and the cache."""

import contextlib
import json
import sys

import huggingface_hub
import pytest
from huggingface_hub import constants

from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.storage import hub_api
from orbax_safetensors.storage.schemes import store_of
from tests.support.hub_files import FILES
from tests.support.servers.server import Response, Server

pytestmark = pytest.mark.usefixtures("nobody")


def test_options_instead_of_the_environment(hub, commit, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    store, path = store_of(hub.url, {"endpoint": hub.server.url + "/", "token": "hf_stranger"})
    assert store.list(path)
    assert hub.server.log[-1].headers["Authorization"] == "Bearer hf_stranger"
    with pytest.raises(SafetensorsError, match=r"'root_certificate' are not for the Hub: .* SSL_CERT_FILE") as caught:
        store_of(hub.url, {"root_certificate": "SECRET"})
    assert "SECRET" not in str(caught.value)
    with pytest.raises(SafetensorsError, match="'aws_region' are not for the Hub"):
        store_of(hub.url, {"aws_region": "x"})


@pytest.mark.server
def test_a_proxy(monkeypatch):
    answer = json.dumps({"id": "owner/name", "sha": "c" * 40, "siblings": []}).encode()
    with Server(lambda request: Response(200, {}, answer)) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        huggingface_hub.close_session()  # which has read the environment
        assert store_of("hf://owner/name", {"endpoint": "http://hub.invalid"})[1] == f"hf://owner/name@{'c' * 40}"
    huggingface_hub.close_session()
    assert [entry.path for entry in proxy.log] == ["http://hub.invalid/api/models/owner/name/revision/main"]


def sent_token(hub, **options):
    """The token that a question to the Hub has come with."""
    hub.server.clear()
    with contextlib.suppress(StorageError):
        store_of(hub.url, {**options, "endpoint": hub.server.url, "max_retries": 0})
    (header,) = {entry.headers["Authorization"] for entry in hub.server.log}
    return header and header.removeprefix("Bearer ")


def test_tokens(hub, monkeypatch, tmp_path):
    hub.commit(FILES)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    assert sent_token(hub) is None
    (tmp_path / "token").write_text("hf_file\n")
    assert sent_token(hub) == "hf_file"
    monkeypatch.setenv("HF_TOKEN", " hf_variable\n")
    assert sent_token(hub) == "hf_variable"
    assert sent_token(hub, token="hf_option") == "hf_option"
    assert sent_token(hub, token=False) is None
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert sent_token(hub) is None
    assert sent_token(hub, token="hf_option") == "hf_option"
    for wrong in (7, "hf_\nX: y", "hf_\u00e9"):
        with pytest.raises(SafetensorsError, match="token") as caught:
            store_of(hub.url, {"token": wrong})
        assert "hf_" not in str(caught.value)


def test_a_token_that_cannot_be_had(monkeypatch):
    def fail():
        raise OSError("SECRET")

    monkeypatch.setattr(hub_api, "get_token", fail)
    with pytest.raises(
        SafetensorsError, match=r"huggingface_hub cannot get the token of the Hub \(OSError\)"
    ) as caught:
        store_of("hf://owner/name", {})
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(StorageError, match=r"hf://owner/name: .* not installed: pip install huggingface_hub"):
        store_of("hf://owner/name", {})


def test_names_that_no_repository_can_have(hub, commit):
    with pytest.raises(StorageError, match="hf://owner/na--me: is not a name that a repository of the Hub can have"):
        store_of("hf://owner/na--me", {})
    assert hub.server.log == []


def test_endpoints(monkeypatch):
    assert hub_api.endpoint(None) == "https://huggingface.co"
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example.com/hf/")
    assert hub_api.endpoint(None) == "https://hub.example.com/hf"
    for wrong in ("hub.example.com", "ftp://x", "https://user:SECRET@host", "https://"):
        with pytest.raises(SafetensorsError, match="must be a URL like https://huggingface.co") as caught:
            hub_api.endpoint(wrong)
        assert "SECRET" not in str(caught.value)
