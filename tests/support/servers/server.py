"""An HTTP/1.1 server on loopback that fails as a test tells it to and remembers what it was asked and what it sent.

What the servers of all protocols here have in common. A protocol is an `App`, a function from a `Request` to a
`Response`; this server reads the one, sends the other, and comes between them with the faults of `faults.py`. Each
connection has a thread, so a request that waits holds up no other. It trusts its clients: no TLS, no limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import http
import http.client
import itertools
import re
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.utils import formatdate
from functools import cached_property
from typing import BinaryIO
from urllib.parse import parse_qsl, unquote

from tests.support import hang
from tests.support.servers.faults import Answer, Call, Cut, Fault, IgnoreRange, SetHeader

# Connections that may wait to be accepted: a client that opens hundreds at once shall not see one refused.
_BACKLOG = 1024
# SO_LINGER with a time of 0: closing sends a reset.
_RESET = struct.pack("ii", 1, 0)


@dataclasses.dataclass(frozen=True)
class Request:
    """One request; `target` is the path and the query as they were sent."""

    method: str
    target: str
    headers: http.client.HTTPMessage = dataclasses.field(default_factory=http.client.HTTPMessage)
    body: bytes = b""

    @cached_property
    def path(self) -> str:
        return unquote(self.target.partition("?")[0])

    @cached_property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    @cached_property
    def range(self) -> tuple[int, int | None] | None:
        """The bytes asked for, as the arguments of a slice: `bytes=2-4` is `(2, 5)` and `bytes=-4` is `(-4, None)`.

        None without a range, or with one that a server may ignore: several ranges, another unit, an end before the
        start.
        """
        matched = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "").strip())
        if matched is None or not any(matched.groups()):
            return None
        first, last = matched.groups()
        if not first:
            return (-int(last), None)
        if last and int(last) < int(first):
            return None
        return int(first), int(last) + 1 if last else None


@dataclasses.dataclass
class Response:
    """An answer. `Content-Length` comes from the body, or from `headers` where a HEAD has no body."""

    status: int
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""


App = Callable[[Request], Response]


@dataclasses.dataclass
class Exchange:
    """What the log has of one request: what was asked, and what it got."""

    method: str
    path: str
    query: Mapping[str, str]
    range: tuple[int, int | None] | None
    headers: http.client.HTTPMessage
    # Bytes of the request's body.
    received: int
    # None as long as, or if, no answer is sent.
    status: int | None = None
    # Bytes of the response's body that the kernel took; 0 if the client went away before.
    sent: int = 0


@dataclasses.dataclass
class Rule:
    """A fault, the requests that get it, and how many have."""

    fault: Fault
    matches: Callable[[Request], bool]
    skip: int
    times: int | None
    # Requests that matched, with those that were skipped.
    matched: int = 0
    # Requests that got the fault.
    hits: int = 0

    def take(self, request: Request) -> bool:
        if (self.times is not None and self.hits >= self.times) or not self.matches(request):
            return False
        self.matched += 1
        if self.matched <= self.skip:
            return False
        self.hits += 1
        return True


class Server:
    """Serves an app at `url` while it is entered.

    It ends with the process in any case. If the app raised, the client got a 500, and leaving raises it again.
    """

    def __init__(self, app: App, host: str = "127.0.0.1") -> None:
        """Every address that starts with 127 is of this machine, and to clients they are different hosts."""
        self._app = app
        self._rules: list[Rule] = []
        self._log: list[Exchange] = []
        self._errors: list[Exception] = []
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._busy = 0
        self._changed = threading.Condition()
        self._listener = socket.create_server((host, 0), backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        self._acceptor = threading.Thread(target=self._accept, name=f"accept {self.url}", daemon=True)

    def __enter__(self) -> Server:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Wakes the thread that accepts, which closing would not do.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        with self._changed:
            threads = list(self._connections.values())
            for connection in self._connections:
                _shut(connection)
        for thread in threads:
            thread.join(hang.SECONDS)
            if thread.is_alive():
                raise RuntimeError(f"a connection to {self.url} did not end")
        if self._errors:
            raise self._errors[0]

    def fail(
        self,
        fault: Fault,
        *,
        method: str = "*",
        path: str = "*",
        when: Callable[[Request], object] = lambda request: True,
        skip: int = 0,
        times: int | None = 1,
    ) -> Rule:
        """The next `times` requests get `fault`; all with None. Those are meant that match `method`, `path` and `when`.

        `method` and `path` are glob patterns, `path` of the decoded path without its query. The first `skip` requests
        that match are spared. A request gets the faults of all rules that match it: calls first, in the
        order of the rules, then what they make of the answer. The first rule with an answer or a cut wins.
        """

        def matches(request: Request) -> bool:
            return (
                fnmatch.fnmatchcase(request.method, method)
                and fnmatch.fnmatchcase(request.path, path)
                and bool(when(request))
            )

        rule = Rule(fault, matches, skip, times)
        with self._changed:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forgets all rules, and the log."""
        with self._changed:
            self._await_quiet()
            self._rules.clear()
            self._log.clear()

    @property
    def log(self) -> list[Exchange]:
        """All requests so far, in the order in which they came. Waits for those that are being answered.

        A request that is never answered, or whose body has stalled, is not waited for.
        """
        with self._changed:
            self._await_quiet()
            return list(self._log)

    def sent(self, **kept: object) -> int:
        """Bytes of bodies sent to requests whose log entry has these values, as `method="GET"`."""
        return sum(e.sent for e in self.log if all(getattr(e, name) == value for name, value in kept.items()))

    def _await_quiet(self) -> None:
        if not self._changed.wait_for(lambda: not self._busy, hang.SECONDS):
            raise TimeoutError(f"{self._busy} requests to {self.url} are still being answered")

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._serve, args=(connection,), name=f"{self.url} #{number}", daemon=True)
            with self._changed:
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as stream:
                while (request := _read(connection, stream)) is not None:
                    if not self._exchange(connection, request):
                        break
        except (ConnectionError, http.client.HTTPException):
            # The client went away, as it may.
            pass
        finally:
            with self._changed:
                del self._connections[connection]

    def _exchange(self, connection: socket.socket, request: Request) -> bool:
        """Answers one request; whether the connection can be used again."""
        entry = Exchange(
            request.method,
            request.path,
            request.query,
            request.range,
            request.headers,
            len(request.body),
        )
        with self._changed:
            self._log.append(entry)
            self._busy += 1
            faults = [rule.fault for rule in self._rules if rule.take(request)]
        waits = False
        try:
            cut = next((fault for fault in faults if isinstance(fault, Cut)), None)
            response = self._answer(request, faults)
            if cut is None or cut.after is not None:
                self._send(connection, request, response, entry, cut)
            if cut is None:
                return request.headers.get("Connection", "").lower() != "close"
            if cut.then == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            waits = cut.then == "stall"
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()
        if waits:
            # Until the client closes the connection or this server ends.
            connection.recv(1)
        return False

    def _answer(self, request: Request, faults: Iterable[Fault]) -> Response:
        for fault in faults:
            if isinstance(fault, Call):
                fault.function()
            elif isinstance(fault, IgnoreRange):
                request = dataclasses.replace(request, headers=_without(request.headers, "Range"))
        for fault in faults:
            if isinstance(fault, Answer):
                return Response(fault.status, dict(fault.headers), fault.body)
        try:
            response = self._app(request)
        except Exception as error:
            self._errors.append(error)
            return Response(500, {"Content-Type": "text/plain"}, traceback.format_exc().encode())
        for fault in faults:
            if isinstance(fault, SetHeader):
                response.headers = {k: v for k, v in response.headers.items() if k.lower() != fault.name.lower()}
                if fault.value is not None:
                    response.headers[fault.name] = fault.value
        return response

    def _send(
        self, connection: socket.socket, request: Request, response: Response, entry: Exchange, cut: Cut | None
    ) -> None:
        headers = {"Date": formatdate(usegmt=True), **response.headers}
        if response.status not in (204, 304) and "Content-Length" not in headers:
            headers["Content-Length"] = str(len(response.body))
        lines = [f"HTTP/1.1 {response.status} {http.HTTPStatus(response.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        bodiless = request.method == "HEAD" or response.status in (204, 304)
        count = 0 if bodiless else len(response.body)
        if cut is not None and cut.after is not None:
            count = min(count, cut.after)
        entry.status = response.status
        connection.sendall(head, socket.MSG_MORE if count else 0)
        connection.sendall(memoryview(response.body)[:count])
        entry.sent = count


def _read(connection: socket.socket, stream: BinaryIO) -> Request | None:
    """The next request of a connection; None at its end."""
    line = stream.readline().decode("latin-1").split()
    if not line:
        return None
    method, target, _ = line
    headers = http.client.parse_headers(stream)
    if headers.get("Expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    if headers.get("Transfer-Encoding", "").lower() == "chunked":
        return Request(method, target, headers, b"".join(_chunks(stream)))
    return Request(method, target, headers, _exactly(stream, int(headers.get("Content-Length", 0))))


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while nbytes := int(stream.readline().partition(b";")[0], 16):
        yield _exactly(stream, nbytes)
        stream.readline()
    while stream.readline().strip():
        pass


def _exactly(stream: BinaryIO, nbytes: int) -> bytes:
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise ConnectionError(f"the body of a request ended after {len(data)} of {nbytes} bytes")
    return data


def _without(headers: http.client.HTTPMessage, name: str) -> http.client.HTTPMessage:
    kept = http.client.HTTPMessage()
    for key, value in headers.items():
        if key.lower() != name.lower():
            kept.add_header(key, value)
    return kept


def _shut(connection: socket.socket) -> None:
    """Wakes whoever reads from or writes to a connection, whatever its state."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
