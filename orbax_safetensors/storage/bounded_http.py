"""Connections to HTTP servers whose answers end, whatever the server sends.

The timeout of a socket is for each of its reads: a server that sends a byte now and then would keep a request for ever,
as would one whose headers, chunks or interim answers never end.
"""

from __future__ import annotations

import io
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any, cast
from urllib.request import AbstractHTTPHandler, Request

from orbax_safetensors.storage.retries import WrongAnswerError

# Bytes of an answer besides those of its body: `http.client` reads up to a hundred headers, of up to 64 KiB each.
_HEAD_BYTES = 8 * 2**20


class BoundedRequest(Request):
    """A request whose answer ends at a time of `time.monotonic`, and has at most `nbytes` bytes besides its head.

    A pause between two bytes of it takes at most the timeout with which the request is opened.
    """

    def __init__(self, url: str, headers: dict[str, str], until: float, nbytes: int) -> None:
        super().__init__(url, headers=headers)
        self.until, self.nbytes = until, nbytes


class BoundedHandler(AbstractHTTPHandler):
    """Opens each `BoundedRequest`, with certificates as an SSL context has them."""

    http_request = https_request = AbstractHTTPHandler.do_request_

    def __init__(self, trust: ssl.SSLContext) -> None:
        super().__init__()
        self._trust = trust

    def http_open(self, request: BoundedRequest) -> HTTPResponse:
        """Open a request to a server without TLS."""
        return self.do_open(partial(_connection, HTTPConnection, request), request)

    def https_open(self, request: BoundedRequest) -> HTTPResponse:
        """Open a request to a server with TLS."""
        return self.do_open(partial(_connection, HTTPSConnection, request), request, context=self._trust)


def _connection(kind: Callable[..., Any], request: BoundedRequest, host: str, **options: Any) -> Any:
    connection = kind(host, **options)
    connection.response_class = lambda sock, **facts: HTTPResponse(cast(Any, _Bounded(sock, request)), **facts)
    return connection


class _Bounded:
    """What `HTTPResponse` needs of a socket."""

    def __init__(self, sock: socket.socket, request: BoundedRequest) -> None:
        self._sock, self._request = sock, request

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Bytes(self._sock, self._request))


class _Bytes(io.RawIOBase):
    """The bytes of one answer."""

    def __init__(self, sock: socket.socket, request: BoundedRequest) -> None:
        self._sock, self._raw = sock, sock.makefile("rb", buffering=0)
        self._pause, self._until = sock.gettimeout(), request.until
        self._left = request.nbytes + _HEAD_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        if self._left <= 0:
            raise WrongAnswerError("the server sends more than was asked for")
        self._sock.settimeout(seconds if self._pause is None else min(self._pause, seconds))
        count = self._raw.readinto(buffer)
        self._left -= count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
