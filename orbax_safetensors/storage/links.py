"""Links to files on HTTP servers: kept, used for all ranges of a file, and renewed once they have expired."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import Bytes
from obstore.exceptions import BaseError
from obstore.store import HTTPStore

from orbax_safetensors.storage.paths import HTTP
from orbax_safetensors.storage.retries import WrongAnswerError, status_of

if TYPE_CHECKING:  # obstore has these for type checkers only
    from obstore import GetOptions, ObjectMeta

_T = TypeVar("_T")

# What stores say of a link that has expired, which is no fault.
_EXPIRED = (400, 401, 403)


class Ranged(Protocol):
    """The parts of obstore's `GetResult` that count."""

    @property
    def meta(self) -> ObjectMeta:
        """Facts of the whole file."""

    @property
    def range(self) -> tuple[int, int]:
        """The range that the answer has."""

    async def bytes_async(self) -> Bytes:
        """Return the bytes of the range."""


class MovedError(WrongAnswerError):
    """A server redirects a request with secrets to another server, which must not have them."""


@dataclass(frozen=True, eq=False)
class FileLink:
    """Where ranges of a file can be had, with `get`; with `expires`, until it is refused."""

    get: Callable[[GetOptions], Awaitable[Ranged]]
    expires: bool


def link_to(server: str, url: str, client: Mapping[str, Any]) -> FileLink:
    """Make a link, without headers, of what `server` has said; `WrongAnswerError` if that is not a URL of a file."""
    options: Any = {**client, "default_headers": {}}
    try:
        if urlsplit(url).scheme not in HTTP:
            raise ValueError
        objects = HTTPStore(url, client_options=options, retry_config={"max_retries": 0})
        return FileLink(lambda options: obstore.get_async(objects, "", options=options), expires=True)
    except Exception:  # which would tell the link
        pass
    raise WrongAnswerError(f"{server} gave a link that cannot be used")


class Links:
    """The links to files, by their keys. To be used on the event loop's thread only."""

    def __init__(self) -> None:
        self._links: dict[str, FileLink] = {}
        self._renewing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def keep(self, key: str, link: FileLink) -> None:
        """Have a link used from now on."""
        self._links[key] = link

    async def use(
        self, key: str, find: Callable[[], Awaitable[FileLink]], request: Callable[[FileLink], Awaitable[_T]]
    ) -> _T:
        """Return what `request` does of a link, once more of another link if the first has expired or leads elsewhere.

        `find` asks for a link, once for all callers that wait for it.
        """
        link = await self._link(key, find, None)
        try:
            return await request(link)
        except MovedError:
            pass
        except BaseError as error:
            if not link.expires or status_of(error) not in _EXPIRED:
                raise
        return await request(await self._link(key, find, link))

    async def _link(self, key: str, find: Callable[[], Awaitable[FileLink]], refused: FileLink | None) -> FileLink:
        async with self._renewing[key]:
            link = self._links.get(key)
            if link is None or link is refused:
                link = self._links[key] = await find()
            return link


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Return the scheme, host and port of a URL, which are what secrets are for."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
