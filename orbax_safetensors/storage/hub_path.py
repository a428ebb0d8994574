"""What an `hf://` URL names, by the grammar of `huggingface_hub.HfFileSystem`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote

from orbax_safetensors.errors import StorageError

SCHEME = "hf"

_FORM = "hf://owner/name[@revision][/path]"
_OTHER_KINDS = ("datasets", "spaces", "kernels", "buckets")
# Revisions with a slash that need not be escaped.
_REFS = re.compile(r"refs/(?:convert/[\w.-]+|pr/\d+)(?=/|$)")
# A path that may stand for a repository, and not for a file.
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.safetensors)", re.ASCII)
_PART = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class HubPath:
    """A file or directory of a model's repository: `path` in it is empty for its root, and has no slash at its ends."""

    repository: str
    revision: str
    path: str


def parse(url: str) -> HubPath:
    """Return what `url` names. Without a revision it is `main`; slashes in one are escaped, as in `@feature%2Fx`.

    A repository without an owner, as `hf://gpt2`, is known by the end of the URL or its `@`. Raises `StorageError`
    if the URL is not one of a model.
    """
    text = url.removeprefix(f"{SCHEME}://").rstrip("/")
    kind, _, rest = text.partition("/")
    if kind in _OTHER_KINDS:
        raise StorageError(f"{url}: expected a model, {_FORM}, found one of the {kind}")
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
        raise StorageError(f"{url}: expected {_FORM}")
    return HubPath(repository, revision, path)


def missing(path: str) -> str:
    """Return what is wrong with a path that does not exist, with the URL of the repository that it may stand for."""
    try:
        name = os.path.relpath(path)
    except OSError:  # the working directory was deleted
        name = path
    if _NAME.fullmatch(name):
        return f"no such directory; for the Hub write {SCHEME}://{name}"
    return "no such file or directory"
