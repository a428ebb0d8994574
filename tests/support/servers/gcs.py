"""Google Cloud Storage's XML API in memory, as far as obstore uses it.

There is none to install that would do: gcp-storage-emulator speaks the JSON API. This one has buckets, objects with
generations, lists of the second version, and multipart uploads. Everybody is let in, as to a public bucket. Whatever
stores refuse of uploads is left to moto.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import threading
import time
import xml.etree.ElementTree as ET
from xml.sax.saxutils import escape

from tests.support.servers.objects import Object, read
from tests.support.servers.server import Request, Response

TOKEN = "token"
# Headers of an upload that are given back with the object.
_KEPT = ("content-type", "content-encoding", "content-disposition", "content-language", "cache-control")


@dataclasses.dataclass(frozen=True)
class Stored:
    """One generation of an object."""

    data: bytes
    generation: int
    etag: str
    modified: float
    headers: dict[str, str]


@dataclasses.dataclass
class Upload:
    """A multipart upload that is neither complete nor aborted."""

    bucket: str
    key: str
    headers: dict[str, str]
    parts: dict[int, bytes] = dataclasses.field(default_factory=dict)


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.response = Response(status, {"Content-Type": "application/xml"}, _xml("Error", Code=code))


class Gcs:
    """The app. What it holds may be looked at, and changed, under no lock: between requests."""

    def __init__(self, *buckets: str) -> None:
        self.buckets: dict[str, dict[str, Stored]] = {bucket: {} for bucket in buckets}
        self.uploads: dict[str, Upload] = {}
        # Real ones are microseconds.
        self._generations = itertools.count(time.time_ns() // 1000)
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Response:
        bucket, _, key = request.path.lstrip("/").partition("/")
        try:
            with self._lock:
                return self._answer(request, bucket, key)
        except _Refused as refused:
            return refused.response

    def _answer(self, request: Request, bucket: str, key: str) -> Response:
        if bucket not in self.buckets:
            raise _Refused(404, "NoSuchBucket")
        objects, query = self.buckets[bucket], request.query
        match request.method:
            case "GET" if not key and query.get("list-type") == "2":
                return _list(bucket, objects, query)
            case "GET" | "HEAD" if key:
                return self._read(request, objects, key)
            case "POST" if "uploads" in query:
                upload = f"upload-{next(self._generations)}"
                self.uploads[upload] = Upload(bucket, key, _kept(request))
                return _ok(_xml("InitiateMultipartUploadResult", Bucket=bucket, Key=key, UploadId=upload))
            case "POST" if "uploadId" in query:
                return self._complete(request, objects, self._upload(query, bucket, key))
            case "PUT" if "uploadId" in query:
                etag = hashlib.md5(request.body).hexdigest()
                self._upload(query, bucket, key).parts[int(query["partNumber"])] = request.body
                return Response(200, {"ETag": f'"{etag}"'})
            case "DELETE" if "uploadId" in query:
                self._upload(query, bucket, key)
                del self.uploads[query["uploadId"]]
                return Response(204)
            case "PUT" if key:
                etag = hashlib.md5(request.body).hexdigest()
                stored = self.store(objects, key, request.body, etag, _kept(request))
                return Response(200, {"ETag": f'"{stored.etag}"', "x-goog-generation": str(stored.generation)})
            case "DELETE" if key:
                _found(objects, key)
                del objects[key]
                return Response(204)
        raise _Refused(400, "NotImplementedHere")

    def _read(self, request: Request, objects: dict[str, Stored], key: str) -> Response:
        found = _found(objects, key)
        headers = {
            **found.headers,
            "x-goog-generation": str(found.generation),
            "x-goog-metageneration": "1",
            "x-goog-stored-content-length": str(len(found.data)),
        }
        return read(
            request,
            Object(len(found.data), found.etag, found.modified, lambda start, stop: found.data[start:stop], headers),
        )

    def store(self, objects: dict[str, Stored], key: str, data: bytes, etag: str, headers: dict[str, str]) -> Stored:
        """Makes a new generation of an object."""
        objects[key] = Stored(data, next(self._generations), etag, time.time(), headers)
        return objects[key]

    def _upload(self, query: dict[str, str], bucket: str, key: str) -> Upload:
        upload = self.uploads.get(query["uploadId"])
        if upload is None or (upload.bucket, upload.key) != (bucket, key):
            raise _Refused(404, "NoSuchUpload")
        return upload

    def _complete(self, request: Request, objects: dict[str, Stored], upload: Upload) -> Response:
        listed = [int(part.findtext("{*}PartNumber", "")) for part in ET.fromstring(request.body).iterfind("{*}Part")]
        data = b"".join(upload.parts[number] for number in listed)
        # Of these objects there is no MD5, and the ETag is none.
        etag = f"-{hashlib.sha256(data).hexdigest()[:16]}"
        stored = self.store(objects, upload.key, data, etag, upload.headers)
        del self.uploads[request.query["uploadId"]]
        answer = _ok(
            _xml("CompleteMultipartUploadResult", Bucket=upload.bucket, Key=upload.key, ETag=f'"{stored.etag}"')
        )
        answer.headers["x-goog-generation"] = str(stored.generation)
        return answer


def _found(objects: dict[str, Stored], key: str) -> Stored:
    if key not in objects:
        raise _Refused(404, "NoSuchKey")
    return objects[key]


def listed(objects: dict[str, Stored], prefix: str, delimiter: str) -> dict[str, Stored | None]:
    """What a listing has, by name: an object, or None for what several have in common."""
    found: dict[str, Stored | None] = {}
    for key in sorted(key for key in objects if key.startswith(prefix)):
        head, separator, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        found[prefix + head + separator if separator else key] = None if separator else objects[key]
    return found


def _list(bucket: str, objects: dict[str, Stored], query: dict[str, str]) -> Response:
    lines = [f"<Name>{escape(bucket)}</Name><IsTruncated>false</IsTruncated>"]
    for name, stored in listed(objects, query.get("prefix", ""), query.get("delimiter", "")).items():
        if stored is None:
            lines.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
        else:
            lines.append(
                f"<Contents><Key>{escape(name)}</Key><Generation>{stored.generation}</Generation>"
                f'<LastModified>{_iso(stored.modified)}</LastModified><ETag>"{stored.etag}"</ETag>'
                f"<Size>{len(stored.data)}</Size></Contents>"
            )
    return _ok(f"<ListBucketResult>{''.join(lines)}</ListBucketResult>".encode())


def _kept(request: Request) -> dict[str, str]:
    return {
        name: value
        for name, value in request.headers.items()
        if name.lower() in _KEPT or name.lower().startswith("x-goog-meta-")
    }


def _ok(body: bytes) -> Response:
    return Response(200, {"Content-Type": "application/xml"}, body)


def _xml(name: str, **values: str) -> bytes:
    inside = "".join(f"<{key}>{escape(value)}</{key}>" for key, value in values.items())
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inside}</{name}>'.encode()


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
