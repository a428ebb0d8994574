"""Files of the file systems that `fsspec` knows, for URLs that obstore does not know: to be read.

A file system of fsspec promises neither that a file stays as it was opened nor that a new one appears whole. So changes
are noticed once all has been read, and nothing is written.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from fsspec import get_filesystem_class
from fsspec.core import url_to_fs

from orbax_safetensors.errors import MissingError, SafetensorsError, StorageError
from orbax_safetensors.storage.event_loop import in_thread
from orbax_safetensors.storage.paths import shown
from orbax_safetensors.storage.remote import COST, RemoteFile, Request, ServerStore, changed
from orbax_safetensors.storage.retries import RefusedError, Retries, WrongAnswerError, safe_reason, secrets_of
from orbax_safetensors.storage.store import UNKNOWN, Stamp

_T = TypeVar("_T")

# What file systems call the state of a file, the surest first.
_VERSIONS = ("ETag", "etag", "e_tag", "mtime", "modified", "last_modified", "LastModified", "created")

# For these there are paths.
_LOCAL = ("file", "local")


def knows(url: str) -> bool:
    """Return whether fsspec has a file system for a URL that is not of this machine's files or of several URLs."""
    scheme = url.partition("://")[0]
    if scheme in _LOCAL or "::" in url:
        return False
    try:
        get_filesystem_class(scheme)
    except ValueError:
        return False
    except ImportError:  # to reach it will say what is missing
        pass
    return True


class FsspecFile(RemoteFile):
    """A file that is open for reading; see `store.File`."""

    def __init__(self, path: str, stamp: Stamp, request: Request, look: Callable[[], Stamp]) -> None:
        """Open a file; `look` returns its state now."""
        super().__init__(path, stamp, None, request, COST)
        self._look = look

    def check(self, stamp: Stamp) -> None:
        """Raise `StorageError` if the file is in another state than `stamp`."""
        if (found := self._look()) != stamp:
            raise changed(self.path, stamp, f"{found.nbytes} bytes of version {found.version}")


class FsspecStore(ServerStore):
    """The files of one file system; see `store.Store`."""

    def __init__(self, url: str, options: Mapping[str, Any], retries: Retries) -> None:
        """Reach the file system of `url`, with `options` for it; `StorageError` if that fails."""
        path = shown(url).rstrip("/")
        super().__init__("/".join(path.split("/")[:3]), retries)
        self._secrets = secrets_of(options)
        key, name, fault = self._key(path), "", ""
        try:
            self._secrets += _secrets(url)
            self._files, name = url_to_fs(url, **options)
        except Exception as error:  # no file system says what it raises
            fault = self._said(error)
        name = name.rstrip("/")
        if not name.endswith(key):
            fault = fault or "it knows the path by another name"
        # What the names of files begin with: some file systems keep the name of a server, and some a slash.
        self._above = name.removesuffix(key) if key else f"{name}/"
        # Raised outside the handler: the error may hold a secret.
        if fault:
            raise StorageError(f"{path}: cannot be reached by fsspec: {fault}")
        # Only asynchronous file systems may be used by several threads.
        self._turn = contextlib.nullcontext() if self._files.async_impl else threading.Lock()

    def list(self, path: str) -> dict[str, None] | None:
        """Return the names in a directory, sorted and without states; None if there are none."""
        name = self._name(path)

        def listed() -> dict[str, None]:
            self._files.invalidate_cache()
            entries = {other.rstrip("/") for other in self._files.ls(name, detail=False)} - {name}
            return dict.fromkeys(sorted(other.rpartition("/")[2] for other in entries))

        try:
            return self._requests.run(f"{path}: listing", self._ask(path, "listing", listed)) or None
        except FileNotFoundError:
            return None

    def open(self, path: str, stamp: Stamp | None = None) -> FsspecFile:
        """Open a file with a request for its state, or without a request if that is known."""
        look = partial(self._look, path)
        return FsspecFile(path, look() if stamp is None else stamp, partial(self._fetch, path), look)

    def _look(self, path: str) -> Stamp:
        """Return the state of a file now."""

        def facts() -> dict[str, Any]:
            self._files.invalidate_cache()
            return dict(self._files.info(self._name(path)))

        try:
            info = self._requests.run(f"{path}: opening", self._ask(path, "opening", facts))
        except FileNotFoundError:
            info = {}
        if info.get("type") != "file":
            raise MissingError(f"{path}: cannot be opened: there is no such file")
        if not (isinstance(nbytes := info.get("size"), int) and 0 <= nbytes < 2**63):
            raise StorageError(f"{path}: cannot be opened: its file system does not say how large it is")
        return Stamp(nbytes, next((f"{key} {info[key]}" for key in _VERSIONS if info.get(key)), UNKNOWN))

    async def _fetch(self, path: str, offset: int, nbytes: int) -> bytes:
        def content() -> bytes:
            data = bytes(self._files.cat_file(self._name(path), offset, offset + nbytes))
            if len(data) != nbytes:
                raise WrongAnswerError(f"the file system returned {len(data)} bytes instead")
            return data

        try:
            return await self._ask(path, f"reading {nbytes} bytes at offset {offset}", content)
        except FileNotFoundError:
            raise MissingError(f"{path}: changed while it was in use: there is no such file any more") from None

    def _name(self, path: str) -> str:
        return (self._above + self._key(path)).rstrip("/")

    async def _ask(self, path: str, verb: str, function: Callable[[], _T]) -> _T:
        """Return what a function of fsspec returns; one that blocks. Retries after lost connections."""

        def in_turn() -> _T:
            with self._turn:
                return function()

        async def attempt() -> _T:
            fault: Exception
            try:
                return await in_thread(in_turn)
            except (SafetensorsError, FileNotFoundError, WrongAnswerError):
                raise
            except (ConnectionError, TimeoutError) as error:
                fault = RefusedError(self._said(error))
            except Exception as error:  # no file system says what it raises
                fault = StorageError(f"{path}: {verb} failed: {self._said(error)}")
            raise fault

        return await self.retries.run(path, verb, attempt)

    def _said(self, error: Exception) -> str:
        return f"{type(error).__name__}: {safe_reason(error, self._secrets)}"


def _secrets(url: str) -> list[str]:
    """Return the password and the query of a URL."""
    parts = urlsplit(url)
    password = parts.netloc.rpartition("@")[0].partition(":")[2]
    return [secret for secret in (password, unquote(password), parts.query) if secret]
