"""Another server's answers, as an app: whatever speaks HTTP can so fail as told, and be watched.

Requests pass as they came, with the `Host` that they were signed for.
"""

from __future__ import annotations

import http.client
import select
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

from tests.support.servers.server import Bytes, Request, Response

# Bytes passed on at a time.
_PIECE = 1 << 20
# What a connection says of itself, or this server by itself.
_NOT_ASKED = {"connection", "transfer-encoding", "content-length", "expect"}
_NOT_ANSWERED = {"connection", "keep-alive", "transfer-encoding", "content-length", "date"}


class Forward:
    """The app. Connections to the other server are kept until it is left."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()

    def __call__(self, request: Request) -> Response:
        connection = self._connection()
        try:
            signed = "Host" in request.headers
            connection.putrequest(request.method, request.target, skip_host=signed, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in _NOT_ASKED:
                    connection.putheader(name, value)
            if request.body or request.method in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body)
            answer = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _NOT_ANSWERED}
        if answer.length is None:
            data = answer.read()
            self._keep(connection)
            return Response(answer.status, headers, Bytes(data))
        if request.method == "HEAD" and "Content-Length" in answer.headers:
            headers["Content-Length"] = answer.headers["Content-Length"]
        return Response(answer.status, headers, _Passed(self, connection, answer))

    def _connection(self) -> http.client.HTTPConnection:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                # One that has something to say has nothing but its end to say.
                if not select.select([connection.sock], [], [], 0)[0]:
                    return connection
                connection.close()
        assert self._host is not None
        return http.client.HTTPConnection(self._host, self._port)

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        if connection.sock is not None:
            with self._lock:
                self._idle.append(connection)


class _Passed:
    """The body that the other server is sending."""

    def __init__(
        self, forward: Forward, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse
    ) -> None:
        self._forward, self._connection, self._answer = forward, connection, answer
        self.nbytes = answer.length or 0

    def send(self, connection: socket.socket, count: int) -> Iterator[int]:
        buffer = memoryview(bytearray(min(_PIECE, count)))
        while count:
            got = self._answer.readinto(buffer[: min(len(buffer), count)])
            if not got:
                raise ConnectionError("the server behind this one ended its answer early")
            connection.sendall(buffer[:got])
            count -= got
            yield got

    def close(self) -> None:
        whole = self._answer.isclosed()
        self._answer.close()
        if whole:
            self._forward._keep(self._connection)
        else:
            self._connection.close()
