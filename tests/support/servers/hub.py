"""The Hugging Face Hub's protocol for reading models, and the network that delivers its large files.

Two servers, as there: the Hub knows repositories, their revisions and who may read them. Small files it gives itself;
for large ones it signs links to another host, whose links expire and which must not be sent the credentials of the
Hub. Statuses and headers are those that `huggingface_hub` goes by. Nothing can be uploaded, and Xet is not spoken:
clients that could use it are not told that they may.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, quote, unquote, urlencode

from tests.support.servers.objects import Object, read
from tests.support.servers.server import Body, Bytes, FilePart, Request, Response

# Of a user who may read everything, and of one who may read what is neither private nor gated.
TOKEN, STRANGER = "hf_owner", "hf_stranger"
# Files that are kept outside of the repository, and come from the network.
_LARGE = (".safetensors", ".bin")
# Bytes of the text that a repository has in place of a large file.
_POINTER_BYTES = 134


@dataclasses.dataclass(frozen=True)
class Blob:
    """A file's contents: bytes, or a file of this machine."""

    data: bytes | Path
    large: bool

    @property
    def nbytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.stat().st_size

    @property
    def etag(self) -> str:
        """The SHA-256 of large files, git's name of small ones."""
        if isinstance(self.data, Path):
            with open(self.data, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        if self.large:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    def part(self, start: int, stop: int) -> Body:
        if isinstance(self.data, bytes):
            return Bytes(memoryview(self.data)[start:stop])
        return FilePart(open(self.data, "rb"), start, stop)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file of a commit."""

    blob: Blob
    etag: str

    def facts(self) -> dict[str, object]:
        """As the Hub tells them in lists of files."""
        facts: dict[str, object] = {"oid": self.etag[:40], "size": self.blob.nbytes}
        if self.blob.large:
            facts["lfs"] = {"oid": self.etag, "size": self.blob.nbytes, "pointerSize": _POINTER_BYTES}
        return facts


@dataclasses.dataclass
class Repository:
    """A model's files in each of its commits, and what its branches and tags stand for."""

    commits: dict[str, dict[str, Entry]] = dataclasses.field(default_factory=dict)
    revisions: dict[str, str] = dataclasses.field(default_factory=dict)
    # Everybody sees that it is there and what files it has; they can be read by those who were granted it.
    gated: bool = False
    # Nobody else sees that it is there.
    private: bool = False


class _Refused(Exception):
    def __init__(self, status: int, code: str | None, message: str, **headers: str) -> None:
        super().__init__(message)
        if code is not None:
            headers["X-Error-Code"] = code
        self.response = _json({"error": message}, status, headers | {"X-Error-Message": message})


class Hub:
    """The app of the Hub. Its attributes may be set at any time."""

    def __init__(self, network: Network, network_url: str) -> None:
        self.repositories: dict[str, Repository] = {}
        # Whether small files come from another path of the Hub, by a redirect without a host.
        self.redirects_small = True
        # What repositories are called now, by the names that they had.
        self.moved: dict[str, str] = {}
        # Entries of one answer to a question for the files of a directory.
        self.page_entries = 1000
        self._network, self._network_url = network, network_url
        self._commits = itertools.count()

    def commit(self, name: str, files: Mapping[str, bytes | Path], revision: str = "main") -> str:
        """Makes a commit, with these files and no others, and has `revision` stand for it; returns its hash.

        The repository, `owner/name`, is made if there is none.
        """
        entries = {}
        for path, data in sorted(files.items()):
            blob = Blob(data, path.endswith(_LARGE) or isinstance(data, Path))
            entries[path] = Entry(blob, blob.etag)
        commit = hashlib.sha1(f"{name} {next(self._commits)}".encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository())
        repository.commits[commit] = entries
        repository.revisions[revision] = commit
        return commit

    def __call__(self, request: Request) -> Response:
        # A revision may have slashes, which are escaped.
        parts = [unquote(part) for part in request.target.partition("?")[0].strip("/").split("/")]
        if parts[:2] == ["api", "models"] and len(parts) > 2 and parts[2] in self.moved:
            rest = request.target.removeprefix(f"/api/models/{parts[2]}")
            return Response(307, {"Location": f"/api/models/{self.moved[parts[2]]}{rest}"})
        try:
            match parts:
                case ["api", "models", owner, name]:
                    return self._info(request, f"{owner}/{name}", "main")
                case ["api", "models", owner, name, "revision", revision]:
                    return self._info(request, f"{owner}/{name}", revision)
                case ["api", "models", owner, name, "tree", revision, *path]:
                    return self._tree(request, f"{owner}/{name}", revision, "/".join(path))
                case ["api", "models", owner, name, "paths-info", revision]:
                    return self._paths(request, f"{owner}/{name}", revision)
                case ["api", "resolve-cache", "models", owner, name, commit, *path]:
                    return self._resolve(request, f"{owner}/{name}", commit, "/".join(path), redirect=False)
                case [owner, name, "resolve", revision, *path]:
                    redirect = self.redirects_small
                    return self._resolve(request, f"{owner}/{name}", revision, "/".join(path), redirect=redirect)
        except _Refused as refused:
            return refused.response
        return Response(404)

    def _repository(self, request: Request, name: str, revision: str) -> tuple[Repository, str, dict[str, Entry]]:
        """What a revision stands for, for who may know."""
        user = _user(request)
        repository = self.repositories.get(name)
        if repository is None or (repository.private and user != TOKEN):
            # To somebody without a name the Hub does not say whether there is such a repository.
            if user is None:
                raise _Refused(401, None, "Invalid username or password.")
            raise _Refused(404, "RepoNotFound", "Repository not found")
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, commit, repository.commits[commit]

    def _info(self, request: Request, name: str, revision: str) -> Response:
        repository, commit, entries = self._repository(request, name, revision)
        siblings = []
        for path, entry in entries.items():
            sibling: dict[str, object] = {"rfilename": path}
            if "blobs" in request.query:
                sibling |= {"size": entry.blob.nbytes, "blobId": entry.etag[:40]}
                if entry.blob.large:
                    facts = {"sha256": entry.etag, "size": entry.blob.nbytes, "pointerSize": _POINTER_BYTES}
                    sibling["lfs"] = facts
            siblings.append(sibling)
        return _json(
            {
                "id": name,
                "modelId": name,
                "author": name.partition("/")[0],
                "sha": commit,
                "lastModified": "2025-01-01T00:00:00.000Z",
                "private": repository.private,
                "gated": "auto" if repository.gated else False,
                "disabled": False,
                "tags": [],
                "siblings": siblings,
            }
        )

    def _tree(self, request: Request, name: str, revision: str, below: str) -> Response:
        _, commit, entries = self._repository(request, name, revision)
        found = _tree(entries)
        if below and below not in found:
            raise _Refused(404, "EntryNotFound", f"{below} does not exist on {revision!r}", **{"X-Repo-Commit": commit})
        recursive = request.query.get("recursive", "").lower() in ("1", "true")
        depth = len(PurePosixPath(below).parts)
        shown = [
            facts
            for path, facts in found.items()
            if PurePosixPath(path).is_relative_to(below)
            and (len(PurePosixPath(path).parts) > depth if recursive else len(PurePosixPath(path).parts) == depth + 1)
        ]
        start = int(request.query.get("cursor", 0))
        stop = start + min(self.page_entries, int(request.query.get("limit", self.page_entries)))
        response = _json(shown[start:stop])
        if stop < len(shown):
            query = urlencode({**request.query, "cursor": stop})
            url = f"http://{request.headers['Host']}{request.target.partition('?')[0]}?{query}"
            response.headers["Link"] = f'<{url}>; rel="next"'
        return response

    def _paths(self, request: Request, name: str, revision: str) -> Response:
        _, _, entries = self._repository(request, name, revision)
        if "json" in request.headers.get("Content-Type", ""):
            asked = json.loads(request.body)["paths"]
        else:
            asked = parse_qs(request.body.decode())["paths"]
        found = _tree(entries)
        return _json([found[path] for path in asked if path in found])

    def _resolve(self, request: Request, name: str, revision: str, path: str, *, redirect: bool) -> Response:
        repository, commit, entries = self._repository(request, name, revision)
        user = _user(request)
        if repository.gated and user != TOKEN:
            why = "Please log in." if user is None else "You are not in the authorized list."
            raise _Refused(401 if user is None else 403, "GatedRepo", f"Access to model {name} is restricted. {why}")
        headers = {"X-Repo-Commit": commit}
        if path not in entries:
            raise _Refused(404, "EntryNotFound", "Entry not found", **headers)
        entry = entries[path]
        linked = headers | {"X-Linked-Size": str(entry.blob.nbytes), "X-Linked-Etag": f'"{entry.etag}"'}
        if entry.blob.large:
            return Response(302, linked | {"Location": self._network_url + self._network.link(entry)})
        if redirect:
            location = f"/api/resolve-cache/models/{name}/{commit}/{quote(path)}?etag={quote(entry.etag)}"
            return Response(307, linked | {"Location": location})
        return read(request, Object(entry.blob.nbytes, entry.etag, 0.0, entry.blob.part, headers))


class Network:
    """The app that large files come from. Its attributes may be set at any time."""

    def __init__(self) -> None:
        # Requests that one link is good for; None for any number.
        self.uses: int | None = None
        self._links: dict[str, tuple[Entry, int]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def link(self, entry: Entry) -> str:
        """A signed path to a file."""
        signature = hashlib.sha256(f"secret {next(self._numbers)}".encode()).hexdigest()
        with self._lock:
            self._links[signature] = entry, 0
        return f"/repos/{entry.etag}?Expires={int(time.time()) + 3600}&Signature={signature}&Key-Pair-Id=K1"

    def expire(self) -> None:
        """Makes all links invalid that there are."""
        with self._lock:
            self._links.clear()

    def __call__(self, request: Request) -> Response:
        if "Authorization" in request.headers:
            return _json({"error": "the credentials of the Hub were sent to another host"}, 400)
        with self._lock:
            entry, used = self._links.get(request.query.get("Signature", ""), (None, 0))
            if entry is None or request.path != f"/repos/{entry.etag}" or (self.uses is not None and used >= self.uses):
                return Response(
                    403, {"Content-Type": "application/xml"}, Bytes(b"<Error><Code>AccessDenied</Code></Error>")
                )
            self._links[request.query["Signature"]] = entry, used + 1
        return read(request, Object(entry.blob.nbytes, entry.etag, 0.0, entry.blob.part))


def _user(request: Request) -> str | None:
    """The token of who asks; None without one."""
    header = request.headers.get("Authorization")
    if header is None:
        return None
    if header not in (f"Bearer {TOKEN}", f"Bearer {STRANGER}"):
        raise _Refused(401, None, "Invalid credentials in Authorization header")
    return header.removeprefix("Bearer ")


def _tree(entries: Mapping[str, Entry]) -> dict[str, dict[str, object]]:
    """Files and the directories that they make, by path, in order."""
    found: dict[str, dict[str, object]] = {}
    for path, entry in entries.items():
        for parent in PurePosixPath(path).parents[:-1]:
            oid = hashlib.sha1(str(parent).encode()).hexdigest()
            found[str(parent)] = {"type": "directory", "oid": oid, "size": 0, "path": str(parent)}
        found[path] = {"type": "file", "path": path, **entry.facts()}
    return dict(sorted(found.items()))


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, {"Content-Type": "application/json", **(headers or {})}, Bytes(json.dumps(value).encode()))
