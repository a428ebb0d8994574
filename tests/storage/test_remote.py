"""Objects over HTTP: which requests are made, which answers are accepted, and what the errors say.

What all stores have in common, and what becomes of each fault, is in `test_contract.py`.
"""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.storage import remote
from orbax_safetensors.storage.schemes import store_of
from tests.support import hang
from tests.support.servers.faults import Answer, Call, Cut, SetHeader
from tests.support.servers.files import Files
from tests.support.servers.server import Server
from tests.support.store_contract import read
from tests.support.told_secrets import assert_tells_no_secret

DATA = bytes(os.urandom(2**20 + 12345))


pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def server(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.bin").write_bytes(DATA)
    (tmp_path / "short").write_bytes(DATA[:100])
    (tmp_path / "empty").touch()
    with Server(Files(tmp_path)) as server:
        yield server


def opened(server, name="sub/a%20b.bin", **options):
    store, path = store_of(f"{server.url}/{name}", options)
    return store.open(path)


def test_the_first_bytes_come_with_opening(server):
    file = opened(server)
    assert file.path == f"{server.url}/sub/a b.bin"
    assert file.stamp.nbytes == len(DATA)
    assert read(file, (0, 8), (8, 3000)) == [DATA[:8], DATA[8:3008]]
    assert [(one.method, one.range) for one in server.log] == [("GET", (0, remote.HEAD_BYTES))]
    short = opened(server, "short")
    assert (short.stamp.nbytes, read(short, (90, 10))) == (100, [DATA[90:100]])
    assert len(server.log) == 2


def test_each_range_is_one_request_and_fills_its_buffers(server):
    file = opened(server)
    server.clear()
    at = remote.HEAD_BYTES
    buffers = [bytearray(5), bytearray(0), bytearray(7)]
    file.read([(at, [memoryview(buffer) for buffer in buffers]), (at + 100, [memoryview(bytearray(3))])])
    assert b"".join(buffers) == DATA[at : at + 12]
    assert sorted(one.range for one in server.log) == [(at, at + 12), (at + 100, at + 103)]
    assert {one.headers["If-Match"] for one in server.log} == {file.stamp.version}


def test_an_answer_is_a_range_in_memory_that_is_there(server):
    file = opened(server)
    server.clear()
    assert file.fetch(10, 90) == DATA[10:100]
    assert server.log == []
    assert file.fetch(remote.HEAD_BYTES - 1, 5) == DATA[remote.HEAD_BYTES - 1 : remote.HEAD_BYTES + 4]
    assert [one.range for one in server.log] == [(remote.HEAD_BYTES - 1, remote.HEAD_BYTES + 4)]
    with pytest.raises(
        StorageError, match=f"expected 2 bytes at offset {len(DATA) - 1}, found the file's end at {len(DATA)}"
    ):
        file.fetch(len(DATA) - 1, 2)
    file.cancel()
    with pytest.raises(StorageError, match="cancelled"):
        file.fetch(600000, 10)


def test_short_ranges_are_asked_for_at_once(server):
    file = opened(server)
    all_come = threading.Barrier(16, timeout=hang.SECONDS)
    server.fail(Call(all_come.wait), times=None)
    ranges = [(remote.HEAD_BYTES + 1000 * number, 10) for number in range(16)]
    assert read(file, *ranges) == [DATA[offset : offset + 10] for offset, _ in ranges]


def test_what_is_in_flight_is_bounded(server, monkeypatch):
    store, path = store_of(f"{server.url}/sub/a%20b.bin", {})
    store.cost = replace(remote.COST, requests=4, max_request_bytes=1000)
    file = store.open(path)
    waiting, most = set(), []

    def start(request):
        future = real(request)
        waiting.add(future)
        future.add_done_callback(waiting.discard)
        most.append(len(waiting))
        return future

    real = file._requests.start
    monkeypatch.setattr(file._requests, "start", start)
    ranges = [(remote.HEAD_BYTES + 500 * number, 500) for number in range(20)]
    assert b"".join(read(file, *ranges)) == DATA[remote.HEAD_BYTES : remote.HEAD_BYTES + 10000]
    assert max(most) <= 2


@pytest.mark.server
def test_short_ranges_of_many_reads_are_not_all_asked_for_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_more", asyncio.Semaphore(3))
    (tmp_path / "file").write_bytes(DATA)
    app, changed, reading, waiting, most = Files(tmp_path), threading.Condition(), threading.Event(), set(), []

    def watched(request):
        with changed:
            waiting.add(id(request))
            most.append(len(waiting))
            changed.notify_all()
            if reading.is_set():  # however long the machine takes to bring so many
                changed.wait_for(lambda: max(most) > 4, hang.SECONDS)
        with changed:
            waiting.remove(id(request))
        return app(request)

    with Server(watched) as server:
        file = opened(server, "file")
        reading.set()
        starts = [remote.HEAD_BYTES + 50_000 * number for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda start: read(file, *((start + 1000 * at, 10) for at in range(16))), starts)
            for start, parts in zip(starts, found, strict=True):
                assert parts == [DATA[start + 1000 * at :][:10] for at in range(16)]
    assert 4 < max(most) <= 4 + 3


def test_a_known_state_takes_no_request(server):
    store, path = store_of(f"{server.url}/short", {})
    stamp = store.open(path).stamp
    server.clear()
    store.open(path, stamp).check(stamp)
    assert server.log == []


def test_what_is_not_there_is_asked_for_once(server):
    store, path = store_of(f"{server.url}/missing", {})
    assert store.find(path) is None
    assert len(server.log) == 1


def test_a_refusal_is_told_once_without_its_secrets(server):
    file = opened(server)
    server.clear()
    server.fail(Answer(400, {}, b"<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>SECRET"), times=None)
    with pytest.raises(StorageError, match=r"/sub/a b.bin: reading 10 bytes at offset 600000 failed: .*400") as caught:
        read(file, (600000, 10))
    assert "SignatureDoesNotMatch" in str(caught.value)
    assert_tells_no_secret(caught.value)
    assert len(server.log) == 1
    with pytest.raises(StorageError, match=r"opening failed: .*400"):
        opened(server)


def test_nobody_listens():
    store, path = store_of("http://127.0.0.1:1/x", {"max_retries": 1})
    with pytest.raises(StorageError, match=r"127.0.0.1:1/x: opening failed: no connection \(ConnectionRefused\)"):
        store.open(path)


@pytest.mark.parametrize("pinned", ["by the server", "by us", "by its date"])
def test_an_object_that_changes_is_noticed(server, tmp_path, pinned):
    if pinned == "by us":  # a server that heeds no conditions
        server.fail(SetHeader("ETag", '"1"'), times=1)
        server.fail(SetHeader("ETag", '"2"'), skip=1, times=None)
    if pinned == "by its date":
        server.fail(SetHeader("ETag", None), times=None)
    file = opened(server)
    if pinned == "by its date":
        assert file.stamp.version.startswith("modified 20")
    assert pinned == "by us" or read(file, (600000, 10)) == [DATA[600000:600010]]

    def change():
        other = tmp_path / "other"
        other.write_bytes(bytes(len(DATA)))
        os.utime(other, (0, 1234567890))
        os.replace(other, tmp_path / "sub" / "a b.bin")

    server.fail(Call(change))
    with pytest.raises(StorageError, match=r"/sub/a b.bin: changed while it was in use: expected 1060921 bytes"):
        read(file, (600000, 10))


def test_cancelled_reads_end(server):
    file, asked = opened(server), threading.Event()
    server.fail(Call(asked.set), times=None)
    server.fail(Cut(None, "stall"), times=None)
    failed = []

    def work():
        try:
            read(file, (600000, 10), (700000, 10))
        except StorageError as error:
            failed.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert asked.wait(hang.SECONDS)
    file.cancel()
    thread.join(hang.SECONDS)
    assert failed == [f"{server.url}/sub/a b.bin: reading was cancelled"]
    with pytest.raises(StorageError, match="cancelled"):
        read(file, (600000, 10))


def test_secrets_are_sent_and_not_told(server):
    url = server.url.replace("http://", "http://user:PASSWORD@")
    store, path = store_of(f"{url}/short?Signature=SECRET", {"max_retries": 0})
    file = store.open(path)
    assert server.log[0].query == {"Signature": "SECRET"}
    assert server.log[0].headers["Authorization"] == "Basic dXNlcjpQQVNTV09SRA=="
    server.fail(Answer(500), times=None)
    for failing in (lambda: store.open(path), lambda: read(store.open(path, file.stamp), (0, 1))):
        with pytest.raises(StorageError) as caught:
            failing()
        assert str(caught.value).startswith(f"{server.url}/short: ")
        assert "SECRET" not in str(caught.value)
        assert "PASSWORD" not in str(caught.value)


def test_headers_that_go_with_every_request(server):
    headers = {"Authorization": "Bearer x", "X-Team": "models"}
    store, path = store_of(f"{server.url}/sub/a%20b.bin?a=b", {"default_headers": headers})
    file = store.open(path)
    assert file.path == f"{server.url}/sub/a b.bin"
    assert read(file, (600000, 10)) == [DATA[600000:600010]]
    for one in server.log:
        assert (one.path, one.query) == ("/sub/a b.bin", {"a": "b"})
        assert {name: one.headers[name] for name in headers} == headers
    with pytest.raises(StorageError, match="is not below"):
        store.open("http://127.0.0.1:1/short")


def test_options_that_no_store_has(server):
    with pytest.raises(SafetensorsError, match="'access_key_id' are not for HTTP servers"):
        store_of(server.url, {"access_key_id": "x"})
    with pytest.raises(SafetensorsError, match="s3://bucket: cannot be used with these .*: .*acess_key_id"):
        store_of("s3://bucket/x", {"acess_key_id": "SECRET"})
    for wrong in ({"max_retries": -1}, {"retry_timeout": "soon"}):
        with pytest.raises(SafetensorsError, match="must be a number of retries"):
            store_of(server.url, wrong)
    with pytest.raises(StorageError, match="expected the name of a bucket"):
        store_of("s3:///x", {})
