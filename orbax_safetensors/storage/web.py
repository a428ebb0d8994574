"""HTTP servers to which requests carry secrets: headers, or a URL's query. No other server gets them.

obstore follows all redirects with its headers, and with the URL and its query as `Referer`, and no option of it limits
that. So a `Client` makes all requests that carry secrets, and follows redirects within the server only; obstore reads
what is behind a link to another server.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import HTTPException
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import quote, urljoin
from urllib.request import OpenerDirector, ProxyHandler

from obstore import Bytes

from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.storage.bounded_http import BoundedHandler, BoundedRequest
from orbax_safetensors.storage.event_loop import in_thread
from orbax_safetensors.storage.http_options import HttpOptions
from orbax_safetensors.storage.links import FileLink, Links, MovedError, Ranged, link_to, origin
from orbax_safetensors.storage.remote import NO_DATE, RemoteStore
from orbax_safetensors.storage.retries import ChangedError, RefusedError, WrongAnswerError, code_of

if TYPE_CHECKING:  # obstore has these for type checkers only
    from obstore import GetOptions, ObjectMeta
    from obstore.store import HTTPStore

_SERVER = "the server"
# Characters of a path, besides letters and digits, that need not be escaped.
_PLAIN = "/!$&'()*+,;=:@~"
# Redirects from one place of a server to another.
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
# Bytes that are read of a refusal's body.
_MAX_REFUSAL_BYTES = 4096
# What headers say of a range and of a file; 18 digits are below 2**63.
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_LENGTH = re.compile(r"()()([0-9]{1,18})")


class WebStore(RemoteStore):
    """See `store.Store`. Before a file is read, a request finds out where it is: perhaps on another server."""

    def __init__(self, root: str, objects: HTTPStore, query: str, http: HttpOptions) -> None:
        """Send `query` and the headers of `http` with every request.

        `objects` makes requests to the server without secrets.
        """
        super().__init__(root, objects, http.retries)
        self._query = f"?{query}" if query else ""
        self._http = http
        self._client = Client(_SERVER, http)
        self._links = Links()

    async def _get(self, key: str, options: GetOptions) -> Ranged:
        return await self._links.use(key, lambda: self._find(key), lambda link: link.get(options))

    async def _find(self, key: str) -> FileLink:
        """Ask where a file is.

        The request is a GET, for which the URL may be signed. It has no range, as the server may sign a link for the
        requested range only. The body is not read.
        """
        url = f"{self.root}/{quote(key, safe=_PLAIN)}{self._query}"
        answer = await self._client.get(url)
        if answer.link is not None:
            return link_to(_SERVER, answer.link, self._http.client)
        if answer.status != HTTPStatus.OK:
            raise _refusal(_SERVER, answer)
        return link_within(_SERVER, answer.url, self._client)


@dataclass(frozen=True)
class Answer:
    """A server's last answer.

    Attributes:
      url: of the last request; a secret, as it may be signed.
      link: the URL on another server that the answer redirects to, also a secret; None if it is not a redirect.
      body: the requested range; or its beginning, if the server refused the request.
    """

    url: str
    link: str | None
    status: int
    headers: Message
    body: bytes


class Client:
    """A client of one server, which follows redirects within the server: to the same scheme, host and port."""

    def __init__(self, server: str, http: HttpOptions) -> None:
        """Make a client of the server that messages call `server`.

        Of the options of obstore's HTTP client, it uses headers, the proxy, certificates, timeouts and the name of this
        program.
        """
        self._server, client = server, http.client
        self._headers = {
            "User-Agent": client.get("user_agent", "orbax-safetensors"),
            **client.get("default_headers", {}),
        }
        self._pause, self._seconds = http.pause_seconds, http.request_seconds
        proxy = client.get("proxy_url")
        proxies = None if proxy is None else {"http": proxy, "https": proxy}
        self._opener = OpenerDirector()  # without handlers that follow redirects or raise for a status
        for handler in (ProxyHandler(proxies), BoundedHandler(_trust(client))):
            self._opener.add_handler(handler)

    async def get(self, url: str, headers: Mapping[str, str] = MappingProxyType({}), nbytes: int = 0) -> Answer:
        """Return the answer to a request with more `headers`, or to the redirected request.

        Of an answer to a range, it has at most `nbytes` bytes; no bytes of a whole file. Raises `RefusedError` if the
        server has not answered in time, and `WrongAnswerError` if it redirects too often or sends too much.
        """
        try:
            return await in_thread(lambda: self._followed(url, {**self._headers, **headers}, nbytes), self._seconds)
        except SafetensorsError:  # which is a ValueError, and no answer of the server
            raise
        except (OSError, HTTPException, ValueError) as error:
            fault = self._no_answer(error)
        # Raised outside the handler: the error may hold the URL or a header.
        raise RefusedError(fault)

    def _followed(self, url: str, headers: Mapping[str, str], nbytes: int) -> Answer:
        server, until = origin(url), time.monotonic() + self._seconds
        for _ in range(_MAX_REDIRECTS):
            request = BoundedRequest(url, dict(headers), until, nbytes)
            with self._opener.open(request, timeout=self._pause) as answer:
                link = None
                if answer.status in _REDIRECTS and "Location" in answer.headers:
                    link = urljoin(url, answer.headers["Location"])
                    if origin(link) == server:
                        url = link
                        continue
                most = nbytes if answer.status == HTTPStatus.PARTIAL_CONTENT else 0
                body = answer.read(_MAX_REFUSAL_BYTES if answer.status >= 400 else most)
                return Answer(url, link, answer.status, answer.headers, body)
        raise WrongAnswerError(f"{self._server} redirected us {_MAX_REDIRECTS} times")

    def _no_answer(self, error: Exception) -> str:
        """Return why there is no answer, without the secrets in a proxy's URL or an address."""
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, TimeoutError):
            return f"no answer of {self._server} in time"
        if isinstance(cause, ValueError):
            return f"{self._server} gave a link that cannot be used, or the proxy's URL cannot be used"
        return f"no connection to {self._server}, or it broke ({type(cause).__name__})"


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


def link_within(server: str, url: str, client: Client) -> FileLink:
    """Return a link to a file on the server of `client`, which messages call `server`.

    `get` of the link raises `MovedError` if the server redirects to another server, which is not asked.
    """

    async def get(options: GetOptions) -> Ranged:
        headers, nbytes = {}, 0
        if "range" in options:
            begin, end = map(int, options["range"])
            headers["Range"], nbytes = f"bytes={begin}-{end - 1}", end - begin
        if tag := options.get("if_match"):
            headers["If-Match"] = tag
        answer = await client.get(url, headers, nbytes)
        if answer.link is not None:
            raise MovedError(f"{server} leads elsewhere with the ranges of a file, but not with the file")
        if answer.status == HTTPStatus.PRECONDITION_FAILED:
            raise ChangedError("another")
        if answer.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            raise _refusal(server, answer)
        return _RangeAnswer(answer, nbytes)

    return FileLink(get, expires=False)


def _refusal(server: str, answer: Answer) -> Exception:
    """Return the error for a server's answer without a file."""
    if answer.status == HTTPStatus.NOT_FOUND:
        return FileNotFoundError()
    code = code_of(answer.body.decode(errors="replace"))
    return RefusedError(f"{server} answered {answer.status}{code}", answer.status)


class _RangeAnswer:
    """See `Ranged`."""

    def __init__(self, answer: Answer, nbytes: int) -> None:
        """Take the answer to a request for a range of `nbytes` bytes, or for a file of which only the facts count.

        Raises `WrongAnswerError` if the answer does not say its range, and `RefusedError` if it ended too early.
        """
        ranged = nbytes > 0
        given = answer.headers.get("Content-Range" if ranged else "Content-Length", "")
        found = (_RANGE if ranged else _LENGTH).fullmatch(given.strip())
        if ranged and answer.status != HTTPStatus.PARTIAL_CONTENT:
            raise WrongAnswerError("the server ignores the requested range")
        if found is None:
            raise WrongAnswerError("the server does not say which bytes of the file it sent")
        size = int(found[3])
        self.range = (int(found[1]), int(found[2]) + 1) if ranged else (0, size)
        self._body = answer.body
        if len(self._body) < min(nbytes, self.range[1] - self.range[0]):
            raise RefusedError("the connection broke")
        self.meta: ObjectMeta = {
            "path": "",
            "last_modified": _date(answer.headers.get("Last-Modified")),
            "size": size,
            "e_tag": answer.headers.get("ETag"),
            "version": None,
        }

    async def bytes_async(self) -> Bytes:
        return Bytes(self._body)


def _date(text: str | None) -> datetime:
    """Return the date in a header; that of obstore if there is none."""
    try:
        return parsedate_to_datetime(text or "").astimezone(UTC)
    except (ValueError, OverflowError, TypeError, IndexError):  # of Python's parser, too
        return NO_DATE
