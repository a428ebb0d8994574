"""Secrets that no failure tells: neither its message nor whatever can be reached from it."""

import contextlib
import io
from urllib.parse import urlsplit

import numpy as np
import pytest
from fsspec import AbstractFileSystem, register_implementation

import orbax_safetensors as ost
from orbax_safetensors.cli.main import main
from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.storage import retries
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Stamp
from tests.support.servers.faults import Answer
from tests.support.servers.server import Response, Server
from tests.support.told_secrets import SECRET, assert_tells_no_secret

pytestmark = pytest.mark.usefixtures("soon")


PLACES = {
    "https": lambda url: (f"{url.replace('://', '://user:SECRET@')}/x?X-Amz-Signature=SECRET", {}),
    "s3": lambda url: (
        "s3://bucket/x",
        {"endpoint": url, "access_key_id": "SECRET-id", "secret_access_key": "SECRET", "session_token": "SECRET-token"},
    ),
    "gs": lambda url: ("gs://bucket/x", {"base_url": url, "bearer_token": "SECRET"}),
    "az": lambda url: ("az://c/x", {"endpoint": f"{url}/a", "account_name": "a", "sas_key": "sv=1&sig=SECRET"}),
}


# What a server repeats, and where it leads to.
ANSWERS = [
    *(
        Answer(status, {}, b"<Error><Code>Denied</Code><StringToSign>SECRET")
        for status in (401, 403, 404, 409, 412, 500)
    ),
    *(
        Answer(302, {"Location": url})
        for url in ("http://[x?Signature=SECRET", "http://127.0.0.1:1/?Signature=SECRET", "ftp://127.0.0.1/?SECRET")
    ),
]
STAMP = Stamp(100, '"1"')


def tell_no_secret(*acts):
    """Return how many of `acts` fail."""
    failed = 0
    for act in acts:
        try:
            act()
        except StorageError as error:
            failed += 1
            assert_tells_no_secret(error)
    return failed


def read(store, path, stamp=STAMP):
    store.open(path, stamp).read([(stamp.nbytes - 9, [memoryview(bytearray(9))])])


@pytest.mark.server
@pytest.mark.parametrize("scheme", PLACES)
def test_whatever_a_server_answers(scheme, caplog):
    with Server(lambda request: Response(404)) as server:
        url, options = PLACES[scheme](server.url)
        store, path = store_of(url, {**options, "max_retries": 1, "default_headers": {"X-Auth-Token": "SECRET"}})
        for answer in ANSWERS:
            server.clear()
            server.fail(answer, times=None)
            assert tell_no_secret(lambda: store.open(path), lambda: read(store, path)) == 2
            if store.writes:
                new = store.create(path, 1)
                failed = tell_no_secret(
                    lambda: store.list(path),
                    lambda: store.below(path),
                    lambda: store.delete(path, ["x"]),
                    lambda new=new: new.write(0, [memoryview(b"x")]),
                )
                assert failed
    assert tell_no_secret(lambda: store.open(path)) == 1  # nobody listens any more
    assert "trying again" in caplog.text
    assert not SECRET.search(caplog.text)


@pytest.mark.parametrize("place", ["/api/models/*", "*/resolve/*", "/repos/*"])
def test_whatever_the_hub_answers(hub, monkeypatch, place, caplog):
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    hub.commit({"x": b"small", "model.safetensors": bytes(10**6)})
    options = {"max_retries": 1, "default_headers": {"X-Auth-Token": "SECRET"}}
    store, path = store_of(f"{hub.url}/model.safetensors", options)
    stamp = store.open(path).stamp
    for answer in ANSWERS:
        for server in (hub.server, hub.network_server):
            server.clear()
            server.fail(answer, path=place, times=None)
        hub.network.expire()
        assert tell_no_secret(
            lambda: store_of(f"{hub.url}/model.safetensors", options),
            lambda: store.open(path),
            lambda: store.open(path.replace("model.safetensors", "x")),
            lambda: read(store, path, stamp),
        )
    assert "trying again" in caplog.text
    assert not SECRET.search(caplog.text)


OPTIONS = [
    *({"default_headers": {"X-Auth-Token": value}} for value in ("SECRET\n", "SECRET\xe9", b"SECRET\0", 7, None)),
    *({"default_headers": {name: "SECRET"}} for name in ("X SECRET", "X: SECRET", "", "X\n", 7)),
    *({"default_headers": "SECRET"}, {"user_agent": "SECRET\n"}),
    *({"proxy_url": "SECRET@[x"}, {"proxy_url": "http://SECRET:SECRET"}),
]


@pytest.mark.parametrize("scheme", [*PLACES, "hf"])
def test_wrong_options(scheme):
    url, more = PLACES[scheme]("http://127.0.0.1:1") if scheme != "hf" else ("hf://owner/name", {"token": "SECRET"})
    for options in OPTIONS:
        with pytest.raises(SafetensorsError) as caught:
            made = ost.SafetensorsOptions(storage_options={**more, "max_retries": 0, **options})
            assert "proxy_url" in options  # nobody else knows what it may be
            ost.open_checkpoint(url, options=made)
        assert_tells_no_secret(caught.value)


def test_urls_that_are_none():
    for url in [
        "nowhere://user:SECRET@host/x?SECRET",
        "ftp://user:SECRET@127.0.0.1:1/x?SECRET",
        "https:/user:SECRET@host/x?SECRET",
        "https://[x?SECRET",
        "https://user:a/SECRET@host/x",
        "https://user:a?SECRET@host/x",
        "ftp://user:a/SECRET@127.0.0.1:1/x",
    ]:
        with pytest.raises(StorageError) as caught:
            ost.open_checkpoint(url)
        assert_tells_no_secret(caught.value)


TREE = {"a": np.arange(6)}
ENTRIES = {
    "open": lambda url, path: ost.open_checkpoint(url),
    "load": lambda url, path: ost.load(url),
    "restore": lambda url, path: ost.SafetensorsCheckpointer().restore(url),
    "verify": lambda url, path: ost.verify(url),
    "plan": lambda url, path: ost.plan_restore(url, TREE),
    "save": lambda url, path: ost.save(url, TREE),
    "save with config": lambda url, path: ost.save(path / "new", TREE, config=url),
    "convert from": lambda url, path: ost.convert(url, path / "new", to="orbax"),
    "convert to": lambda url, path: ost.convert(path / "model", url, to="orbax"),
    "reshard to": lambda url, path: ost.reshard(path / "model", url),
    "link": lambda url, path: ost.link(url),
    "link to": lambda url, path: ost.link(path / "model", url),
    "delta": lambda url, path: ost.delta(path / "model", path / "model", url, version=1),
    "apply to": lambda url, path: ost.apply_delta(path / "model", path / "model", url),
    "command": lambda url, path: command("inspect", url),
    "diff": lambda url, path: command("diff", url, str(path / "model")),
}


@pytest.fixture
def failing():
    """A file system of fsspec that repeats all that it is told."""

    class Failing(AbstractFileSystem):
        protocol = "failing"
        cachable = False

        def __init__(self, **options):
            raise ConnectionError(f"no host for {options}")

        @staticmethod
        def _get_kwargs_from_urls(url):
            return {"url": url, "user": urlsplit(url).netloc.rpartition("@")[0]} if "@" in url else {}

    register_implementation("failing", Failing, clobber=True)


def command(*words):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        main(words)
    raise StorageError(output.getvalue())


@pytest.mark.parametrize(
    "url",
    [
        *(f"{scheme}://user:SECRET@name/x" for scheme in ("s3", "gs", "az", "abfss", "hf")),
        "s3://SECRET@bucket/x",
        "s3://key:a/SECRET@bucket/x",
        "az://container/x?sv=1&sig=SECRET",
        "abfss://container@account.dfs.core.windows.net/x?sig=SECRET",
        "gs://bucket/x?X-Goog-Signature=SECRET",
        "hf://owner/name/file?token=SECRET",
        "https://user:SECRET@127.0.0.1:1/x?Signature=SECRET#SECRET",
        "https://SECRET@127.0.0.1:1/x.safetensors",
        "failing://user:SECRET@host/x",
    ],
)
def test_no_entry_tells_a_secret_in_a_url(url, tmp_path, caplog, failing, monkeypatch):
    monkeypatch.setattr(retries.random, "uniform", lambda *_: 0.0)  # retry at once
    ost.save(tmp_path / "model", TREE, index=False)
    for enter in ENTRIES.values():
        with pytest.raises(SafetensorsError) as caught:
            enter(url, tmp_path)
        assert_tells_no_secret(caught.value)
        if enter is not ENTRIES["apply to"] and url.partition("://")[0] not in ("https", "failing"):
            assert f"credentials are not taken from a URL of {url.partition(':')[0]}://" in str(caught.value)
    assert not SECRET.search(caplog.text)


def test_what_a_client_says_is_told_without_secret_options(failing):
    for name in ["password", "ROOT_PASSWORD"]:
        options = ost.SafetensorsOptions(storage_options={name: "SECRET"})
        with pytest.raises(StorageError, match=f"no host for {{'{name}': '[*]{{3}}'}}") as caught:
            ost.open_checkpoint("failing://host/x", options=options)
        assert_tells_no_secret(caught.value)
        with pytest.raises(SafetensorsError, match="secret_access_key has a character that no header has") as caught:
            options = ost.SafetensorsOptions(storage_options={"secret_access_key": "SECRET\n"})
            ost.open_checkpoint("s3://bucket/x", options=options)
        assert_tells_no_secret(caught.value)


@pytest.mark.parametrize(
    "call", [ost.open_checkpoint, ost.SafetensorsHandler().restore, ost.SafetensorsCheckpointer().restore]
)
def test_what_is_called(call, web):
    (web.root / "model.safetensors").write_bytes(b"x" * 100)
    for file in ("model.safetensors", "none"):
        with pytest.raises(SafetensorsError) as caught:
            call(f"{web.url.replace('://', '://user:SECRET@')}/{file}?Signature=SECRET")
        assert_tells_no_secret(caught.value)
