"""Google Cloud Storage's JSON API, as far as TensorStore and gcsfs use it, beside the XML API of `gcs.py`.

Conditions on generations, listings with prefixes and offsets, copies and moves; uploads that are simple, multipart or
resumable. Nobody is asked for credentials.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import itertools
import json
import re
from typing import Any
from urllib.parse import unquote

from tests.support.servers.gcs import Gcs, Stored, listed
from tests.support.servers.server import Request, Response

# Entries of a listing that come at once; of Google's there are 1000.
_PAGE = 20


class GcsWithJson:
    """The app, for the buckets of another: what does not ask for the JSON API is passed on."""

    def __init__(self, gcs: Gcs) -> None:
        self._gcs = gcs
        # Resumable uploads under way: the first request, bucket and name, and the bytes so far.
        self._sessions: dict[str, tuple[Request, str, str, bytearray]] = {}
        self._numbers = itertools.count()
        self._routes = (
            (re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/(rewriteTo|moveTo)/(?:b/([^/]+)/)?o/([^/]+)"), self._copy),
            (re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)"), self._object),
            (re.compile(r"/storage/v1/b/([^/]+)/o"), self._listing),
            (re.compile(r"/storage/v1/b/([^/]+)"), self._bucket),
            (re.compile(r"/upload/storage/v1/b/([^/]+)/o"), self._upload),
            (re.compile(r"/upload/session/(\d+)"), self._session),
        )

    def __call__(self, request: Request) -> Response:
        path = request.target.partition("?")[0]
        for pattern, answer in self._routes:
            if match := pattern.fullmatch(path):
                with self._gcs._lock:
                    return answer(request, *(part and unquote(part) for part in match.groups()))
        return self._gcs(request)

    def _bucket(self, request: Request, bucket: str) -> Response:
        if bucket not in self._gcs.buckets:
            return _error(404, "The specified bucket does not exist.")
        return _json({"kind": "storage#bucket", "id": bucket, "name": bucket, "storageClass": "STANDARD"})

    def _listing(self, request: Request, bucket: str) -> Response:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        first, last = query.get("startOffset", ""), query.get("endOffset")
        after = base64.urlsafe_b64decode(query.get("pageToken", "")).decode()
        objects = self._gcs.buckets.get(bucket, {})
        inside = {name: objects[name] for name in objects if name >= first and (not last or name < last)}
        found = listed(inside, prefix, delimiter)
        names = [name for name in found if name > after]
        shown = names[: min(int(query.get("maxResults", _PAGE)), _PAGE)]
        answer: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [_facts(bucket, name, stored) for name in shown if (stored := found[name]) is not None],
            "prefixes": [name for name in shown if found[name] is None],
            # TensorStore sends it as it came.
            "nextPageToken": base64.urlsafe_b64encode(shown[-1].encode()).decode() if len(names) > len(shown) else "",
        }
        return _json({key: value for key, value in answer.items() if value})

    def _object(self, request: Request, bucket: str, name: str) -> Response:
        objects = self._gcs.buckets.get(bucket, {})
        stored = objects.get(name)
        if (refused := _refused(request, stored)) is not None:
            return refused
        if stored is None:
            return _error(404, f"No such object: {bucket}/{name}")
        if request.method == "DELETE":
            del objects[name]
            return Response(204)
        if request.query.get("alt") != "media" and not request.path.startswith("/download"):
            return _json(_facts(bucket, name, stored))
        headers = {"x-goog-generation": str(stored.generation), "Content-Type": "application/octet-stream"}
        if request.range is None:
            return Response(200, headers, stored.data)
        start, stop, _ = slice(*request.range).indices(len(stored.data))
        if start >= stop:
            return Response(416, {"Content-Range": f"bytes */{len(stored.data)}"})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(stored.data)}"
        return Response(206, headers, stored.data[start:stop])

    def _copy(self, request: Request, bucket: str, name: str, kind: str, to: str | None, to_name: str) -> Response:
        objects = self._gcs.buckets[bucket]
        if name not in objects:
            return _error(404, f"No such object: {bucket}/{name}")
        facts = self._stored(request, to or bucket, to_name, objects[name].data)
        if kind == "moveTo":
            del objects[name]
            return facts
        return _json({"kind": "storage#rewriteResponse", "done": True})

    def _upload(self, request: Request, bucket: str) -> Response:
        kind, name = request.query["uploadType"], request.query.get("name", "")
        if kind == "media":
            return self._stored(request, bucket, name, request.body)
        if kind == "multipart":
            facts, data = _parts(request)
            return self._stored(request, bucket, name or facts["name"], data)
        number = str(next(self._numbers))
        self._sessions[number] = request, bucket, name or json.loads(request.body)["name"], bytearray()
        return Response(200, {"Location": f"http://{request.headers['Host']}/upload/session/{number}"})

    def _session(self, request: Request, number: str) -> Response:
        begun, bucket, name, data = self._sessions[number]
        if request.method == "DELETE":
            del self._sessions[number]
            return Response(204)
        data += request.body
        if request.headers.get("Content-Range", "").endswith("/*"):
            return Response(308, {"Range": f"bytes=0-{len(data) - 1}"} if data else {})
        del self._sessions[number]
        return self._stored(begun, bucket, name, bytes(data))

    def _stored(self, request: Request, bucket: str, name: str, data: bytes) -> Response:
        objects = self._gcs.buckets.get(bucket)
        if objects is None:
            return _error(404, "The specified bucket does not exist.")
        if (refused := _refused(request, objects.get(name))) is not None:
            return refused
        self._gcs.store(objects, name, data, hashlib.md5(data).hexdigest(), {})
        return _json(_facts(bucket, name, objects[name]))


def _facts(bucket: str, name: str, stored: Stored) -> dict[str, Any]:
    modified = datetime.datetime.fromtimestamp(stored.modified, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.data)),
        "md5Hash": base64.b64encode(hashlib.md5(stored.data).digest()).decode(),
        "etag": stored.etag,
        "timeCreated": modified,
        "updated": modified,
        "storageClass": "STANDARD",
    }


def _refused(request: Request, stored: Stored | None) -> Response | None:
    """What a condition that does not hold is answered with; 0 is the generation of what is not there."""
    generation = str(stored.generation) if stored else "0"
    if request.query.get("ifGenerationMatch", generation) != generation:
        return _error(412, "At least one of the pre-conditions you specified did not hold.")
    if request.query.get("ifGenerationNotMatch") == generation:
        return Response(304)
    return None


def _parts(request: Request) -> tuple[dict[str, Any], bytes]:
    """The facts and the bytes of a multipart upload, whose lines gcsfs ends without a carriage return."""
    match = re.search(r"""boundary=["']?([^"';]+)""", request.headers["Content-Type"])
    assert match is not None
    # The client has chosen a boundary that is in neither part.
    _, facts, data, _ = re.split(rb"(?:^|\n)--" + re.escape(match[1].encode()), request.body)
    return json.loads(_content(facts)), _content(data)


def _content(part: bytes) -> bytes:
    return part.partition(b"\n\n")[2]


def _json(value: Any, status: int = 200) -> Response:
    return Response(status, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _error(status: int, message: str) -> Response:
    return _json({"error": {"code": status, "message": message}}, status)
