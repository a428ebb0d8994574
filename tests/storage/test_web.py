"""HTTP servers that need secrets and redirect: which server gets which request, and which gets the secrets.

What becomes of faults is in `test_contract.py`.
"""

import os
from datetime import timedelta
from urllib.request import OpenerDirector

import pytest

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage import links, remote
from orbax_safetensors.storage.schemes import store_of
from tests.support.servers.faults import Answer, SetHeader
from tests.support.servers.files import Files
from tests.support.servers.server import Server

DATA = bytes(os.urandom(2**20 + 12345))
AT = remote.HEAD_BYTES + 1000
HEADERS = {"X-Auth-Token": "SECRET", "Private-Token": "SECRET", "Authorization": "Bearer SECRET", "Cookie": "a=SECRET"}


pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def origin(web):
    """A server of its own."""
    (web.root / "d").mkdir()
    (web.root / "d" / "a b.safetensors").write_bytes(DATA)
    (web.root / "empty").touch()
    return web.server


@pytest.fixture
def elsewhere(tmp_path):
    """Another server on this host, at another port."""
    (tmp_path / "other").write_bytes(DATA)
    with Server(Files(tmp_path)) as server:
        yield server


def opened(origin, path="d/a%20b.safetensors", user="", **options):
    store, path = store_of(f"{origin.url.replace('://', f'://{user}')}/{path}", options)
    return store.open(path)


def read(file, *ranges):
    buffers = [bytearray(nbytes) for _, nbytes in ranges]
    file.read((offset, [memoryview(buffer)]) for (offset, _), buffer in zip(ranges, buffers, strict=True))
    assert [bytes(buffer) for buffer in buffers] == [DATA[offset : offset + nbytes] for offset, nbytes in ranges]


def told(server):
    """What of requests may be secret: their queries, and their headers."""
    return str([(one.query, one.headers.items()) for one in server.log])


def test_a_server_is_a_scheme_a_host_and_a_port():
    urls = ("http://a/x", "http://b/x", "https://a/x", "http://a:81/x")
    assert len({links.origin(url) for url in urls}) == len(urls)
    assert links.origin("http://a/x") == links.origin("http://A:80/y?z")


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("d/a%20b.safetensors", {"default_headers": HEADERS}),
        ("d/a%20b.safetensors?private_token=SECRET", {}),  # which a Referer has
        ("d/a%20b.safetensors", {"user": "name:SECRET@"}),
    ],
    ids=["headers", "query", "user"],
)
def test_secrets_do_not_follow_to_another_server(origin, elsewhere, path, options):
    origin.fail(Answer(302, {"Location": f"{elsewhere.url}/other?Signature=LINK"}), times=None)
    file = opened(origin, path, **options)
    assert file.path == f"{origin.url}/d/a b.safetensors"
    read(file, (0, 10), (AT, 20), (AT + 100, 30))
    assert len(origin.log) == 1
    for name, value in options.get("default_headers", {}).items():
        assert origin.log[0].headers[name] == value
    assert "SECRET" in told(origin) or "Basic" in told(origin)
    assert len(elsewhere.log) == 3
    assert {one.query["Signature"] for one in elsewhere.log} == {"LINK"}
    assert not any(secret in told(elsewhere) for secret in ("SECRET", "Basic", "Cookie", "Referer", "token"))


def test_secrets_follow_within_a_server(origin):
    origin.fail(Answer(307, {"Location": "/d/a%20b.safetensors"}), path="/old", times=None)
    read(opened(origin, "old", default_headers=HEADERS), (0, 10), (AT, 20))
    assert [one.path for one in origin.log] == ["/old", *["/d/a b.safetensors"] * 3]
    assert all(one.headers[name] == value for one in origin.log for name, value in HEADERS.items())


def test_a_server_that_leads_nowhere_has_one_request_more(origin):
    file = opened(origin, default_headers=HEADERS)
    read(file, (0, 10), (AT, 20), (AT + 100, 30))
    assert [one.range for one in origin.log[:2]] == [None, (0, remote.HEAD_BYTES)]
    assert len(origin.log) == 4
    assert opened(origin, "empty", default_headers=HEADERS).stamp.nbytes == 0


@pytest.mark.parametrize("options", [{}, {"default_headers": {}}], ids=["none", "empty"])
def test_a_server_without_secrets_is_read_by_obstore_alone(origin, monkeypatch, options):
    monkeypatch.setattr(OpenerDirector, "open", lambda *_, **__: pytest.fail("a request of ours"))
    read(opened(origin, **options), (AT, 20), (AT + 100, 30))
    ranges = sorted(one.range for one in origin.log)
    assert ranges == [(0, remote.HEAD_BYTES), (AT, AT + 20), (AT + 100, AT + 130)]


def test_a_link_that_expires(origin, elsewhere):
    origin.fail(Answer(302, {"Location": f"{elsewhere.url}/other?Signature=1"}), times=None)
    file = opened(origin, default_headers=HEADERS)
    elsewhere.fail(Answer(403))
    read(file, (AT, 20))
    assert (len(origin.log), [one.status for one in elsewhere.log]) == (2, [206, 403, 206])
    assert "SECRET" not in told(elsewhere)


SECRETS = {"default_headers": HEADERS, "path": "d/a%20b.safetensors?private_token=SECRET"}


def test_secrets_do_not_follow_when_a_file_moves_between_two_reads(web, origin, elsewhere, tmp_path):
    stored = (tmp_path / "other").stat()
    for file in (web.root / "d" / "a b.safetensors", tmp_path / "other"):  # one state of one file
        os.utime(file, ns=(stored.st_mtime_ns, stored.st_mtime_ns))
    file = opened(origin, **SECRETS)
    origin.fail(Answer(302, {"Location": f"{elsewhere.url}/other?Signature=LINK"}), times=None)
    read(file, (AT, 20), (AT + 100, 30))
    assert sorted(one.range for one in elsewhere.log) == [(AT, AT + 20), (AT + 100, AT + 130)]
    assert not any(secret in told(elsewhere) for secret in ("SECRET", "Cookie", "Referer", "token"))


def test_another_file_elsewhere_is_a_change(origin, elsewhere):
    file = opened(origin, **SECRETS)
    origin.fail(Answer(307, {"Location": f"{elsewhere.url}/other"}), times=None)
    with pytest.raises(StorageError, match="changed while it was in use"):
        read(file, (AT, 20))
    assert "SECRET" not in told(elsewhere)


def test_a_server_that_redirects_ranges_only_is_refused(origin, elsewhere):
    origin.fail(Answer(302, {"Location": f"{elsewhere.url}/other"}), times=None, when=lambda one: one.range)
    with pytest.raises(StorageError, match="the server leads elsewhere with the ranges of a file, but not with"):
        opened(origin, **SECRETS)
    assert not elsewhere.log


def test_secrets_follow_within_a_server_between_two_reads(origin):
    file = opened(origin, **SECRETS)
    origin.fail(Answer(308, {"Location": "/d/a%20b.safetensors"}), skip=1)
    read(file, (AT, 20), (AT + 100, 30))
    assert all(one.headers[name] == value for one in origin.log for name, value in HEADERS.items())


def test_an_answer_without_the_size_of_the_file(origin):
    file = opened(origin, **SECRETS, max_retries=3)
    origin.fail(SetHeader("Content-Range", "bytes 0-8/*"), times=None)
    with pytest.raises(StorageError, match="failed: the server does not say which bytes of the file it sent"):
        read(file, (AT, 20))


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 30),
        ({"timeout": "12 s"}, 12),
        ({"timeout": timedelta(seconds=12)}, 12),
        ({"timeout": "1min 30s", "read_timeout": "1000ms"}, 1),
        ({"retry_timeout": 12}, 12),
        ({"retry_timeout": 0}, 30),
        ({"read_timeout": "2 days", "timeout": "1 week", "retry_timeout": 3600}, 3600),
    ],
    ids=str,
)
def test_the_look_up_has_the_time_that_options_give(origin, monkeypatch, options, seconds):
    opening, waited = OpenerDirector.open, []

    def recorded(self, request, timeout):
        waited.append(timeout)
        return opening(self, request, timeout=timeout)

    monkeypatch.setattr(OpenerDirector, "open", recorded)
    opened(origin, default_headers=HEADERS, **options)
    assert set(waited) == {seconds}


def test_a_fault_is_not_taken_for_the_file(origin, elsewhere):
    origin.fail(Answer(302, {"Location": f"{elsewhere.url}/other"}), times=None)
    origin.fail(Answer(503), times=2)
    origin._rules.reverse()  # the fault first
    read(opened(origin, default_headers=HEADERS), (AT, 20))
    assert [one.status for one in origin.log] == [503, 503, 302]
    assert "SECRET" not in told(elsewhere)


def test_what_is_not_there(origin, elsewhere):
    store, path = store_of(f"{origin.url}/none", {"default_headers": HEADERS})
    assert store.find(path) is None
    origin.fail(Answer(302, {"Location": f"{elsewhere.url}/none"}), times=None)
    assert store.find(path) is None
    assert "SECRET" not in told(elsewhere)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            Answer(403, {}, b"<Error><Code>AccessDenied</Code>"),
            r"the server answered 403 \(AccessDenied\): it takes",
        ),
        (Answer(302, {"Location": "/d"}), "the server redirected us 5 times"),
        (Answer(302, {"Location": "http://[x?SECRET"}), "the server gave a link that cannot be used"),
        (Answer(302, {"Location": "http://x:y/?SECRET"}), "the server gave a link that cannot be used"),
        (Answer(302, {"Location": "ftp://127.0.0.1:1/?SECRET"}), "the server gave a link that cannot be used"),
        (Answer(302), "the server answered 302"),
    ],
    ids=str,
)
def test_answers_that_are_of_no_use(origin, answer, said):
    origin.fail(answer, times=None)
    with pytest.raises(StorageError, match=f"b.safetensors: opening failed: {said}") as caught:
        opened(origin, default_headers=HEADERS, max_retries=3)
    assert "SECRET" not in str(caught.value)
