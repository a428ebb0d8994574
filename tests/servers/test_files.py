"""The server that all others are made with, and a directory over plain HTTP, as obstore sees them."""

import datetime
import http.client
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.support import hang
from tests.support.roots import ROOT

obstore = pytest.importorskip("obstore", reason="obstore is not installed")

from obstore.store import HTTPStore  # noqa: E402 - needs obstore

from tests.support.servers.faults import Answer, Call, Cut, Delay, IgnoreRange, SetHeader  # noqa: E402
from tests.support.servers.files import Files  # noqa: E402
from tests.support.servers.processes import serving  # noqa: E402
from tests.support.servers.server import Bytes, Response, Server  # noqa: E402

DATA = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8).tobytes()
SIZE = len(DATA)


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.bin").write_bytes(DATA)
    (tmp_path / "empty").write_bytes(b"")
    return tmp_path


@pytest.fixture
def server(root):
    with Server(Files(root)) as server:
        yield server


def store(server, retries=0, **options) -> HTTPStore:
    short = datetime.timedelta(milliseconds=1)
    return HTTPStore(
        server.url,
        client_options={"allow_http": True, **options},
        retry_config={"max_retries": retries, "backoff": {"init_backoff": short, "max_backoff": short, "base": 2}},
    )


def get(server, method="GET", path="/sub/a%20b.bin", **headers):
    """One request by the standard library: the status, the headers and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize(("start", "end"), [(0, 1), (5, 77), (len(DATA) - 3, len(DATA)), (0, len(DATA))])
def test_ranges(server, start, end):
    assert obstore.get_range(store(server), "sub/a b.bin", start=start, end=end) == DATA[start:end]
    (entry,) = server.log
    assert (entry.method, entry.path, entry.range) == ("GET", "/sub/a b.bin", (start, end))
    assert (entry.status, entry.sent, entry.process) == (206, end - start, os.getpid())


def test_whole_object(server):
    result = obstore.get(store(server), "sub/a b.bin")
    assert result.meta["size"] == len(DATA)
    assert result.bytes() == DATA
    assert server.sent(method="GET", status=200) == len(DATA)


def test_head(server, root):
    meta = obstore.head(store(server), "sub/a b.bin")
    assert meta["size"] == len(DATA)
    assert meta["last_modified"].timestamp() == int((root / "sub" / "a b.bin").stat().st_mtime)
    assert meta["e_tag"]
    assert [(entry.method, entry.sent) for entry in server.log] == [("HEAD", 0)]


@pytest.mark.parametrize(
    ("asked", "status", "content_range", "body"),
    [
        ("bytes=-3", 206, f"bytes {SIZE - 3}-{SIZE - 1}/{SIZE}", DATA[-3:]),
        ("bytes=10-12", 206, f"bytes 10-12/{SIZE}", DATA[10:13]),
        (f"bytes={SIZE - 2}-", 206, f"bytes {SIZE - 2}-{SIZE - 1}/{SIZE}", DATA[-2:]),
        (
            f"bytes={SIZE - 2}-{SIZE + 9}",
            206,
            f"bytes {SIZE - 2}-{SIZE - 1}/{SIZE}",
            DATA[-2:],
        ),
        (f"bytes={SIZE}-", 416, f"bytes */{SIZE}", b""),
        ("bytes=5-4", 200, None, DATA),
        ("bytes=0-1,4-5", 200, None, DATA),
    ],
)
def test_ranges_as_the_standard_has_them(server, asked, status, content_range, body):
    assert get(server, Range=asked)[::2] == (status, body)
    assert get(server, Range=asked)[1]["Content-Range"] == content_range


def test_conditions(server):
    etag = get(server, "HEAD")[1]["ETag"]
    assert get(server, If_Match=etag)[0] == 200
    assert get(server, If_Match='"other"')[0] == 412
    assert get(server, If_Match=f'"other", {etag}')[0] == 200
    assert get(server, If_None_Match=etag)[0] == 304
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.get(store(server), "sub/a b.bin", options={"if_match": '"other"'})


def test_what_is_not_served(server, root):
    (root.parent / "secret").write_text("")
    for path in ("/none", "/sub", "/../secret"):
        assert get(server, path=path)[0] == 404
    assert get(server, "PUT")[0] == 405
    with pytest.raises(FileNotFoundError):
        obstore.head(store(server), "none")
    assert get(server, path="/empty")[::2] == (200, b"")


def test_connections_are_kept(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.connect()
    ports = set()
    for _ in range(3):
        connection.request("GET", "/sub/a%20b.bin", headers={"Range": "bytes=0-9"})
        ports.add(connection.sock.getsockname())
        assert connection.getresponse().read() == DATA[:10]
    connection.close()
    assert len(ports) == 1


def test_a_delay_holds_up_nobody_else(server):
    held_up, go_on = threading.Event(), threading.Event()
    server.fail(Call(lambda: (held_up.set(), go_on.wait(hang.SECONDS))))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(obstore.get_range, store(server), "sub/a b.bin", start=0, end=1)
        assert held_up.wait(hang.SECONDS)
        assert obstore.get_range(store(server), "sub/a b.bin", start=1, end=32) == DATA[1:32]
        assert not first.done()
        go_on.set()
        assert first.result() == DATA[:1]


@pytest.mark.parametrize(
    "fault",
    [
        Answer(503),
        Answer(503, {"Retry-After": "0"}),
        Answer(429),
        Answer(500),
        Cut(None, "reset"),
        Cut(None, "close"),
        Cut(0, "reset"),
        Cut(1000, "reset"),
        Cut(1000, "close"),
    ],
    ids=str,
)
def test_faults_are_seen_and_pass(server, fault):
    rule = server.fail(fault, method="GET", path="*.bin", when=lambda request: request.range == (0, 5000), times=2)
    client = store(server)
    for _ in range(2):
        assert obstore.get_range(client, "sub/a b.bin", start=1, end=5000) == DATA[1:5000]
        with pytest.raises(obstore.exceptions.BaseError):
            obstore.get_range(client, "sub/a b.bin", start=0, end=5000)
    assert obstore.get_range(client, "sub/a b.bin", start=0, end=5000) == DATA[:5000]
    assert rule.hits == 2
    failed = [entry for entry in server.log if entry.range == (0, 5000)][:2]
    statuses = {Answer: getattr(fault, "status", None), Cut: 206 if getattr(fault, "after", None) is not None else None}
    assert [entry.status for entry in failed] == [statuses[type(fault)]] * 2
    assert [entry.sent for entry in failed] == [getattr(fault, "after", 0) or 0] * 2


def test_skipped_requests(server):
    server.fail(Answer(404), skip=1, times=1)
    assert [get(server)[0] for _ in range(3)] == [200, 404, 200]


def test_several_faults_of_one_request(server):
    called = []
    server.fail(Call(lambda: called.append(1)))
    server.fail(SetHeader("content-range", "bytes 1-2/3"))
    server.fail(Cut(2, "close"))
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/sub/a%20b.bin", headers={"Range": "bytes=0-9"})
    response = connection.getresponse()
    assert response.headers.get_all("Content-Range") == ["bytes 1-2/3"]
    with pytest.raises(http.client.IncompleteRead):
        response.read()
    connection.close()
    assert called == [1]


@pytest.mark.parametrize("fault", [IgnoreRange(), SetHeader("Content-Range", "bytes 7-16/5000000")], ids=str)
def test_a_wrong_range_is_refused_by_obstore(server, fault):
    server.fail(fault)
    with pytest.raises(obstore.exceptions.BaseError):
        obstore.get_range(store(server), "sub/a b.bin", start=1, end=11)


@pytest.mark.parametrize("after", [None, 0, 1000])
def test_a_stall_lasts_until_the_client_gives_up(server, after):
    server.fail(Cut(after, "stall"))
    with pytest.raises(obstore.exceptions.BaseError):
        obstore.get_range(store(server, read_timeout="200ms"), "sub/a b.bin", start=0, end=5000)
    assert [entry.sent for entry in server.log] == [after or 0]


def test_an_object_is_replaced_between_two_requests(server, root):
    other = root / "other"
    other.write_bytes(DATA[::-1])
    server.fail(Call(lambda: other.rename(root / "sub" / "a b.bin")), skip=1)
    client = store(server)
    first = obstore.get(client, "sub/a b.bin", options={"range": (0, 4)})
    assert first.bytes() == DATA[:4]
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.get(client, "sub/a b.bin", options={"range": (4, 8), "if_match": first.meta["e_tag"]})
    assert obstore.get_range(client, "sub/a b.bin", start=0, end=4) == DATA[::-1][:4]


def test_leaving_ends_what_waits(root):
    with ThreadPoolExecutor(2) as pool:
        with Server(Files(root)) as server:
            waiting = threading.Barrier(3, timeout=hang.SECONDS)
            server.fail(Call(waiting.wait), times=2)
            server.fail(Cut(None, "stall"))
            server.fail(Delay(1000), skip=1)
            reads = [pool.submit(get, server) for _ in range(2)]
            waiting.wait()
        assert all(isinstance(read.exception(), ConnectionError) for read in reads)
    assert not [thread for thread in threading.enumerate() if server.url in thread.name]


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_of_requests(chunked):
    with Server(lambda request: Response(200, body=Bytes(request.body))) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        pieces = [b"a" * 10, b"b" * 5000, b"c"]
        for _ in range(2):
            connection.request("PUT", "/x", iter(pieces) if chunked else b"".join(pieces), encode_chunked=chunked)
            assert connection.getresponse().read() == b"".join(pieces)
        connection.close()
        assert [(entry.received, entry.sent) for entry in server.log] == [(5011, 5011)] * 2


def test_a_client_may_ask_before_it_sends_a_body():
    with (
        Server(lambda request: Response(200, body=Bytes(request.body))) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
        connection.makefile("rb") as stream,
    ):
        connection.sendall(b"PUT / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
        assert stream.readline() + stream.readline() == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"data")
        assert stream.readline() == b"HTTP/1.1 200 OK\r\n"


def test_an_app_that_raises_is_not_forgotten():
    def app(request):
        raise KeyError(request.path)

    with pytest.raises(KeyError, match="/wrong"), Server(app) as server:
        assert get(server, path="/wrong")[0] == 500


def test_the_log_tells_processes_apart(server):
    read = f"import urllib.request as u; u.urlopen(u.Request({server.url!r} + '/sub/a%20b.bin', method='HEAD')).read()"
    others = [subprocess.Popen([sys.executable, "-S", "-c", read]) for _ in range(2)]
    get(server)
    assert [other.wait() for other in others] == [0, 0]
    assert sorted(e.process for e in server.log) == sorted([os.getpid(), *(other.pid for other in others)])
    assert server.sent(process=os.getpid()) == server.sent() == len(DATA)


def listens(port) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        pass  # It is ending.
    return True


def test_a_server_in_a_process_of_its_own(root):
    with serving(
        [sys.executable, "-m", "tests.support.servers.files", str(root), "--latency", "0.05"], "(http:.*)"
    ) as url:
        assert obstore.get_range(HTTPStore(url, client_options={"allow_http": True}), "sub/a b.bin", start=0, end=4)
    assert not listens(urlsplit(url).port)


def test_a_server_process_ends_with_a_test_that_is_killed(root):
    code = (
        "import os, signal, sys\nfrom tests.support.servers.processes import serving\n"
        f"with serving([sys.executable, '-m', 'tests.support.servers.files', {str(root)!r}], '(http:.*)') as url:\n"
        "    print(url, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=hang.SECONDS)
    port = urlsplit(said.stdout.strip()).port
    while listens(port):
        pass


def test_a_server_that_does_not_start_says_why():
    with (
        pytest.raises(RuntimeError, match=r"does not serve; it said:\nno memory"),
        serving([sys.executable, "-c", "print('no memory')"], "(http:.*)"),
    ):
        pass
