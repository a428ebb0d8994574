"""Redirects of an HTTP server, followed within that server only.

obstore follows all redirects with its headers, and with the URL and its query as `Referer`. So a `Client` sends secrets
to their server and follows its redirects, and obstore starts at the last URL. The requests of a `Client` are few and
short; obstore reads the bytes of tensors.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.parse import urljoin
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.storage.links import origin, timeout_seconds
from orbax_safetensors.storage.retries import RefusedError, WrongAnswerError

# Redirects from one place of a server to another.
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
# Bytes that are read of a refusal's body.
_MAX_REFUSAL_BYTES = 4096


@dataclass(frozen=True)
class Answer:
    """A server's last answer.

    Attributes:
      url: of the last request; a secret, as it may be signed.
      link: the URL on another server that the answer redirects to, also a secret; None if it is not a redirect.
      refusal: the beginning of the body, if the server refused the request.
    """

    url: str
    link: str | None
    status: int
    refusal: bytes


class Client:
    """A client of one server, which follows redirects within the server: to the same scheme, host and port."""

    def __init__(self, server: str, client: Mapping[str, Any]) -> None:
        """Make a client of the server that messages call `server`.

        Of `client`, the options of obstore's HTTP client, it uses headers, timeouts, the proxy, certificates and the
        name of this program.
        """
        self._server = server
        self._headers = {
            "User-Agent": client.get("user_agent", "orbax-safetensors"),
            **client.get("default_headers", {}),
        }
        self._timeout = timeout_seconds(client)
        proxy = client.get("proxy_url")
        proxies = None if proxy is None else {"http": proxy, "https": proxy}
        self._opener = OpenerDirector()  # without handlers that follow redirects or raise for a status
        for handler in (ProxyHandler(proxies), HTTPHandler(), HTTPSHandler(context=_trust(client))):
            self._opener.add_handler(handler)

    def get(self, url: str) -> Answer:
        """Return the answer to a request, or to the redirected request, without its body. Blocks.

        Raises `RefusedError` if the server does not answer, and `WrongAnswerError` if it redirects too often.
        """
        try:
            return self._followed(url)
        except (OSError, HTTPException, ValueError) as error:
            fault = self._no_answer(error)
        # Raised outside the handler: the error may hold the URL or a header.
        raise RefusedError(fault)

    def _followed(self, url: str) -> Answer:
        server = origin(url)
        for _ in range(_MAX_REDIRECTS):
            with self._opener.open(Request(url, headers=self._headers), timeout=self._timeout) as answer:
                link = None
                if answer.status in _REDIRECTS and "Location" in answer.headers:
                    link = urljoin(url, answer.headers["Location"])
                    if origin(link) == server:
                        url = link
                        continue
                refusal = answer.read(_MAX_REFUSAL_BYTES) if answer.status >= 400 else b""
                return Answer(url, link, answer.status, refusal)
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
