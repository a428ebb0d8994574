"""Models on the Hugging Face Hub, read by range requests, or from the cache of the user who has downloaded them.

A revision is pinned to a commit once, and all files are of that commit. The Hub says where a large file is: behind a
signed link to another host, which is good for some time. It is used for all ranges until it is refused, so that the
Hub has one request for each file and not one for each range.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from obstore import Bytes

from orbax_safetensors.errors import MissingError
from orbax_safetensors.storage.event_loop import Requests
from orbax_safetensors.storage.http_options import HttpOptions
from orbax_safetensors.storage.hub_api import Commit, HubApi, cached_copy
from orbax_safetensors.storage.hub_digests import downloaded_sha256
from orbax_safetensors.storage.links import FileLink, Links, link_to
from orbax_safetensors.storage.local import LocalFile
from orbax_safetensors.storage.paths import HubPath
from orbax_safetensors.storage.remote import HEAD_BYTES, RemoteFile, ServerStore, body, changed
from orbax_safetensors.storage.retries import WrongAnswerError
from orbax_safetensors.storage.store import File, Stamp
from orbax_safetensors.storage.web import Client, link_within


def hub_store(url: str, api: HubApi, http: HttpOptions) -> tuple[HubStore, str]:
    """Return the repository of an `hf://` URL at the commit that it stands for now, and the URL with that commit.

    Raises `StorageError` if the Hub does not tell.
    """
    named = HubPath.parse(url)
    asking = http.retries.run(url, "asking the Hub", lambda: api.commit(named))
    commit = Requests().run(f"{url}: asking the Hub", asking)
    store = HubStore(api, commit, http)
    return store, f"{store.root}/{named.path}".rstrip("/")


class CachedFile(LocalFile):
    """A file of a commit in the user's cache. Its stamp is the commit's, the same in processes without such a cache."""

    def __init__(self, path: str, commit: str) -> None:
        """Open `path`, the copy in the cache; `StorageError` if it cannot be read."""
        super().__init__(path)
        self._on_disk = self.stamp
        self.stamp = Stamp(self.stamp.nbytes, commit)

    def check(self, stamp: Stamp) -> None:
        """Raise `StorageError` if the copy has changed, or is not as long as the file that `stamp` was taken of."""
        super().check(self._on_disk)
        if stamp != self.stamp:
            raise changed(self.path, stamp, f"{self.stamp.nbytes} bytes of version {self.stamp.version}")


class HubStore(ServerStore):
    """The files of one commit; see `store.Store`. A path is an `hf://` URL with the commit as its revision."""

    def __init__(self, api: HubApi, commit: Commit, http: HttpOptions) -> None:
        """Follow links as `http` says."""
        super().__init__(f"hf://{commit.repository}@{commit.sha}", http.retries)
        self._api = api
        self._commit = commit
        self._http = http
        self._links = Links()

    def list(self, path: str) -> dict[str, None] | None:
        """Return the names in a directory of the repository, sorted, without states; None if there is none."""
        key = self._key(path)
        prefix = f"{key}/" if key else ""
        names = {file[len(prefix) :].partition("/")[0] for file in self._commit.files if file.startswith(prefix)}
        return dict.fromkeys(sorted(names)) if names or not key else None

    def open(self, path: str, stamp: Stamp | None = None) -> File:
        """Open a file of the cache, or with two requests, for the address and the first bytes.

        No request is made if the file's state is known.
        """
        key = self._key(path)
        if key not in self._commit.files:
            raise MissingError(f"{path}: cannot be opened: there is no such file in the repository")
        if (copy := cached_copy(self._commit, key)) is not None:
            file = CachedFile(copy, self._commit.sha)
            try:
                file.check(stamp or file.stamp)
            except BaseException:
                file.close()
                raise
            return file
        head: Bytes | None = None
        if stamp is None:
            stamp, head = self._requests.run(f"{path}: opening", self._opened(path, key))
        return RemoteFile(path, stamp, head, partial(self._fetch, path, stamp), self.cost)

    def find(self, path: str) -> File | None:
        """Return `open`, or None if there is no such file."""
        return self.open(path) if self._key(path) in self._commit.files else None

    def sha256(self, path: str) -> str | None:
        """Return the digest of a large file, from the cache if a copy of the file is there, or from the Hub."""
        key = self._key(path)
        if (copy := cached_copy(self._commit, key)) is not None:
            return downloaded_sha256(copy)
        return self._run(path, "asking the Hub", lambda: self._api.address(self._commit, key)).sha256

    async def _opened(self, path: str, key: str) -> tuple[Stamp, Bytes]:
        """Return a file's state and first bytes."""
        stamp, link = await self._file_link(path, key)
        self._links.keep(key, link)
        if not stamp.nbytes:  # no range of it could be had
            return stamp, Bytes()
        return stamp, await self._fetch(path, stamp, 0, min(HEAD_BYTES, stamp.nbytes))

    async def _fetch(self, path: str, stamp: Stamp, offset: int, nbytes: int) -> Bytes:
        key = self._key(path)

        async def find() -> FileLink:
            now, link = await self._file_link(path, key)
            if now != stamp:
                raise changed(path, stamp, f"{now.nbytes} bytes of version {now.version}")
            return link

        async def ranged(link: FileLink) -> Bytes:
            try:
                answer = await link.get({"range": (offset, offset + nbytes)})
            except FileNotFoundError:
                raise WrongAnswerError("the file is not where the Hub said that it is") from None
            if answer.meta["size"] != stamp.nbytes:
                raise WrongAnswerError(f"the server sent of a file of {answer.meta['size']} bytes instead")
            return await body(answer, offset, nbytes)

        return await self.retries.run(
            path, f"reading {nbytes} bytes at offset {offset}", lambda: self._links.use(key, find, ranged)
        )

    async def _file_link(self, path: str, key: str) -> tuple[Stamp, FileLink]:
        """Ask the Hub for a file: for its state, and a link to it."""

        async def attempt() -> tuple[Stamp, FileLink]:
            address = await self._api.address(self._commit, key)
            # Headers are for the Hub: neither they nor the token go to where it sends us.
            if address.headers:
                options = {**self._http.client, "default_headers": address.headers}
                client = Client("the Hub", replace(self._http, client=options))
                link = link_within("the Hub", address.url, client)
            else:
                link = link_to("the Hub", address.url, self._http.client)
            # The commit fixes the content, whether it comes from the Hub or from a cache.
            return Stamp(address.nbytes, self._commit.sha), link

        return await self.retries.run(path, "asking the Hub", attempt)
