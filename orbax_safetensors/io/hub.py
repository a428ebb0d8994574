"""Models on the Hugging Face Hub, read by range requests.

A revision is pinned to a commit once, and all files are of that commit. The Hub says where a large file is: behind a
signed link to another host, which is good for some time. It is used for all ranges until it is refused, so that the
Hub has one request for each file and not one for each range.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import obstore
from obstore import Bytes
from obstore.exceptions import BaseError
from obstore.store import HTTPStore

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.io import hub_path
from orbax_safetensors.io.background import Requests
from orbax_safetensors.io.hub_api import Contents, HubApi
from orbax_safetensors.io.remote import COST, HEAD_BYTES, READ_ONLY, RemoteFile, body, changed
from orbax_safetensors.io.retries import Retries, WrongAnswerError, status_of
from orbax_safetensors.io.store import Stamp

# What stores say of a link that has expired, which is no fault.
_EXPIRED = (400, 401, 403)


def hub_store(url: str, api: HubApi, client: Mapping[str, Any], retries: Retries) -> tuple[HubStore, str]:
    """The repository of an `hf://` URL at the commit that it stands for now, and the URL with that commit.

    `client` are the options of obstore's HTTP client. Raises `StorageError` where the Hub does not tell.
    """
    named = hub_path.parse(url)
    asked = retries.run(url, "asking the Hub", lambda: api.contents(named.repository, named.revision))
    try:
        contents = Requests().run(asked)
    except CancelledError:
        raise StorageError(f"{url}: asking the Hub was cancelled") from None
    store = HubStore(api, contents, client, retries)
    return store, f"{store.root}/{named.path}".rstrip("/")


@dataclass(frozen=True, eq=False)
class _Link:
    """Where ranges of a file can be had, as long as the link is good."""

    objects: HTTPStore


class HubStore:
    """The files of one commit; see `store.Store`. A path is an `hf://` URL with the commit as its revision."""

    maps = False
    lists = True
    whole = True
    writes = False

    def __init__(self, api: HubApi, contents: Contents, client: Mapping[str, Any], retries: Retries) -> None:
        """`client` are the options of obstore's HTTP client, with which links are followed."""
        self.root = f"{hub_path.SCHEME}://{contents.repository}@{contents.commit}"
        self.cost = COST
        self._api = api
        self._contents = contents
        self._client = client
        self._retries = retries
        self._requests = Requests()
        # Of the event loop's thread only.
        self._links: dict[str, _Link] = {}
        self._renewing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def _key(self, path: str) -> str:
        if path != self.root and not path.startswith(self.root + "/"):
            raise StorageError(f"{path}: is not below {self.root}")
        return path[len(self.root) + 1 :].strip("/")

    def list(self, path: str) -> list[str] | None:
        """Names in a directory of the repository, sorted; None where there is no such directory."""
        key = self._key(path)
        prefix = f"{key}/" if key else ""
        names = {file[len(prefix) :].partition("/")[0] for file in self._contents.files if file.startswith(prefix)}
        return sorted(names) if names or not key else None

    def open(self, path: str, stamp: Stamp | None = None) -> RemoteFile:
        """Opens a file with two requests, for the place and the first bytes; with none where its state is known."""
        key = self._key(path)
        if key not in self._contents.files:
            raise MissingError(f"{path}: cannot be opened: there is no such file in the repository")
        head: Bytes | None = None
        if stamp is None:
            try:
                stamp, head = self._requests.run(self._opened(path, key))
            except CancelledError:
                raise StorageError(f"{path}: opening was cancelled") from None
        return RemoteFile(path, stamp, head, partial(self._fetch, path, stamp), self.cost)

    def find(self, path: str) -> RemoteFile | None:
        """`open`, or None where there is no such file."""
        return self.open(path) if self._key(path) in self._contents.files else None

    def cancel(self) -> None:
        """Ends requests that open files."""
        self._requests.cancel()

    def create(self, path: str, nbytes: int | None = None, requests: int = 1) -> NoReturn:
        """Refused: the Hub takes commits, not files."""
        raise StorageError(f"{path}: {READ_ONLY}")

    def delete(self, path: str) -> NoReturn:
        """Refused, as `create` is."""
        raise StorageError(f"{path}: {READ_ONLY}")

    def sync(self, path: str) -> None:
        """Nothing to wait for."""

    async def _opened(self, path: str, key: str) -> tuple[Stamp, Bytes]:
        """A file's state and first bytes."""
        stamp = await self._place(path, key)
        if not stamp.nbytes:  # no range of it could be had
            return stamp, Bytes()
        return stamp, await self._fetch(path, stamp, 0, min(HEAD_BYTES, stamp.nbytes))

    async def _fetch(self, path: str, stamp: Stamp, offset: int, nbytes: int) -> Bytes:
        async def ranged(link: _Link) -> Bytes:
            try:
                answer = await obstore.get_async(link.objects, "", options={"range": (offset, offset + nbytes)})
            except FileNotFoundError:
                raise WrongAnswerError("the file is not where the Hub said that it is") from None
            if answer.meta["size"] != stamp.nbytes:
                raise WrongAnswerError(f"the server sent of a file of {answer.meta['size']} bytes instead")
            return await body(answer, offset, nbytes)

        async def attempt() -> Bytes:
            link = await self._link(path, stamp, None)
            try:
                return await ranged(link)
            except BaseError as error:
                if status_of(error) not in _EXPIRED:
                    raise
                return await ranged(await self._link(path, stamp, link))

        return await self._retries.run(path, f"reading {nbytes} bytes at offset {offset}", attempt)

    async def _link(self, path: str, stamp: Stamp, refused: _Link | None) -> _Link:
        """The link to a file, another one than was `refused`. The Hub is asked once for all who wait for it."""
        key = self._key(path)
        async with self._renewing[key]:
            link = self._links.get(key)
            if link is None or link is refused:
                found = await self._place(path, key)
                if found != stamp:
                    raise changed(path, stamp, f"{found.nbytes} bytes of version {found.version}")
            return self._links[key]

    async def _place(self, path: str, key: str) -> Stamp:
        """Asks the Hub for the place of a file, and keeps the link; returns the state of the file."""
        own = self._contents
        place = await self._retries.run(
            path, "asking the Hub", lambda: self._api.place(own.repository, own.commit, key)
        )
        # Headers are for the Hub: neither they nor the token go to where it sends us.
        client: Any = {**self._client, "default_headers": place.headers}
        try:
            objects = HTTPStore(place.url, client_options=client, retry_config={"max_retries": 0})
        except Exception:  # which would tell the link
            raise StorageError(f"{path}: the Hub gave a link that cannot be used") from None
        self._links[key] = _Link(objects)
        return Stamp(place.nbytes, place.etag)
