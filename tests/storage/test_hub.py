"""The Hub: what URLs name, what is asked of whom and with which credentials, what is pinned, and what is said."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.storage import remote, retries
from orbax_safetensors.storage.paths import HubPath
from orbax_safetensors.storage.schemes import store_of
from tests.support import hang
from tests.support.hub_files import AT, DATA, FILES
from tests.support.servers.faults import Answer, Call, Cut, SetHeader
from tests.support.servers.hub import TOKEN
from tests.support.store_contract import read

pytestmark = pytest.mark.usefixtures("nobody")

# What a message must not have: tokens, and the query of a link.
SECRETS = re.compile(rf"{TOKEN}|Signature|Expires=")


def asked(server):
    return [(one.method, one.path, one.range) for one in server.log]


URLS = [
    "hf://owner/name",
    "hf://owner/name/",
    "hf://owner/name/sub/model.safetensors",
    "hf://models/owner/name@v1/x",
    "hf://owner/name@v1.0/sub",
    "hf://owner/name@feature%2Fx/sub/deep",
    "hf://owner/name@refs/pr/12",
    "hf://owner/name@refs/pr/12/sub",
    "hf://owner/name@refs%2Fpr%2F12/sub",
    "hf://owner/name@refs/convert/parquet/sub",
    "hf://owner/name/file@1.safetensors",
    "hf://owner/na.me-x_1@" + 40 * "a",
]


def test_urls_name_what_they_name_to_others():
    parse = pytest.importorskip("huggingface_hub.utils._hf_uris", reason="huggingface_hub is not installed")
    for url in URLS:
        expected = parse.parse_hf_uri(url)
        found = HubPath.parse(url)
        assert (found.repository, found.path) == (expected.id, expected.path_in_repo)
        assert found.revision == (expected.revision or "main")


def test_repositories_without_owner():
    assert HubPath.parse("hf://gpt2") == HubPath("gpt2", "main", "")
    assert HubPath.parse("hf://gpt2@v1/sub/x") == HubPath("gpt2", "v1", "sub/x")


def test_urls_that_name_no_model():
    for url in [
        *("hf://", "hf:///x", "hf://owner/@main", "hf://owner/name@", "hf://models", "hf://a/../b", "hf://o/n/../x"),
        *("hf://o/n/a//x", "hf://o/n?x", "hf://@main", "hf://o/n@main/./x"),
        *("hf://datasets/owner/name", "hf://spaces/owner/name/x", "hf://buckets/a/b"),
    ]:
        with pytest.raises(StorageError, match=f"^{re.escape(url.partition('?')[0])}: expected .*hf://owner/name"):
            HubPath.parse(url)


def test_a_large_file_is_asked_for_once_and_read_from_the_network(hub, commit, opened):
    file = opened()
    assert file.path == f"hf://owner/name@{commit}/model.safetensors"
    assert file.stamp.nbytes == len(DATA)
    ranges = [(0, 10), (AT, 20), (AT + 100, 30), (AT + 9, 1000)]
    assert read(file, *ranges) == [DATA[offset : offset + nbytes] for offset, nbytes in ranges]
    head = (0, remote.HEAD_BYTES)
    assert asked(hub.server) == [
        ("GET", "/api/models/owner/name/revision/main", None),
        ("HEAD", f"/owner/name/resolve/{commit}/model.safetensors", None),
    ]
    assert {one.headers["Authorization"] for one in hub.server.log} == {f"Bearer {TOKEN}"}
    assert sorted(one.range for one in hub.network_server.log) == [head, *sorted((a, a + n) for a, n in ranges[1:])]
    assert hub.network_server.sent() == remote.HEAD_BYTES + 1050
    assert {one.headers["Authorization"] for one in hub.network_server.log} == {None}


def test_small_files_come_from_the_hub(hub, commit, opened):
    file = opened("config.json")
    assert (file.stamp.nbytes, read(file, (0, 8))) == (8, [FILES["config.json"]])
    assert [one.method for one in hub.server.log] == ["GET", "HEAD", "HEAD", "GET"]
    file = opened("long.json")
    assert read(file, (AT, 20), (3, 4)) == [DATA[AT : AT + 20], DATA[3:7]]
    file = opened("empty.json")
    assert (file.stamp.nbytes, read(file, (0, 0))) == (0, [b""])
    assert hub.network_server.log == []


def test_a_file_whose_state_is_known_is_opened_without_a_request(hub, commit):
    store, path = store_of(f"{hub.url}/model.safetensors", {})
    stamp = store.open(path).stamp
    hub.server.clear()
    hub.network_server.clear()
    file = store.open(path, stamp)
    assert read(file, (3, 5)) == [DATA[3:8]]
    assert (len(hub.server.log), len(hub.network_server.log)) == (0, 1)
    # In a process that has no link yet.
    other, _ = store_of(f"{hub.url}/model.safetensors", {})
    hub.server.clear()
    assert read(other.open(path, stamp), (3, 5), (AT, 5)) == [DATA[3:8], DATA[AT : AT + 5]]
    assert len(hub.server.log) == 1
    with pytest.raises(StorageError, match=r"changed while it was in use: expected 7 bytes .* found 1060921 bytes of"):
        read(store_of(path, {})[0].open(path, stamp._replace(nbytes=7)), (0, 5))


def test_directories(hub, commit):
    store, path = store_of(hub.url, {})
    hub.server.clear()
    assert path == f"hf://owner/name@{commit}"
    assert list(store.list(path)) == ["config.json", "empty.json", "long.json", "model.safetensors", "sub"]
    assert list(store.list(f"{path}/sub/")) == ["a b@1.safetensors", "deep"]
    assert store.list(f"{path}/sub/deep/x.txt") is None
    assert store.find(f"{path}/none") is None
    with pytest.raises(MissingError, match=f"^{path}/none: cannot be opened: there is no such file in the repository"):
        store.open(f"{path}/none")
    with pytest.raises(StorageError, match="is not below"):
        store.list("hf://owner/name/sub")
    with pytest.raises(StorageError, match=r"files can only be read from"):
        store.create(f"{path}/new", 10)
    assert hub.server.log == []
    assert read(store.open(f"{path}/sub/a b@1.safetensors"), (5, 6)) == [DATA[::-1][5:11]]


def test_revisions(hub, monkeypatch):
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    commits = {}
    for number, revision in enumerate(("main", "v1", "refs/pr/1", "feature/x")):
        commits[revision] = hub.commit({"a.safetensors": bytes([number])}, revision)
    for number, (written, revision) in enumerate(
        [("", "main"), ("@v1", "v1"), ("@refs%2Fpr%2F1", "refs/pr/1"), ("@feature%2Fx", "feature/x")]
    ):
        store, path = store_of(f"{hub.url}{written}/a.safetensors", {})
        assert path == f"{hub.url}@{commits[revision]}/a.safetensors"
        assert read(store.open(path), (0, 1)) == [bytes([number])]
        assert store_of(path, {})[1] == path
    assert store_of(f"{hub.url}@refs/pr/1", {})[1] == f"{hub.url}@{commits['refs/pr/1']}"


def test_headers_are_for_the_hub_and_nobody_else(hub, commit, opened):
    options = {"default_headers": {"X-Proxy": "secret"}}
    for name in ("model.safetensors", "config.json"):  # from the network, and from the Hub itself
        store, path = store_of(f"hf://owner/name/{name}", options)
        assert store.open(path).stamp.nbytes
    assert {one.headers["X-Proxy"] for one in hub.server.log} == {"secret"}
    assert {one.method for one in hub.server.log} == {"GET", "HEAD"}
    assert {one.headers["X-Proxy"] for one in hub.network_server.log} == {None}


def test_a_repository_that_was_renamed(hub, commit):
    moved = Answer(307, {"Location": "/api/models/owner/name/revision/main"})
    hub.server.fail(moved, path="/api/models/gpt2/*")
    store, path = store_of("hf://gpt2", {})
    assert path == f"hf://owner/name@{commit}"
    assert store.list(path)
    assert {one.headers["Authorization"] for one in hub.server.log} == {f"Bearer {TOKEN}"}


def test_a_link_that_has_expired_is_renewed_once_for_all(hub, commit, opened):
    file = opened()
    hub.server.clear()
    hub.network.expire()
    hub.network_server.clear()
    all_come = threading.Barrier(8, timeout=hang.SECONDS)  # so that all are refused before one is renewed
    hub.network_server.fail(Call(all_come.wait), times=8)
    ranges = [(AT + 1000 * number, 10) for number in range(8)]
    assert read(file, *ranges) == [DATA[offset : offset + 10] for offset, _ in ranges]
    assert [one.method for one in hub.server.log] == ["HEAD"]
    assert sorted(one.status for one in hub.network_server.log) == [206] * 8 + [403] * 8


@pytest.mark.parametrize("status", [400, 401])
def test_other_words_for_an_expired_link(hub, opened, status):
    file = opened()
    hub.network_server.fail(Answer(status))
    assert read(file, (AT, 10)) == [DATA[AT : AT + 10]]
    assert len(hub.server.log) == 3


def test_a_network_that_refuses_every_link(hub, commit, opened):
    file = opened()
    hub.server.clear()
    hub.network_server.fail(Answer(403), times=None)
    with pytest.raises(
        StorageError, match=f"reading 10 bytes at offset {AT} failed: the server answered 403"
    ) as caught:
        read(file, (AT, 10))
    assert len(hub.server.log) == 1
    assert not SECRETS.search(str(caught.value))


@pytest.mark.parametrize("fault", [Answer(429), Answer(503), Cut(None, "reset")], ids=str)
def test_faults_of_the_hub_that_pass(hub, opened, fault):
    """Of the question for the commit, for the place of a large file, and of a small file."""
    hub.server.fail(fault, path="/api/models/*", times=2)
    hub.server.fail(fault, path="*/resolve/*", times=2)
    assert read(opened(), (3, 4)) == [DATA[3:7]]
    hub.server.fail(fault, path="*/resolve/*", times=2)
    assert read(opened("config.json"), (3, 4)) == [FILES["config.json"][3:7]]


def test_answers_of_the_network_about_another_file(hub, opened):
    file = opened()
    hub.network_server.fail(SetHeader("Content-Range", f"bytes {AT}-{AT + 9}/77"), times=2)
    assert read(file, (AT, 10)) == [DATA[AT : AT + 10]]
    assert len(hub.server.log) == 2


def test_a_body_of_the_hub_that_breaks_off(hub, opened):
    hub.server.fail(Cut(5, "close"), path="/api/models/*", times=1)
    hub.server.fail(Cut(3, "reset"), path="*/resolve-cache/*", times=2)
    assert read(opened("config.json"), (3, 4)) == [FILES["config.json"][3:7]]


def test_links_are_renewed_in_spite_of_faults(hub, opened):
    file = opened()
    hub.network.expire()
    hub.server.fail(Answer(503), times=3)
    hub.network_server.fail(Answer(500), skip=1)
    assert read(file, (AT, 10)) == [DATA[AT : AT + 10]]


@pytest.mark.parametrize("headers", [{"Retry-After": "1"}, {"RateLimit": '"api";r=0;t=1'}], ids=str)
def test_who_has_asked_for_too_much_waits_as_long_as_the_hub_says(hub, opened, headers, monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(retries.asyncio, "sleep", sleep)
    hub.server.fail(Answer(429, headers), times=1)
    opened()
    assert len([seconds for seconds in pauses if seconds >= 1]) == 1
    hub.server.fail(Answer(429, {"RateLimit": '"resolvers";r=12;t=100'}), times=1)  # which is not why
    opened()


def test_a_wait_that_is_too_long(hub, opened):
    hub.server.fail(Answer(429, {"Retry-After": "3000", "X-Error-Message": "Too many"}), times=None)
    with pytest.raises(StorageError, match=r"the Hub answered 429 \(Too many\): it asks to wait for 3000 s$"):
        opened()
    assert len(hub.server.log) == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (SetHeader("X-Linked-Size", "77"), "the server sent of a file of 1060921 bytes instead"),
        (SetHeader("X-Linked-Size", None), "the Hub does not say how large the file is"),
        (SetHeader("X-Repo-Commit", "1" * 40), "the Hub gave the file as of commit 1111"),
        (SetHeader("Location", "ftp://host/x?Signature=1"), "the Hub gave a link that cannot be used|failed"),
    ],
    ids=str,
)
def test_answers_that_do_not_fit(hub, opened, fault, said):
    hub.server.fail(fault, path="*/resolve/*", times=None)
    with pytest.raises(StorageError, match=f"model.safetensors: .*({said})") as caught:
        opened(max_retries=2)
    assert not SECRETS.search(str(caught.value))


def test_a_repository_that_cannot_be_understood(hub, opened):
    wrong = [
        *(b"<html>", b"[]", b"{}", b'{"sha": 1, "siblings": []}', b'{"sha": "a", "siblings": [{}]}'),
        *(b'{"sha": "../a", "siblings": []}', b'{"sha": "a", "id": "a@b/c", "siblings": []}'),
    ]
    for body in wrong:
        hub.server.clear()
        hub.server.fail(Answer(200, {}, body), times=None)
        with pytest.raises(StorageError, match="the Hub's answer about the repository cannot be read"):
            opened()


@pytest.mark.parametrize(
    ("token", "status", "code", "message", "said"),
    [
        (
            False,
            401,
            "",
            "Invalid username or password.",
            r"there is no http://\S+/name, or it is private: then set HF_TOKEN",
        ),
        (None, 404, "RepoNotFound", "", "or it is private, and the owner of the token may not see it"),
        (False, 401, "GatedRepo", "Please log in.", r"ask for access at http://\S+/owner/name, and set HF_TOKEN"),
        (None, 403, "GatedRepo", "You are not in the list.", r"ask for access at http://\S+/owner/name$"),
        (
            "hf_other",
            401,
            "",
            "Invalid credentials in Authorization header",
            "the token is not valid; it is that of HF_T",
        ),
    ],
)
def test_who_may_not_read(hub, opened, token, status, code, message, said):
    refused = Answer(status, {"X-Error-Code": code, "X-Error-Message": message})
    for path in ("/api/models/*", "*/resolve/*"):
        hub.server.clear()
        hub.server.fail(refused, path=path, times=None)
        with pytest.raises(StorageError, match=rf"the Hub answered {status}.*: .*{said}") as caught:
            opened(token=token)
        assert not SECRETS.search(str(caught.value))
        assert "hf_other" not in str(caught.value)
        assert caught.value.__cause__ is caught.value.__context__ is None
        assert len(hub.server.log) <= 2  # nothing is tried again


def test_what_is_not_there(hub, commit):
    with pytest.raises(MissingError, match=r"hf://owner/none: asking the Hub failed: .* 404 RepoNotFound"):
        store_of("hf://owner/none", {})
    with pytest.raises(
        MissingError, match=r"hf://owner/name@v9: .*404 RevisionNotFound .*/owner/name has no revision 'v9'"
    ):
        store_of("hf://owner/name@v9", {})


def test_a_commit_that_is_gone_before_a_link_is_renewed(hub, commit, opened):
    file = opened()
    del hub.hub.repositories[hub.name].commits[commit]
    hub.network.expire()
    with pytest.raises(StorageError, match="404 RevisionNotFound"):
        read(file, (AT, 10))


def test_no_answer(commit, hub):
    with pytest.raises(
        StorageError,
        match=r"no usable answer of the Hub \(ConnectError\); no network\? .* HF_HUB_OFFLINE=1 .* \(2 attempts",
    ):
        store_of(hub.url, {"endpoint": "http://127.0.0.1:1", "max_retries": 1})


def test_what_the_hub_repeats_is_not_told(hub, opened):
    said = f"{TOKEN} at https://host/x?Signature=1\n{'long ' * 200}"
    hub.server.fail(Answer(400, {"X-Error-Message": said.replace("\n", " ")}), times=None)
    with pytest.raises(StorageError, match=r"400 \(\*\*\* at https://host/x\?\.\.\. long") as caught:
        opened()
    assert not SECRETS.search(str(caught.value))
    assert len(str(caught.value)) < 500


def test_credentials_do_not_follow_where_a_small_file_leads_to(hub, opened):
    file = opened("long.json", default_headers={"X-Auth-Token": "SECRET"})
    hub.server.fail(Answer(302, {"Location": f"{hub.network_server.url}/x"}), times=None)
    with pytest.raises(StorageError):
        read(file, (AT, 3))
    assert not hub.network_server.log


def test_redirects_without_end(hub, opened):
    hub.server.fail(Answer(307, {"Location": "/api/models/x"}), times=None)
    with pytest.raises(StorageError, match=r"no usable answer of the Hub \(TooManyRedirects\)"):
        opened(max_retries=0)


PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells have ignored in the background
from orbax_safetensors.storage.schemes import store_of
store, path = store_of(sys.argv[1], {})
print("found", flush=True)
store.open(path)
"""


@pytest.mark.process
def test_a_program_is_interrupted_while_the_hub_stalls(hub, commit):
    stalled = threading.Event()
    hub.server.fail(Call(stalled.set), path="*/resolve/*", times=None)
    hub.server.fail(Cut(None, "stall"), path="*/resolve/*", times=None)
    program = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, f"{hub.url}/model.safetensors"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert program.stdout.readline() == b"found\n"
    assert stalled.wait(hang.SECONDS)
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=hang.SECONDS)
    assert program.returncode
    assert errors.rstrip().endswith(b"KeyboardInterrupt")
