"""What HTTP says of reading one object: ranges and conditions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from email.utils import formatdate

from tests.support.servers.server import Request, Response


@dataclasses.dataclass(frozen=True)
class Object:
    """An object that can be read."""

    nbytes: int
    # Without quotes.
    etag: str
    # Seconds since 1970.
    modified: float
    # Its bytes from a start to a stop.
    part: Callable[[int, int], bytes]
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


def read(request: Request, found: Object) -> Response:
    """The answer to a GET or a HEAD.

    A HEAD has no range, and several ranges are none (RFC 9110, section 14.2). Dates are no conditions here.
    """
    headers = {
        "ETag": f'"{found.etag}"',
        "Last-Modified": formatdate(found.modified, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
        **found.headers,
    }
    if not _matches(request.headers.get("If-Match", "*"), found.etag):
        return Response(412)
    if _matches(request.headers.get("If-None-Match", ""), found.etag):
        return Response(304, headers)
    if request.method == "HEAD":
        return Response(200, headers | {"Content-Length": str(found.nbytes)})
    if request.range is None:
        return Response(200, headers, found.part(0, found.nbytes))
    start, stop, _ = slice(*request.range).indices(found.nbytes)
    if start >= stop:
        return Response(416, {"Content-Range": f"bytes */{found.nbytes}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.nbytes}"
    return Response(206, headers, found.part(start, stop))


def _matches(condition: str, etag: str) -> bool:
    return any(tag.strip() in ("*", f'"{etag}"') for tag in condition.split(","))
