"""Clients of servers whose requests fail as told, without a server that does: what `obstore` and `urllib` then raise.

The errors are in obstore's own words: `tests/servers/test_faults.py` has them from a server that fails.
A fault is one of

    "403", "404", "416", "429", "503"   the server refuses
    "reset"                             the connection breaks before an answer comes
    "short body"                        the connection breaks within the answer
    "stall"                             nothing comes until the client gives up
    "held back"                         nothing comes until the test sets `go`, when the connection breaks
    "other range"                       the answer has other bytes than were asked for
    "no range"                          the answer has the whole file
    "other version"                     the answer is of another state of the file
"""

from __future__ import annotations

import email.message
import threading
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.error import URLError
from urllib.request import OpenerDirector

import obstore
import pytest
from obstore import exceptions

from orbax_safetensors.storage.event_loop import in_thread

# What servers repeat of a request that they refuse.
_BODY = "<Error><Code>Refused</Code><StringToSign>SECRET"
_NO_ANSWER = "HTTP error: error sending request"
_NO_BODY = "HTTP error: request or response body error"


class FailingClient:
    """Counts requests, and makes them fail with one fault at a time. `asked` is set once there is a request."""

    def __init__(self) -> None:
        self.requests = 0
        self.asked = threading.Event()
        self.go = threading.Event()
        self._fault: str | None = None
        self._times: int | None = 0

    def fail(self, fault: str, times: int | None = None) -> None:
        """Have the next `times` requests fail, or all with None; and count from here."""
        self.requests, self._fault, self._times = 0, fault, times
        self.asked.clear()

    def _take(self) -> str | None:
        self.requests += 1
        self.asked.set()
        if self._times is None:
            return self._fault
        self._times -= 1
        return self._fault if self._times >= 0 else None


class FailingObstore(FailingClient):
    """Stands for `obstore.get_async`."""

    _PHRASES: ClassVar = {
        "403": "Forbidden",
        "404": "Not Found",
        "416": "Range Not Satisfiable",
        "429": "Too Many Requests",
        "503": "Service Unavailable",
    }
    _KINDS: ClassVar = {"403": exceptions.PermissionDeniedError, "404": FileNotFoundError}

    def __init__(self, patch: pytest.MonkeyPatch, store: str = "HTTP") -> None:
        """`store` is what obstore calls the store in its errors."""
        super().__init__()
        self._get, self._store = obstore.get_async, store
        patch.setattr(obstore, "get_async", self.get_async)

    async def get_async(self, objects: Any, key: str, *, options: Any) -> Any:
        """Return an answer of obstore or raise its error."""
        if (fault := self._take()) is None:
            return await self._get(objects, key, options=options)
        if fault == "held back":
            await in_thread(self.go.wait)
            fault = "reset"
        error = self.error(fault)
        if fault == "short body":

            async def breaks() -> bytes:
                raise error

            answer = await self._get(objects, key, options=options)
            return SimpleNamespace(meta=answer.meta, range=answer.range, bytes_async=breaks)
        if fault == "other version":
            answer = await self._get(objects, key, options=options)
            meta = {**answer.meta, "e_tag": '"other"'}
            return SimpleNamespace(meta=meta, range=answer.range, bytes_async=answer.bytes_async)
        raise error

    def error(self, fault: str) -> Exception:
        """Return what obstore raises."""
        request = "Error performing GET http://127.0.0.1:1/x?Signature=SECRET in 1ms - "
        if fault.isdigit():
            said = f"{request}Server returned non-2xx status code: {fault} {self._PHRASES[fault]}: "
            debug = f'RetryErrorImpl {{ inner: Status {{ status: {fault}, body: Some("{_BODY}") }} }}'
            return self._KINDS.get(fault, exceptions.GenericError)(self._text(said + _BODY, debug))
        texts = {
            "reset": (request + _NO_ANSWER, "HttpError {\n    kind: Interrupted, Os { kind: ConnectionReset } }"),
            "short body": (_NO_BODY, "HttpError {\n    kind: Interrupted, Custom { kind: UnexpectedEof } }"),
            "stall": (request + _NO_ANSWER, "HttpError {\n    kind: Timeout, source: TimedOut }"),
            "other range": ("Requested 20..30, got 1..11", "UnexpectedRange { expected: 20..30, actual: 1..11 }"),
            "no range": ("Received non-partial response when range requested", "NotPartial"),
            "other version": ("", ""),
        }
        return exceptions.GenericError(self._text(*texts[fault]))

    def _text(self, said: str, debug: str) -> str:
        return f"Generic {self._store} error: {said}\n\nDebug source:\n{debug}"


class FailingUrllib(FailingClient):
    """Stands for `OpenerDirector.open`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._open = OpenerDirector.open
        patch.setattr(OpenerDirector, "open", lambda opener, request, timeout: self.open(opener, request, timeout))

    def open(self, opener: OpenerDirector, request: Any, timeout: float) -> Any:
        """Return an answer or raise an error of urllib."""
        fault = self._take()
        if fault == "held back":
            self.go.wait()
            fault = "reset"
        if fault == "reset":
            raise URLError(ConnectionResetError(104, "Connection reset by peer SECRET"))
        if fault == "stall":
            raise TimeoutError("SECRET")
        if fault is not None and fault.isdigit():
            return _Answer(int(fault), {}, _BODY.encode())
        answer = self._open(opener, request, timeout=timeout)
        if fault is None:
            return answer
        with answer:
            headers, body = dict(answer.headers.items()), answer.read()
        status = answer.status
        if fault == "short body":
            body = body[:-1]
        elif fault == "other version":
            headers["ETag"] = '"other"'
        elif fault == "no range":
            status = 200
        else:
            headers["Content-Range"] = f"bytes 1-{len(body)}/{headers['Content-Range'].rpartition('/')[2]}"
        return _Answer(status, headers, body)


class _Answer:
    """What is used of `http.client.HTTPResponse`."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self._body = status, body
        self.headers = email.message.Message()
        for name, value in headers.items():
            self.headers[name] = value

    def read(self, most: int) -> bytes:
        return self._body[:most]

    def __enter__(self) -> _Answer:
        return self

    def __exit__(self, *_: object) -> None:
        pass
