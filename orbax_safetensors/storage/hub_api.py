"""What `huggingface_hub` tells of a repository: the commit of a revision, its files, and where their bytes are.

Tokens, redirects within the Hub, proxies, certificates, offline mode and the cache are its business. Its errors end
here, because they hold requests with the token.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.storage.event_loop import in_thread
from orbax_safetensors.storage.http_options import HttpOptions
from orbax_safetensors.storage.hub_digests import sha256_of
from orbax_safetensors.storage.links import origin
from orbax_safetensors.storage.paths import HubPath
from orbax_safetensors.storage.retries import RefusedError, WrongAnswerError

_T = TypeVar("_T")

_NO_NETWORK = "no network? pass a local path, or set HF_HUB_OFFLINE=1 for your cache"

# What a checkpoint can be made of: a snapshot in the cache without other files of its commit is complete.
_CHECKPOINT_FILES = ["*.safetensors", "*.json"]


@dataclass(frozen=True)
class Commit:
    """A commit of a repository: the name that the Hub has for the repository, the commit's hash, its files."""

    repository: str
    sha: str
    files: frozenset[str]


@dataclass(frozen=True)
class FileAddress:
    """Where a file's bytes are.

    Attributes:
      url: where ranges of it can be had; a secret, as it may be signed.
      headers: what goes with requests to `url`, secrets among them.
      nbytes: of the file.
      sha256: of the file, if it is a large one.
    """

    url: str = field(repr=False)
    headers: Mapping[str, Any] = field(repr=False)
    nbytes: int
    sha256: str | None


class HubApi:
    """The Hub at an endpoint, as the owner of a token sees it, or anybody without one."""

    def __init__(self, endpoint: str, token: Any, http: HttpOptions) -> None:
        """Take the token of `huggingface_hub` if it is None, and none if it is False.

        Of `http`, headers, the name of this program and the timeout count.
        """
        self._endpoint = endpoint
        self._headers = _headers(token, http.client)
        self._token = self._headers.get("authorization", "").removeprefix("Bearer ")
        self._timeout, self._seconds = http.pause_seconds, http.request_seconds
        self._program = http.client.get("user_agent", "orbax-safetensors")
        self._api = HfApi(endpoint=endpoint, token=False, user_agent=self._program, headers=self._headers)

    async def commit(self, named: HubPath) -> Commit:
        """Return the commit that a revision stands for now; in offline mode, that which it stands for in the cache."""
        try:
            info = await self._ask(
                named.repository,
                named.revision,
                lambda: self._api.model_info(named.repository, revision=named.revision, timeout=self._timeout),
            )
        except OfflineModeIsEnabled:
            return _cached_commit(named)
        name, sha, siblings = info.id, info.sha or "", info.siblings
        files = frozenset(sibling.rfilename for sibling in siblings or ())
        if siblings is None or not all(isinstance(text, str) for text in (name, sha, *files)):
            raise _not_understood()
        if not (re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and re.fullmatch("[0-9a-f]+", sha)):
            raise _not_understood()
        return Commit(name, sha, files)

    async def address(self, commit: Commit, file: str) -> FileAddress:
        """Return where a file of a commit is now."""
        repository, sha = commit.repository, commit.sha
        url = hf_hub_url(repository, file, revision=sha, endpoint=self._endpoint)
        metadata = await self._ask(
            repository,
            sha,
            lambda: get_hf_file_metadata(
                url, token=False, headers=self._headers, user_agent=self._program, timeout=self._timeout
            ),
        )
        if metadata.commit_hash not in (None, sha):
            raise WrongAnswerError(f"the Hub gave the file as of commit {metadata.commit_hash}")
        of_the_hub = False
        with contextlib.suppress(ValueError):  # of a link that cannot be used, as its user will say
            of_the_hub = origin(metadata.location) == origin(self._endpoint)
        # Older versions give the length of an answer that only leads elsewhere, which is none.
        if metadata.size is None or not 0 <= metadata.size < 2**63 or (metadata.size == 0 and not of_the_hub):
            raise WrongAnswerError("the Hub does not say how large the file is")
        headers = self._headers if of_the_hub else {}
        return FileAddress(metadata.location, headers, metadata.size, sha256_of(metadata.etag))

    async def _ask(self, repository: str, revision: str, function: Callable[[], _T]) -> _T:
        """Return what a function of `huggingface_hub` returns; one that blocks.

        Raises `RefusedError`, `WrongAnswerError`, `StorageError` or `OfflineModeIsEnabled`.
        """
        fault: Exception
        try:
            return await in_thread(function, self._seconds)
        except OfflineModeIsEnabled:
            fault = OfflineModeIsEnabled()
        except SafetensorsError:  # which is a ValueError, and no answer of the Hub
            raise
        except HfHubHTTPError as error:
            fault = self._refused(error, repository, revision)
        except HFValidationError:
            fault = StorageError(f"hf://{repository}: is not a name that a repository of the Hub can have")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            fault = _not_understood()
        except Exception as error:  # of an HTTP client that is not the same in all versions of `huggingface_hub`
            kind = type(error).__name__
            text = "no answer of the Hub in time" if "Timeout" in kind else f"no usable answer of the Hub ({kind})"
            fault = RefusedError(f"{text}; {_NO_NETWORK}" if "Connect" in kind else text)
        # Out of the handler: the error holds the request.
        raise fault

    def _refused(self, error: HfHubHTTPError, repository: str, revision: str) -> RefusedError:
        """Say what the Hub said, and what one can do about it."""
        status, headers = error.response.status_code, error.response.headers
        said, code = self._shown(headers.get("X-Error-Message", "")), headers.get("X-Error-Code", "")
        page = f"{self._endpoint}/{repository}"
        wait = _wait(headers) if status in (429, 503) else 0.0
        hint = f"it asks to wait for {wait:.0f} s" if wait else ""
        if isinstance(error, GatedRepoError):
            hint = f"ask for access at {page}" + ("" if self._token else ", and set HF_TOKEN")
        elif isinstance(error, RevisionNotFoundError):
            hint = f"{page} has no revision {revision!r}"
        elif status == 401 and said.startswith("Invalid credentials"):
            hint = "the token is not valid; it is that of HF_TOKEN or of `hf auth login`"
        elif isinstance(error, RepositoryNotFoundError) or status == 401:
            hint = f"there is no {page}, or it is private"
            hint += ", and the owner of the token may not see it" if self._token else ": then set HF_TOKEN"
        text = f"the Hub answered {status}" + (f" {code}" if code.isalnum() else "") + (f" ({said})" if said else "")
        return RefusedError(f"{text}: {hint}" if hint else text, status, wait)

    def _shown(self, text: str) -> str:
        """Return what the Hub said in one line, without secrets that it might repeat."""
        if self._token:
            text = text.replace(self._token, "***")
        return re.sub(r"\?\S+", "?...", " ".join(text.split()))[:300]


def cached_copy(commit: Commit, file: str) -> str | None:
    """Return where the user's cache has a file of a commit; None if it has none."""
    try:
        copy = try_to_load_from_cache(commit.repository, file, revision=commit.sha)
    except OSError:  # a cache that this user may not read
        return None
    return copy if isinstance(copy, str) else None


def _cached_commit(named: HubPath) -> Commit:
    try:
        root = snapshot_download(
            named.repository, revision=named.revision, local_files_only=True, allow_patterns=_CHECKPOINT_FILES
        )
    except (OSError, ValueError):
        pass
    else:
        files = frozenset(
            os.path.relpath(os.path.join(directory, name), root)
            for directory, _, names in os.walk(root)
            for name in names
        )
        return Commit(named.repository, os.path.basename(root), files)
    raise StorageError(
        f"hf://{named.repository}@{named.revision}: is not, or not all of it, in the cache, and HF_HUB_OFFLINE is set: "
        f"{constants.HF_HUB_CACHE}"
    )


def endpoint(option: Any) -> str:
    """Return the Hub's URL: what is given, or `HF_ENDPOINT`, or that of the public Hub."""
    url = option or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    if not isinstance(url, str) or not re.fullmatch(r"https?://[^/@?#\s]+(/[^@?#\s]*)?", url):
        raise SafetensorsError("the Hub's endpoint, HF_ENDPOINT, must be a URL like https://huggingface.co")
    return url.rstrip("/")


def _headers(token: Any, client: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers of all requests to the Hub; `SafetensorsError` if the token cannot be had or sent."""
    if token is None and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        token = _stored_token()
    if not (token is None or token is False or isinstance(token, str)):
        raise SafetensorsError("storage_options: token must be text, or False to send none")
    text = (token or "").strip()
    if not (text.isascii() and text.isprintable()):
        raise SafetensorsError("the token of the Hub has characters that no token has")
    headers = {name.lower(): value for name, value in client.get("default_headers", {}).items()}
    return headers | ({"authorization": f"Bearer {text}"} if text else {})


def _stored_token() -> str | None:
    try:
        return get_token()
    except Exception as error:  # a login may have to be renewed
        kind = type(error).__name__
    raise SafetensorsError(f"huggingface_hub cannot get the token of the Hub ({kind})")


def _not_understood() -> WrongAnswerError:
    return WrongAnswerError("the Hub's answer about the repository cannot be read")


def _wait(headers: Mapping[str, str]) -> float:
    """Return the seconds after which the Hub accepts the next request, 0 if it does not say."""
    limited = re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d{1,6})\b", headers.get("RateLimit", ""))
    after = re.fullmatch(r"\s*(\d{1,6})\s*", headers.get("Retry-After", ""))
    seconds = limited or after
    return float(seconds[1]) if seconds else 0.0
