"""A server for `remote.py`, in a process of its own: a directory over HTTP, and a bucket that takes uploads.

    python benchmarks/serve.py DIRECTORY [--latency 0.02]

It prints its URL, and serves until it is killed. `/.asked` says what it was asked for since the last time, and what
processor time it took meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.append(os.fspath(Path(__file__).parents[1]))

from tests.support.servers.faults import Call
from tests.support.servers.files import Files
from tests.support.servers.objects import Object, read
from tests.support.servers.server import Request, Response, Server

ASKED, BUCKET = "/.asked", "bucket"


class Counted:
    """The app: reads go to a directory, or to the bucket where they begin with its name. Counts both."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._bucket = Files(directory), Bucket()
        self._asked: list[tuple[str, str, int, int, int]] = []
        self._cpu = time.process_time()

    def __call__(self, request: Request) -> Response:
        if request.path == ASKED:
            return self._tell()
        answer = (self._bucket if f"{request.path}/".startswith(f"/{BUCKET}/") else self._directory)(request)
        start, stop = request.range or (0, None)
        nbytes = 0 if request.method == "HEAD" else len(answer.body)
        self._asked.append((request.method, request.path, start, stop or start + nbytes, nbytes + len(request.body)))
        return answer

    def _tell(self) -> Response:
        (asked, self._asked), cpu = (self._asked, []), time.process_time()
        cpu_seconds, self._cpu = cpu - self._cpu, cpu
        return Response(200, body=json.dumps({"asked": asked, "cpu_seconds": cpu_seconds}).encode())


class Bucket:
    """Google Cloud Storage as far as uploads go: none is hashed, which would take longer than all the rest.

    Its lists are empty, as it is between two runs.
    """

    def __init__(self) -> None:
        self._objects: dict[str, list[bytes]] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Response:
        upload, key = request.query.get("uploadId"), request.path
        with self._lock:
            match request.method:
                case "POST" if upload is None:
                    name = str(next(self._numbers))
                    self._uploads[name] = {}
                    return _xml(f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId>", request)
                case "PUT" if upload is not None:
                    self._uploads[upload][int(request.query["partNumber"])] = request.body
                    return Response(200, {"ETag": '"part"'})
                case "POST":
                    parts = self._uploads.pop(str(upload))
                    self._objects[key] = [parts[number] for number in sorted(parts)]
                    return _xml(f'<CompleteMultipartUploadResult><ETag>"{upload}"</ETag>', request)
                case "PUT":
                    self._objects[key] = [request.body]
                    return Response(200, {"ETag": '"whole"', "x-goog-generation": "1"})
                case "DELETE":
                    self._objects.pop(key, None)
                    return Response(204)
            if "list-type" in request.query:
                return _xml("<ListBucketResult><IsTruncated>false</IsTruncated>", request)
            if key not in self._objects:
                return Response(404)
            data = b"".join(self._objects[key])
        return read(request, Object(len(data), "object", 0.0, lambda start, stop: data[start:stop]))


def _xml(text: str, request: Request) -> Response:
    (name,) = re.findall(r"^<(\w+)>", text)
    inside = f"<Bucket>{BUCKET}</Bucket><Key>{request.path}</Key></{name}>"
    headers = {"Content-Type": "application/xml", "x-goog-generation": "1"}
    return Response(200, headers, (text + inside).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before each answer")
    args = parser.parse_args()
    with Server(Counted(args.directory)) as server:
        server.fail(Call(lambda: time.sleep(args.latency)), path="/[!.]*", times=None)
        print(server.url, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
