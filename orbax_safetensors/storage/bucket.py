"""Buckets of object stores: besides being read, their objects are listed, written and deleted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import obstore

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.storage.remote import RemoteStore, stamp_of
from orbax_safetensors.storage.retries import Retries
from orbax_safetensors.storage.store import Stamp
from orbax_safetensors.storage.upload import NewRemoteFile

if TYPE_CHECKING:  # obstore has these for type checkers only
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_T = TypeVar("_T")

# Deletions in flight at once.
_DELETIONS = 16


class BucketStore(RemoteStore):
    """The objects of a bucket; see `store.Store`."""

    lists = True
    writes = True

    def __init__(
        self, root: str, objects: ObjectStore, retries: Retries, for_writing: Callable[[], ObjectStore]
    ) -> None:
        """See `RemoteStore`; `for_writing` returns a store that retries requests after temporary failures."""
        super().__init__(root, objects, retries)
        self._for_writing = for_writing

    @cached_property
    def _objects_for_writing(self) -> ObjectStore:
        return self._for_writing()

    def list(self, path: str) -> dict[str, Stamp | None] | None:
        """Return the names of the objects below `path` up to the next slash, sorted; None if there are none.

        What has objects below it has no state.
        """
        prefix = self._key(path)
        listing = self._list(path, lambda: obstore.list_with_delimiter_async(self.objects, prefix or None))
        keys: dict[str, Stamp | None] = dict.fromkeys(listing["common_prefixes"])
        keys |= {meta["path"]: _listed_stamp(meta) for meta in listing["objects"]}
        states = {key.rpartition("/")[2]: state for key, state in sorted(keys.items()) if key != prefix}
        states.pop("", None)
        return states or None

    def _list(self, path: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        try:
            return self._run(path, "listing", attempt)
        except FileNotFoundError:
            raise MissingError(f"{path}: there is no such bucket") from None

    def create(self, path: str, nbytes: int | None = None, requests: int = 1, *, sync: bool = False) -> NewRemoteFile:
        """Begin an object of `nbytes` bytes; nobody sees it before it is whole, and with `sync` before it is synced."""
        if nbytes is None:
            raise StorageError(f"{path}: an object of unknown size cannot be written")
        return NewRemoteFile(path, self._key(path), self._objects_for_writing, nbytes, requests, waits=sync)

    def below(self, path: str) -> dict[str, Stamp]:
        """Return the states of all objects below `path`."""
        prefix = self._key(path)
        objects = self._list(path, lambda: obstore.list(self.objects, prefix or None).collect_async())
        return {meta["path"][len(prefix) :].lstrip("/"): _listed_stamp(meta) for meta in objects}

    def delete(self, path: str, names: Iterable[str]) -> None:
        """Delete objects below `path`, with one request for each and many requests at once."""
        prefix = self._key(path)
        if not prefix:
            raise StorageError(f"{path}: is a whole bucket, whose objects are not deleted")

        async def gone(name: str) -> None:
            async with deleting:
                with contextlib.suppress(FileNotFoundError):  # an attempt whose answer was lost
                    await self.retries.run(
                        f"{path}/{name}", "deleting", lambda: obstore.delete_async(self.objects, f"{prefix}/{name}")
                    )

        async def all_gone() -> None:
            await asyncio.gather(*map(gone, names))

        deleting = asyncio.Semaphore(_DELETIONS)
        self._requests.run(f"{path}: deleting", all_gone())


def _listed_stamp(meta: ObjectMeta) -> Stamp:
    """Return the state of an object that a listing has. Azure lists ETags without the quotes that its answers have."""
    nbytes, version = stamp_of(meta)
    return Stamp(nbytes, f'"{version}"' if meta["e_tag"] and '"' not in version else version)
