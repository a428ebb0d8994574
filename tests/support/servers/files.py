"""A directory over plain HTTP, as a web server has it: reads only, and no listing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from tests.support.servers.objects import Object, read
from tests.support.servers.server import Request, Response


class Files:
    """The app. A file's ETag is made of its size and its time of modification."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def __call__(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return Response(405, {"Allow": "GET, HEAD"})
        path = (self._root / request.path.lstrip("/")).resolve()
        if not path.is_relative_to(self._root) or not path.is_file():
            return Response(404)
        # Its facts and its bytes come from one open file, also while another takes its place.
        with open(path, "rb") as file:
            return read(request, _object(file))


def _object(file: BinaryIO) -> Object:
    status = os.fstat(file.fileno())
    etag = f"{status.st_mtime_ns:x}-{status.st_size:x}"
    return Object(
        status.st_size, etag, status.st_mtime, lambda start, stop: os.pread(file.fileno(), stop - start, start)
    )
