"""A directory over plain HTTP, as a web server has it: reads only, and no listing.

Run as a module, it serves from a process of its own, for benchmarks: nothing of it runs in the process that is
measured.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import BinaryIO

from tests.support.servers.faults import Delay
from tests.support.servers.objects import Object, read
from tests.support.servers.server import FilePart, Request, Response, Server


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
        file = open(path, "rb")  # noqa: SIM115 - the body closes it
        response = read(request, _object(file))
        if not isinstance(response.body, FilePart):
            file.close()
        return response


def _object(file: BinaryIO) -> Object:
    status = os.fstat(file.fileno())
    etag = f"{status.st_mtime_ns:x}-{status.st_size:x}"
    return Object(status.st_size, etag, status.st_mtime, lambda start, stop: FilePart(file, start, stop))


def _main() -> None:
    parser = argparse.ArgumentParser(description="Serves a directory over HTTP until it is killed.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    arguments = parser.parse_args()
    with Server(Files(arguments.directory)) as server:
        if arguments.latency:
            server.fail(Delay(arguments.latency), times=None)
        print(server.url, flush=True)
        signal.pause()


if __name__ == "__main__":
    _main()
