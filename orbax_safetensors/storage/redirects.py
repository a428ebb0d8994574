"""Redirects of an HTTP server, followed within that server only.

obstore follows all redirects with its headers, and with the URL and its query as `Referer`, and no option of it limits
that. So a `Client` makes all requests that carry secrets; obstore reads what is behind a link to another server.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from http.client import HTTPException
from types import MappingProxyType
from typing import Any
from urllib.error import URLError
from urllib.parse import urljoin
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.storage.links import origin
from orbax_safetensors.storage.retries import RefusedError, WrongAnswerError

# Redirects from one place of a server to another.
_MAX_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
# Bytes that are read of a refusal's body.
_MAX_REFUSAL_BYTES = 4096


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

    def __init__(self, server: str, client: Mapping[str, Any], timeout: float) -> None:
        """Make a client of the server that messages call `server`, in which something has to come in `timeout` seconds.

        Of `client`, the options of obstore's HTTP client, it uses headers, the proxy, certificates and the name of this
        program.
        """
        self._server = server
        self._headers = {
            "User-Agent": client.get("user_agent", "orbax-safetensors"),
            **client.get("default_headers", {}),
        }
        self._timeout = timeout
        proxy = client.get("proxy_url")
        proxies = None if proxy is None else {"http": proxy, "https": proxy}
        self._opener = OpenerDirector()  # without handlers that follow redirects or raise for a status
        for handler in (ProxyHandler(proxies), HTTPHandler(), HTTPSHandler(context=_trust(client))):
            self._opener.add_handler(handler)

    def get(self, url: str, headers: Mapping[str, str] = MappingProxyType({}), nbytes: int = 0) -> Answer:
        """Return the answer to a request with more `headers`, or to the redirected request. Blocks.

        Of an answer to a range, it has at most `nbytes` bytes; no bytes of a whole file. Raises `RefusedError` if the
        server does not answer, and `WrongAnswerError` if it redirects too often.
        """
        try:
            return self._followed(url, {**self._headers, **headers}, nbytes)
        except (OSError, HTTPException, ValueError) as error:
            fault = self._no_answer(error)
        # Raised outside the handler: the error may hold the URL or a header.
        raise RefusedError(fault)

    def _followed(self, url: str, headers: Mapping[str, str], nbytes: int) -> Answer:
        server = origin(url)
        for _ in range(_MAX_REDIRECTS):
            with self._opener.open(Request(url, headers=dict(headers)), timeout=self._timeout) as answer:
                link = None
                if answer.status in REDIRECTS and "Location" in answer.headers:
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
