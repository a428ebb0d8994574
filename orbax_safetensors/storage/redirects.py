"""Requests that follow redirects within one server only, and links to other places.

obstore follows all redirects, and takes along its headers, and as `Referer` the URL, query and all. So whatever is
secret goes to the server that it is for by a `Client`, and obstore starts where that leads. These are few and short
requests, of which the headers are needed; the bytes of tensors are for obstore.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from email.message import Message
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from obstore.exceptions import BaseError
from obstore.store import HTTPStore

from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.storage.paths import HTTP
from orbax_safetensors.storage.retries import RefusedError, WrongAnswerError, status_of

_T = TypeVar("_T")

# Redirects from one place of a server to another: a repository that was renamed, then the file.
_MAX_REDIRECTS = 5
_TIMEOUT_SECONDS = 30.0  # in which something has to come
_REDIRECTS = (301, 302, 303, 307, 308)
# Bytes that are read of an answer that says no.
_MAX_REFUSAL_BYTES = 4096
# What stores say of a link that has expired, which is no fault.
_EXPIRED = (400, 401, 403)


@dataclass(frozen=True)
class Answer:
    """What a server said in the end.

    Attributes:
      url: what was asked last; a secret, as it may be signed.
      link: where it leads to, on another server; a secret too. None if it leads nowhere.
      given: the headers of each answer on the way, the last of them included.
      body: all of it if it was to be read, or the beginning of one that says no.
    """

    url: str
    link: str | None
    status: int
    given: tuple[Message, ...]
    body: bytes

    @property
    def headers(self) -> Message:
        """Those of the last answer."""
        return self.given[-1]


class Client:
    """Asks one server, and follows it as long as it leads to itself: to the same scheme, host and port."""

    def __init__(self, server: str, headers: Mapping[str, Any], client: Mapping[str, Any]) -> None:
        """`server` is what messages call it. Of `client`, options of obstore's HTTP client, timeouts, the proxy,
        certificates and the name of this program count; of its headers those that are in `headers`.
        """
        self._server = server
        self._headers = {"User-Agent": client.get("user_agent", "orbax-safetensors"), **headers}
        timeout = client.get("read_timeout")
        self._timeout = timeout.total_seconds() if isinstance(timeout, timedelta) else _TIMEOUT_SECONDS
        proxy = client.get("proxy_url")
        proxies = None if proxy is None else {"http": proxy, "https": proxy}
        self._opener = OpenerDirector()  # with nothing that would follow redirects or raise for a status
        for handler in (ProxyHandler(proxies), HTTPHandler(), HTTPSHandler(context=_trust(client))):
            self._opener.add_handler(handler)

    def ask(self, method: str, url: str, *, reads: bool) -> Answer:
        """Return the answer to a request, or to where that leads. Blocks.

        Raises `RefusedError` if there is none, and `WrongAnswerError` if it leads on and on. A body is left unread
        unless this `reads` it.
        """
        try:
            return self._followed(method, url, reads)
        except (OSError, HTTPException, ValueError) as error:
            fault = self._no_answer(error)
        # Out of the handler: the error may hold the URL or a header.
        raise RefusedError(fault)

    def _followed(self, method: str, url: str, reads: bool) -> Answer:
        given: list[Message] = []
        origin = _origin(url)
        for _ in range(_MAX_REDIRECTS):
            request = Request(url, headers=self._headers, method=method)
            with self._opener.open(request, timeout=self._timeout) as got:
                given.append(got.headers)
                link = None
                if got.status in _REDIRECTS and "Location" in got.headers:
                    link = urljoin(url, got.headers["Location"])
                    if _origin(link) == origin:
                        url = link
                        continue
                body = b""
                if got.status >= 400 or (reads and got.status == 200):
                    body = got.read(_MAX_REFUSAL_BYTES if got.status >= 400 else None)
                return Answer(url, link, got.status, tuple(given), body)
        raise WrongAnswerError(f"{self._server} sent us from one place to another, and on and on")

    def _no_answer(self, error: Exception) -> str:
        """Why there is no answer. Never what a proxy's URL or an address has of secrets."""
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, TimeoutError):
            return f"no answer of {self._server} in time"
        if isinstance(cause, ValueError):
            return f"{self._server} gave a link that cannot be used, or the proxy has none"
        return f"no connection to {self._server}, or it broke ({type(cause).__name__})"


@dataclass(frozen=True, eq=False)
class Link:
    """Where ranges of a file can be had; with `expires`, until it is refused."""

    objects: HTTPStore
    expires: bool


def link_to(server: str, url: str, headers: Mapping[str, Any], client: Mapping[str, Any], *, expires: bool) -> Link:
    """Make a link of what `server` has said; `WrongAnswerError` if that is no URL of a file."""
    options: Any = {**client, "default_headers": headers}
    try:
        if urlsplit(url).scheme not in HTTP:
            raise ValueError
        return Link(HTTPStore(url, client_options=options, retry_config={"max_retries": 0}), expires)
    except Exception:  # which would tell the link
        pass
    raise WrongAnswerError(f"{server} gave a link that cannot be used")


class Links:
    """The links to files, by their keys. To be used on the event loop's thread only."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}
        self._renewing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def keep(self, key: str, link: Link) -> None:
        """Have a link used from now on."""
        self._links[key] = link

    async def use(
        self, key: str, find: Callable[[], Awaitable[Link]], request: Callable[[HTTPStore], Awaitable[_T]]
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

    async def _link(self, key: str, find: Callable[[], Awaitable[Link]], refused: Link | None) -> Link:
        async with self._renewing[key]:
            link = self._links.get(key)
            if link is None or link is refused:
                link = self._links[key] = await find()
            return link


def _trust(client: Mapping[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    try:
        if root := client.get("root_certificate"):
            context.load_verify_locations(cadata=root.decode() if isinstance(root, bytes) else root)
    except (ssl.SSLError, ValueError, TypeError):
        raise SafetensorsError("storage_options: root_certificate must be certificates as PEM") from None
    if client.get("allow_invalid_certificates"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
