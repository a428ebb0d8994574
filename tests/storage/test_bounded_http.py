"""Requests to servers whose answers never come to an end: each ends in time, and takes no memory."""

import contextlib
import itertools
import socket
import threading
from types import SimpleNamespace

import pytest

from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.storage import bounded_http, hub_api, web
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Stamp

pytestmark = pytest.mark.server

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 73\r\n\r\n"
PART = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-72/73\r\n"
CHUNKED = PART + b"Transfer-Encoding: chunked\r\n\r\n"
# What a server sends once, and then for ever.
ENDLESS = {
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunks": (CHUNKED, b"1;" + b"x" * 1000 + b"\r\nx\r\n"),
    "trailers": (CHUNKED + b"48\r\n" + b"x" * 72 + b"\r\n0\r\n", b"X: y\r\n"),
    "nothing": (PART, b""),
}


@contextlib.contextmanager
def server(once, ever):
    """A server that says of each file that it is there, and whose ranges do not end; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve(peer):
            with peer, contextlib.suppress(OSError):
                if b"range:" not in peer.recv(65536).lower():
                    peer.sendall(WHOLE)
                    return
                peer.sendall(once)
                while ever:
                    peer.sendall(ever)
                if once.endswith(b"x"):
                    return
                peer.recv(1)  # until the client is gone

        def accept():
            threads = []
            with contextlib.suppress(OSError):
                while True:
                    threads.append(threading.Thread(target=serve, args=listening.accept()[:1]))
                    threads[-1].start()
            for thread in threads:
                thread.join()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def read(address, **options):
    store, path = store_of(address, {"max_retries": 0, **options})
    with contextlib.closing(store.open(path, Stamp(73, "unknown"))) as file:
        file.read([(0, [memoryview(bytearray(73))])])


@pytest.mark.parametrize("endless", ENDLESS)
def test_a_request_ends_in_time_whatever_the_server_sends(endless, monkeypatch):
    ticks = itertools.count()  # a clock that goes on by a quarter of an hour with each look at it
    for module in (bounded_http, web):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 900.0 * next(ticks)))
    pause = "50 ms" if endless == "nothing" else "1 h"
    with server(*ENDLESS[endless]) as url, pytest.raises(StorageError, match="no answer of the server in time"):
        read(f"{url}/x?signature=1", timeout="1 h", read_timeout=pause, retry_timeout=0)


def test_a_request_takes_no_more_than_it_asked_for(monkeypatch):
    monkeypatch.setattr(bounded_http, "_HEAD_BYTES", 10_000)
    with server(CHUNKED + b"-1\r\n", b"x" * 1000) as url, pytest.raises(StorageError, match="sends more than was ask"):
        read(f"{url}/x?signature=1")


def test_what_looks_up_a_file_of_the_hub_ends_in_time(hub, monkeypatch):
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    hub.commit({"model.safetensors": bytes(10**6)})
    store, path = store_of(f"{hub.url}/model.safetensors", {"max_retries": 0})
    store._api._seconds = 0.01
    asked = threading.Event()
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="no answer of the Hub in time"):
        patch.setattr(hub_api, "get_hf_file_metadata", lambda *_, **__: asked.wait())
        store.open(path)
    asked.set()


def test_a_date_that_cannot_be_is_none():
    for head in [
        PART + b"Content-Length: 73\r\nLast-Modified: " + date
        for date in (
            b"Fri, 31 Dec 9999 23:59:59 -2359",
            b"Mon, 99999999999999999999 Jan 1 00:00:00 GMT",
            b"Mon, 1 Jan 99999999999999999999 00:00:00 GMT",
            b"Mon, 1 Jan 2000 99999999999999999999:0:0 GMT",
            b"1" * 5000,
            b",,,,",
            b"\xff",
        )
    ]:
        with server(head + b"\r\n\r\n" + b"x" * 73, b"") as url:
            read(f"{url}/x?signature=1")


def test_a_date_that_obstore_cannot_have_is_an_error():
    for date in [b"Fri, 31 Dec 9999 23:59:59 -2359", b"Sat, 01 Jan 10000 00:00:00 GMT"]:
        head = PART + b"Connection: close\r\nContent-Length: 73\r\nLast-Modified: " + date + b"\r\n\r\n"
        with (
            server(head + b"x" * 73, b"") as url,
            pytest.raises(StorageError, match="the answer cannot be read .*Error: "),
        ):
            read(f"{url}/x")


def test_a_size_that_cannot_be_is_an_error():
    for size in [b"9" * 5000, b"9" * 19, b"-1", "٣".encode(), b"*", b""]:
        head = PART.replace(b"/73", b"/" + size) + b"Content-Length: 73\r\n\r\n" + b"x" * 73
        with (
            server(head, b"") as url,
            pytest.raises(StorageError, match="does not say which bytes of the file it sent"),
        ):
            read(f"{url}/x?signature=1")


def test_a_timeout_that_is_no_text_is_an_error():
    for url in ["hf://owner/name", "http://127.0.0.1:1/x?signature=1"]:
        with pytest.raises(SafetensorsError, match="storage_options"):
            store_of(url, {"timeout": 3})
