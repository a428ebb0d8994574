"""Paths and URLs as text; every path from a user passes through this module."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from orbax_safetensors.errors import MissingError, SafetensorsError, StorageError, TargetTypeError
from orbax_safetensors.storage.whereabouts import similar, unfinished

PathLike = str | os.PathLike[str]

S3 = ("s3", "s3a")
GCS = ("gs",)
AZURE = ("az", "azure", "abfs", "abfss", "adl")
HTTP = ("http", "https")
HUB = ("hf",)
BUCKETS = (*S3, *GCS, *AZURE)
SCHEMES = (*BUCKETS, *HTTP, *HUB)

_COLLAPSED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)(.*)", re.DOTALL)

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")
_HUB_FORM = "hf://owner/name[@revision][/path]"
_OTHER_KINDS = ("datasets", "spaces", "kernels", "buckets")
# Revisions with a slash that need not be escaped.
_REFS = re.compile(r"refs/(?:convert/[\w.-]+|pr/\d+)(?=/|$)")
# A path that may stand for a repository, and not for a file.
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.safetensors)", re.ASCII)
# What Python makes of the bytes of an argument that are not UTF-8: no request can name them.
_NOT_TEXT = re.compile("[\ud800-\udfff]")
_PART = re.compile(r"[\w.-]+", re.ASCII)


def as_text(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """Return a path, with the home directory for `~`, or a URL.

    Raises `StorageError` if it is empty, a URL in which `pathlib` has left out a slash, one that has credentials but
    should not, or one that is not text, and `TargetTypeError` if it is not a path.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise TargetTypeError(f"path: expected a str or an os.PathLike, found {path!r:.200}")
    text = os.fsdecode(path)
    if not text:
        raise StorageError("expected a path or a URL, found an empty text")
    if collapsed := _COLLAPSED.fullmatch(text):
        scheme, rest = collapsed.groups()
        raise StorageError(
            f"{shown(text)}: is what pathlib makes of {shown(f'{scheme}://{rest}')}; pass a URL as a str, and a path "
            f"with this beginning as ./{shown(text)}"
        )
    _check_credentials(text)
    if is_url(text) and _NOT_TEXT.search(text):
        raise StorageError(f"{shown(text)}: is a URL that is not text: it has bytes that are not UTF-8")
    return os.path.expanduser(text)


def shown(path: str) -> str:
    """Return a path for messages: a URL without its query, user and password; only its scheme if it has no host."""
    if not is_url(path) and not _COLLAPSED.fullmatch(path):
        return path
    scheme, _, rest = path.partition(":")
    slashes = rest[: len(rest) - len(rest.lstrip("/"))]
    host, slash, key = rest.lstrip("/").partition("/")
    if scheme not in (*AZURE, *HUB) or ":" in host:  # there, the name of a container or a repository is before the @
        host = host.rpartition("@")[2]
    host, query, _ = host.partition("?")
    if not _HOST.fullmatch(host):  # the beginning of a password that has a slash stands where the port should be
        return f"{scheme}:{slashes}..."
    below = host if query else f"{host}{slash}{key}".partition("?")[0]
    return f"{scheme}:{slashes}{below.partition('#')[0] if scheme in HTTP else below}"


def _check_credentials(url: str) -> None:
    """Raise `StorageError` if a URL of a bucket or a repository has credentials: these would be part of its name."""
    scheme, _, rest = url.partition("://")
    name = rest.partition("/")[0]
    in_name = ":" in name or ("@" in name and scheme in (*S3, *GCS))
    if scheme in (*S3, *GCS, *AZURE, *HUB) and (in_name or re.search(r"\?[^/]*=", rest)):
        raise StorageError(
            f"{shown(url)}: credentials are not taken from a URL of {scheme}://, which has no user, password or query; "
            "pass them as storage_options, or in the environment's variables"
        )


def is_url(path: str) -> bool:
    """Return whether a path is a URL, of any scheme."""
    return "://" in path


def absolute_path(path: PathLike) -> str:
    """Return an absolute path without `..`, or a URL without a slash at its end.

    A symbolic link at the end stays. Raises `StorageError` if a URL has only a scheme, if the working directory of a
    relative path is gone, or if a `..` follows something other than a directory.
    """
    path = as_text(path)
    if is_url(path):
        scheme, _, rest = path.partition("://")
        if scheme in SCHEMES and not rest.partition("/")[0]:
            raise StorageError(f"{shown(path)}: expected a name after {scheme}://")
        return path.rstrip("/")
    try:
        named = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise StorageError(f"{path}: cannot be a path: {error.reason}") from error
    if b"\0" in named:
        raise StorageError(f"{path}: cannot be a path: it has a NUL")
    try:
        return os.path.abspath(_without_parents(path))
    except MissingError:
        raise
    except FileNotFoundError as error:
        raise StorageError(f"{path}: is in the working directory, which was deleted") from error


def is_below(path: str, directory: str) -> bool:
    """Return whether `path` is `directory` or in it, whatever links lead there."""
    inner, outer = os.path.realpath(path), os.path.realpath(directory)
    return os.path.commonpath([inner, outer]) == outer


def _without_parents(path: str) -> str:
    """Return a path without `..`: as for the kernel, it is the parent of what a link before it leads to.

    `os.path.abspath` would take away the name of the link instead.
    """
    parts = path.split("/")
    if ".." not in parts:
        return path
    end = len(parts) - parts[::-1].index("..")
    above = "/".join(parts[:end])
    try:
        os.stat(above)  # `realpath` takes `..` for the parent of a file and of nothing, too
    except (OSError, ValueError) as error:
        kind = MissingError if isinstance(error, FileNotFoundError) else StorageError
        raise kind(f"{path}: {above}: {getattr(error, 'strerror', error)}") from error
    return "/".join((os.path.realpath(above), *parts[end:]))


def check_one_store(storage_options: Mapping[str, Any] | None, *paths: Any) -> None:
    """Raise `SafetensorsError` if options would go to several stores: none may see another's, or knows them.

    What is not a URL has no use for options.
    """
    urls = [path for path in paths if isinstance(path, str) and is_url(path)]
    stores = {_store_name(path): shown(path) for path in urls}
    if storage_options and len(stores) > 1:
        raise SafetensorsError(
            f"storage_options are for one store, and {' and '.join(stores.values())} are in different ones: set the "
            "environment's variables for them instead"
        )


def _store_name(url: str) -> str:
    """Return a name for the store of a URL: its kind, or the name of an HTTP server."""
    scheme, _, rest = url.partition("://")
    if scheme in HTTP:
        return rest.partition("/")[0]
    return next((kind[0] for kind in (S3, GCS, AZURE, HUB) if scheme in kind), scheme)


@dataclass(frozen=True)
class HubPath:
    """A file or directory of a model's repository: `path` in it is empty for its root, and has no slash at its ends."""

    repository: str
    revision: str
    path: str

    @classmethod
    def parse(cls, url: str) -> HubPath:
        """Return what `url` names. Without a revision it is `main`; slashes in one are escaped, as in `@feature%2Fx`.

        A repository without an owner, as `hf://gpt2`, is known by the end of the URL or its `@`. Raises `StorageError`
        if the URL is not one of a model.
        """
        text = url.removeprefix("hf://").rstrip("/")
        kind, _, rest = text.partition("/")
        if kind in _OTHER_KINDS:
            raise StorageError(f"{shown(url)}: expected a model, {_HUB_FORM}, found one of the {kind}")
        if kind == "models":
            text = rest
        repository, at, rest = text.partition("@")
        revision = "main"
        if at and repository.count("/") <= 1:
            ref = _REFS.match(rest)
            escaped = ref[0] if ref else rest.partition("/")[0]
            revision, path = unquote(escaped), rest[len(escaped) :]
        else:  # an @ further on is part of a file's name
            owner, _, rest = text.partition("/")
            name, _, path = rest.partition("/")
            repository = f"{owner}/{name}" if name else owner
        path = path.strip("/")
        named = all(_PART.fullmatch(part) and part.strip(".") for part in repository.split("/"))
        if not named or not revision or any(part in ("", ".", "..") for part in path.split("/") if path):
            raise StorageError(f"{shown(url)}: expected {_HUB_FORM}")
        return cls(repository, revision, path)


def missing(path: str) -> str:
    """Return what is wrong with a path that does not exist, with the URL of the repository that it may stand for."""
    if os.path.islink(path):
        return f"is a link to {os.path.realpath(path)}, which is gone"
    try:
        name = os.path.relpath(path)
    except OSError:  # the working directory was deleted
        name = path
    if _NAME.fullmatch(name):
        return f"no such directory{unfinished(path) or f'; for the Hub write hf://{name}'}"
    return f"no such file or directory{unfinished(path) or similar(path)}"
