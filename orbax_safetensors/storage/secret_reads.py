"""Ranges of a file on the one server that gets the secrets of requests."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING

from obstore import Bytes

from orbax_safetensors.storage.event_loop import in_thread
from orbax_safetensors.storage.links import FileLink, MovedError, Ranged
from orbax_safetensors.storage.redirects import Answer, Client
from orbax_safetensors.storage.remote import NO_DATE
from orbax_safetensors.storage.retries import ChangedError, RefusedError, WrongAnswerError, code_of

if TYPE_CHECKING:  # obstore has these for type checkers only
    from obstore import GetOptions, ObjectMeta


def link_within(server: str, url: str, client: Client) -> FileLink:
    """Return a link to a file on the server of `client`, which messages call `server`.

    `get` of the link raises `MovedError` if the server redirects to another server, which is not asked.
    """

    async def get(options: GetOptions) -> Ranged:
        headers, nbytes = {}, 0
        if "range" in options:
            begin, end = map(int, options["range"])
            headers["Range"], nbytes = f"bytes={begin}-{end - 1}", end - begin
        if tag := options.get("if_match"):
            headers["If-Match"] = tag
        answer = await in_thread(lambda: client.get(url, headers, nbytes))
        if answer.link is not None:
            raise MovedError(f"{server} leads elsewhere with the ranges of a file, but not with the file")
        if answer.status == HTTPStatus.PRECONDITION_FAILED:
            raise ChangedError("another")
        if answer.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            raise refusal(server, answer)
        return _RangeAnswer(answer, nbytes)

    return FileLink(get, expires=False)


def refusal(server: str, answer: Answer) -> Exception:
    """Return the error for a server's answer without a file."""
    if answer.status == HTTPStatus.NOT_FOUND:
        return FileNotFoundError()
    code = code_of(answer.body.decode(errors="replace"))
    return RefusedError(f"{server} answered {answer.status}{code}", answer.status)


class _RangeAnswer:
    """See `Ranged`."""

    def __init__(self, answer: Answer, nbytes: int) -> None:
        """Take the answer to a request for a range of `nbytes` bytes, or for a file of which only the facts count.

        Raises `WrongAnswerError` if the answer does not say its range, and `RefusedError` if it ended too early.
        """
        ranged = nbytes > 0
        given = answer.headers.get("Content-Range" if ranged else "Content-Length", "")
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)" if ranged else r"()()(\d+)", given.strip())
        if ranged and answer.status != HTTPStatus.PARTIAL_CONTENT:
            raise WrongAnswerError("the server ignores the requested range")
        if found is None:
            raise WrongAnswerError("the server does not say which bytes of the file it sent")
        size = int(found[3])
        self.range = (int(found[1]), int(found[2]) + 1) if ranged else (0, size)
        self._body = answer.body
        if len(self._body) < min(nbytes, self.range[1] - self.range[0]):
            raise RefusedError("the connection broke")
        self.meta: ObjectMeta = {
            "path": "",
            "last_modified": _date(answer.headers.get("Last-Modified")),
            "size": size,
            "e_tag": answer.headers.get("ETag"),
            "version": None,
        }

    async def bytes_async(self) -> Bytes:
        return Bytes(self._body)


def _date(text: str | None) -> datetime:
    """Return the date in a header; that of obstore if there is none."""
    try:
        return parsedate_to_datetime(text or "").astimezone(UTC)
    except ValueError:
        return NO_DATE
