"""The server that all others are made with, the directory that it serves, and servers in processes of their own."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.support import hang
from tests.support.roots import ROOT
from tests.support.servers.faults import Answer, Call, Cut, SetHeader
from tests.support.servers.files import Files
from tests.support.servers.processes import serving
from tests.support.servers.server import Response, Server

DATA = os.urandom(5000)


@pytest.fixture
def server(web):
    (web.root / "sub").mkdir()
    (web.root / "sub" / "a b.bin").write_bytes(DATA)
    return web.server


def get(server, method="GET", path="/sub/a%20b.bin", **headers):
    """One request by the standard library: the status, the headers and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def test_ranges_as_the_standard_has_them(server):
    for asked, status, content_range, body in (
        ("bytes=-3", 206, "bytes 4997-4999/5000", DATA[-3:]),
        ("bytes=10-12", 206, "bytes 10-12/5000", DATA[10:13]),
        ("bytes=4998-", 206, "bytes 4998-4999/5000", DATA[-2:]),
        ("bytes=4998-5009", 206, "bytes 4998-4999/5000", DATA[-2:]),
        ("bytes=5000-", 416, "bytes */5000", b""),
        ("bytes=5-4", 200, None, DATA),
        ("bytes=0-1,4-5", 200, None, DATA),
    ):
        found = get(server, Range=asked)
        assert (found[0], found[1]["Content-Range"], found[2]) == (status, content_range, body)


def test_conditions(server):
    etag = get(server, "HEAD")[1]["ETag"]
    assert get(server, If_Match=f'"other", {etag}')[0] == 200
    assert get(server, If_Match='"other"')[0] == 412
    assert get(server, If_None_Match=etag)[0] == 304


def test_what_is_not_served(server, web):
    (web.root.parent / "secret").write_text("")
    for path in ("/none", "/sub", "/../secret"):
        assert get(server, path=path)[0] == 404
    assert get(server, "PUT")[0] == 405


def test_several_faults_of_one_request(server):
    called = []
    server.fail(Call(lambda: called.append(1)))
    server.fail(SetHeader("content-range", "bytes 1-2/3"))
    server.fail(Cut(2, "close"))
    server.fail(Answer(404), skip=1)
    with pytest.raises(http.client.IncompleteRead):
        get(server, Range="bytes=0-9")
    assert called == [1]
    assert [get(server)[0] for _ in range(2)] == [404, 200]
    assert [(entry.status, entry.sent) for entry in server.log] == [(206, 2), (404, 0), (200, 5000)]


def test_leaving_ends_what_waits(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        with Server(Files(tmp_path)) as server:
            waiting = threading.Barrier(3, timeout=hang.SECONDS)
            server.fail(Call(waiting.wait), times=2)
            server.fail(Cut(None, "stall"), times=2)
            reads = [pool.submit(get, server) for _ in range(2)]
            waiting.wait()
        assert all(isinstance(read.exception(), ConnectionError) for read in reads)
    assert not [thread for thread in threading.enumerate() if server.url in thread.name]


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_of_requests(chunked):
    with Server(lambda request: Response(200, body=request.body)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        pieces = [b"a" * 10, b"b" * 5000, b"c"]
        for _ in range(2):
            connection.request("PUT", "/x", iter(pieces) if chunked else b"".join(pieces), encode_chunked=chunked)
            assert connection.getresponse().read() == b"".join(pieces)
        connection.close()
        assert [(entry.received, entry.sent) for entry in server.log] == [(5011, 5011)] * 2


def test_an_app_that_raises_is_not_forgotten():
    def app(request):
        raise KeyError(request.path)

    with pytest.raises(KeyError, match="/wrong"), Server(app) as server:
        assert get(server, path="/wrong")[0] == 500


SERVING = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"], r"(http://127[^/]*)"


def listens(port) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        pass  # It is ending.
    return True


def test_a_server_process_ends_with_a_test_that_is_killed():
    code = (
        "import os, signal\nfrom tests.support.servers.processes import serving\n"
        f"with serving(*{SERVING!r}) as url:\n"
        "    print(url, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=hang.SECONDS)
    assert said.returncode == -signal.SIGKILL
    port = urlsplit(said.stdout.strip()).port
    while listens(port):
        pass


def test_a_server_that_does_not_start_says_why():
    with (
        pytest.raises(RuntimeError, match=r"does not serve; it said:\nno memory"),
        serving([sys.executable, "-c", "print('no memory')"], "(http:.*)"),
    ):
        pass
