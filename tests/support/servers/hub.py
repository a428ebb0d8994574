"""The Hugging Face Hub's protocol for reading models, and the network that delivers its large files.

Two servers, as there: the Hub knows repositories and their revisions. Small files it gives itself; for large ones it
signs links to another host, whose links expire and which must not be sent the credentials of the Hub. Statuses and
headers are those that `huggingface_hub` goes by. Everybody may read: a test has the server give the Hub's refusals.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from tests.support.servers.objects import Object, read
from tests.support.servers.server import Request, Response

# Of the owner of all repositories, which nobody else must see.
TOKEN = "hf_owner"
# Files that are kept outside of the repository, and come from the network.
_LARGE = (".safetensors", ".bin")


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

    def part(self, start: int, stop: int) -> bytes:
        if isinstance(self.data, bytes):
            return self.data[start:stop]
        with open(self.data, "rb") as file:
            return os.pread(file.fileno(), stop - start, start)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file of a commit."""

    blob: Blob
    etag: str


@dataclasses.dataclass
class Repository:
    """A model's files in each of its commits, and what its branches and tags stand for."""

    commits: dict[str, dict[str, Entry]] = dataclasses.field(default_factory=dict)
    revisions: dict[str, str] = dataclasses.field(default_factory=dict)


class Hub:
    """The app of the Hub."""

    def __init__(self, network: Network, network_url: str) -> None:
        self.repositories: dict[str, Repository] = {}
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
        match parts:
            case ["api", "models", owner, name, "revision", revision]:
                return self._info(f"{owner}/{name}", revision)
            case ["api", "models", owner, name, "tree", revision]:
                return self._tree(f"{owner}/{name}", revision)
            case ["api", "resolve-cache", "models", owner, name, commit, *path]:
                return self._resolve(request, f"{owner}/{name}", commit, "/".join(path), redirect=False)
            case [owner, name, "resolve", revision, *path]:
                return self._resolve(request, f"{owner}/{name}", revision, "/".join(path), redirect=True)
        return Response(404)

    def _entries(self, name: str, revision: str) -> tuple[str, dict[str, Entry]] | Response:
        """The commit that a revision stands for, and its files."""
        if (repository := self.repositories.get(name)) is None:
            return refused(404, "RepoNotFound", "Repository not found")
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            return refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def _info(self, name: str, revision: str) -> Response:
        found = self._entries(name, revision)
        if isinstance(found, Response):
            return found
        commit, entries = found
        facts = {"id": name, "sha": commit, "tags": [], "siblings": [{"rfilename": path} for path in entries]}
        return _json(facts)

    def _tree(self, name: str, revision: str) -> Response:
        """All files, without the directories that they make."""
        found = self._entries(name, revision)
        if isinstance(found, Response):
            return found
        return _json(
            [
                {"type": "file", "path": path, "oid": entry.etag[:40], "size": entry.blob.nbytes}
                for path, entry in found[1].items()
            ]
        )

    def _resolve(self, request: Request, name: str, revision: str, path: str, *, redirect: bool) -> Response:
        found = self._entries(name, revision)
        if isinstance(found, Response):
            return found
        commit, entries = found
        headers = {"X-Repo-Commit": commit}
        if (entry := entries.get(path)) is None:
            return refused(404, "EntryNotFound", "Entry not found", **headers)
        linked = headers | {"X-Linked-Size": str(entry.blob.nbytes), "X-Linked-Etag": f'"{entry.etag}"'}
        if entry.blob.large:
            return Response(302, linked | {"Location": self._network_url + self._network.link(entry)})
        if redirect:
            location = f"/api/resolve-cache/models/{name}/{commit}/{quote(path)}?etag={quote(entry.etag)}"
            return Response(307, linked | {"Location": location})
        return read(request, Object(entry.blob.nbytes, entry.etag, 0.0, entry.blob.part, headers))


class Network:
    """The app that large files come from."""

    def __init__(self) -> None:
        self._links: dict[str, Entry] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def link(self, entry: Entry) -> str:
        """A signed path to a file."""
        signature = hashlib.sha256(f"secret {next(self._numbers)}".encode()).hexdigest()
        with self._lock:
            self._links[signature] = entry
        return f"/repos/{entry.etag}?Expires=1&Signature={signature}"

    def expire(self) -> None:
        """Makes all links invalid that there are."""
        with self._lock:
            self._links.clear()

    def __call__(self, request: Request) -> Response:
        if "Authorization" in request.headers:
            return refused(400, "", "the credentials of the Hub were sent to another host")
        with self._lock:
            entry = self._links.get(request.query.get("Signature", ""))
        if entry is None or request.path != f"/repos/{entry.etag}":
            return Response(403, {"Content-Type": "application/xml"}, b"<Error><Code>AccessDenied</Code></Error>")
        return read(request, Object(entry.blob.nbytes, entry.etag, 0.0, entry.blob.part))


def refused(status: int, code: str, message: str, **headers: str) -> Response:
    """The Hub's refusal: what clients go by stands in headers."""
    return Response(status, headers | {"X-Error-Code": code, "X-Error-Message": message})


def _json(value: object) -> Response:
    return Response(200, {"Content-Type": "application/json"}, json.dumps(value).encode())
