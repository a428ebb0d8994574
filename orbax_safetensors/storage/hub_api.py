"""What is asked of the Hugging Face Hub itself: what a repository holds, and where a file's bytes are.

The Hub gives small files itself and for large ones signs links to other hosts, to which its token must not go: so
redirects are followed within the Hub only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import quote

from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.storage.event_loop import in_thread
from orbax_safetensors.storage.redirects import Answer, Client
from orbax_safetensors.storage.retries import RefusedError, WrongAnswerError

_ENDPOINT = "https://huggingface.co"
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class Contents:
    """A commit of a repository, whatever it was found by: the repository's own name, the commit's hash, its files."""

    repository: str
    commit: str
    files: frozenset[str]


@dataclass(frozen=True)
class Place:
    """Where a file's bytes are, and which state of it these are.

    Attributes:
      url: where ranges of it can be had; a secret, as it may be signed.
      headers: what goes with requests to `url`, secrets among them.
      nbytes, etag: of the file, by which the Hub knows its content; where it tells none, the commit, which fixes it.
    """

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    nbytes: int
    etag: str


class HubApi:
    """The Hub at an endpoint, as the owner of a token sees it, or anybody without one."""

    def __init__(self, endpoint: str, token: str | None, client: Mapping[str, Any]) -> None:
        """Of `client`, options of obstore's HTTP client, timeouts, headers, the proxy and certificates count."""
        self.endpoint = endpoint
        self._token = token
        self._headers = dict(client.get("default_headers", {}))
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._client = Client("the Hub", self._headers, client)

    async def contents(self, repository: str, revision: str) -> Contents:
        """The commit that `revision` stands for now."""
        target = f"/api/models/{quote(repository)}/revision/{quote(revision, safe='')}"
        answer = await in_thread(lambda: self._client.ask("GET", self.endpoint + target, reads=True))
        if answer.status != 200:
            raise self._refused(answer, repository, revision)
        try:
            told = json.loads(answer.body)
            name, commit = told.get("id", repository), told["sha"]
            files = frozenset(sibling["rfilename"] for sibling in told["siblings"])
            if not (re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and re.fullmatch("[0-9a-f]+", commit)):
                raise ValueError
            if not all(isinstance(file, str) for file in files):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise WrongAnswerError("what the Hub tells of the repository cannot be understood") from None
        return Contents(name, commit, files)

    async def place(self, repository: str, commit: str, file: str) -> Place:
        """Where a file of a commit is now.

        Asked by HEAD and for no range: a link may be signed for the range that was asked for.
        """
        target = f"/{quote(repository)}/resolve/{quote(commit, safe='')}/{quote(file)}"
        answer = await in_thread(lambda: self._client.ask("HEAD", self.endpoint + target, reads=False))
        if answer.status != 200 and answer.link is None:
            raise self._refused(answer, repository, commit)
        linked = {name.lower(): text for given in answer.given for name, text in given.items()}
        if linked.get("x-repo-commit", commit) != commit:
            raise WrongAnswerError(f"the Hub gave the file as of commit {linked['x-repo-commit']}")
        nbytes = linked.get("x-linked-size", "" if answer.link else answer.headers.get("Content-Length", ""))
        if not nbytes.isdecimal():
            raise WrongAnswerError("the Hub does not tell the size of the file")
        etag = linked.get("x-linked-etag", answer.headers.get("ETag", commit)).removeprefix("W/").strip('"')
        if answer.link:
            return Place(answer.link, {}, int(nbytes), etag)
        return Place(answer.url, self._headers, int(nbytes), etag)

    def _refused(self, answer: Answer, repository: str, revision: str) -> RefusedError:
        """What the Hub said, and what one can do about it."""
        status, code = answer.status, answer.headers.get("X-Error-Code", "")
        said = self._shown(answer.headers.get("X-Error-Message", ""))
        page = f"{self.endpoint}/{repository}"
        wait = _wait(answer.headers) if status in (429, 503) else 0.0
        hint = f"it asks to wait for {wait:.0f} s" if wait else ""
        if code == "GatedRepo":
            hint = f"ask for access at {page}" + ("" if self._token else ", and set HF_TOKEN")
        elif code == "RevisionNotFound":
            hint = f"{page} has no revision {revision!r}"
        elif status == 401 and said.startswith("Invalid credentials"):
            hint = "the token is not valid; it is that of HF_TOKEN or of `hf auth login`"
        elif code == "RepoNotFound" or status == 401:
            hint = f"there is no {page}, or it is private"
            hint += ", and the owner of the token may not see it" if self._token else ": then set HF_TOKEN"
        text = f"the Hub answered {status}" + (f" {code}" if code.isalnum() else "") + (f" ({said})" if said else "")
        return RefusedError(f"{text}: {hint}" if hint else text, status, wait)

    def _shown(self, text: str) -> str:
        """What the Hub said, in one line and without secrets that it might repeat."""
        if self._token:
            text = text.replace(self._token, "***")
        return re.sub(r"\?\S+", "?...", " ".join(text.split()))[:300]


def endpoint(given: Any) -> str:
    """The Hub's URL: what was given, or `HF_ENDPOINT`, or that of the public Hub."""
    url = given or os.environ.get("HF_ENDPOINT") or _ENDPOINT
    if not isinstance(url, str) or not re.fullmatch(r"https?://[^/@?#\s]+(/[^@?#\s]*)?", url):
        raise SafetensorsError("the Hub's endpoint, HF_ENDPOINT, must be an URL like https://huggingface.co")
    return url.rstrip("/")


def token(given: Any) -> str | None:
    """The token to send: what was given; False for none; else what `huggingface_hub` would find.

    That is `HF_TOKEN`, or the file that a login has left, unless `HF_HUB_DISABLE_IMPLICIT_TOKEN` is set.
    """
    if given is False or (given is None and os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _TRUE):
        return None
    if given is None:
        given = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or _stored_token()
    if not isinstance(given, str):
        raise SafetensorsError("storage_options: token must be text, or False to send none")
    found = given.strip()
    if not (found.isascii() and found.isprintable()):
        raise SafetensorsError("the token of the Hub has characters that no token has")
    return found or None


def _stored_token() -> str:
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    path = os.environ.get("HF_TOKEN_PATH", os.path.join(home, "token"))
    try:
        return Path(os.path.expanduser(os.path.expandvars(path))).read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""


def _wait(headers: Message) -> float:
    """The seconds after which the Hub wants to be asked again, 0 where it does not say."""
    told = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d{1,6})\b", headers.get("RateLimit", ""))
    after = re.fullmatch(r"\s*(\d{1,6})\s*", headers.get("Retry-After", ""))
    found = told or after
    return float(found[1]) if found else 0.0
