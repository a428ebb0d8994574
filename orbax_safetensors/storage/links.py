"""Links to files on HTTP servers: kept, used for all ranges of a file, and asked for again once they have expired."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import HTTPStore

from orbax_safetensors.storage.paths import HTTP
from orbax_safetensors.storage.retries import WrongAnswerError, status_of

_T = TypeVar("_T")

_TIMEOUT_SECONDS = 30.0  # in which something has to come
# What stores say of a link that has expired, which is no fault.
_EXPIRED = (400, 401, 403)


@dataclass(frozen=True, eq=False)
class FileLink:
    """Where ranges of a file can be had; with `expires`, until it is refused."""

    objects: HTTPStore
    expires: bool


def link_to(server: str, url: str, headers: Mapping[str, Any], client: Mapping[str, Any], *, expires: bool) -> FileLink:
    """Make a link of what `server` has said; `WrongAnswerError` if that is not a URL of a file."""
    options: Any = {**client, "default_headers": headers}
    try:
        if urlsplit(url).scheme not in HTTP:
            raise ValueError
        return FileLink(HTTPStore(url, client_options=options, retry_config={"max_retries": 0}), expires)
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
        self, key: str, find: Callable[[], Awaitable[FileLink]], request: Callable[[HTTPStore], Awaitable[_T]]
    ) -> _T:
        """Return what `request` does of a link, once more of another link if the first has expired.

        `find` asks for a link, once for all who wait for it.
        """
        link = await self._link(key, find, None)
        try:
            return await request(link.objects)
        except BaseError as error:
            if not link.expires or status_of(error) not in _EXPIRED:
                raise
        return await request((await self._link(key, find, link)).objects)

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


def timeout_seconds(client: Mapping[str, Any]) -> float:
    """Return the seconds in which a server has to send something, by the options of obstore's HTTP client."""
    timeout = client.get("read_timeout")
    return timeout.total_seconds() if isinstance(timeout, timedelta) else _TIMEOUT_SECONDS
