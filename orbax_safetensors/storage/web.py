"""The files of an HTTP server to which requests carry secrets: headers, or a URL's query. No other server gets them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import obstore

from orbax_safetensors.storage.event_loop import in_thread
from orbax_safetensors.storage.links import FileLink, Links, link_to
from orbax_safetensors.storage.redirects import Client
from orbax_safetensors.storage.remote import RemoteStore
from orbax_safetensors.storage.retries import RefusedError, Retries, code_of

if TYPE_CHECKING:  # obstore has these for type checkers only
    from obstore import GetOptions, GetResult
    from obstore.store import HTTPStore

_SERVER = "the server"
# Characters of a path, besides letters and digits, that need not be escaped.
_PLAIN = "/!$&'()*+,;=:@~"


class WebStore(RemoteStore):
    """See `store.Store`. Before a file is read, a request finds out where it is: perhaps on another server."""

    def __init__(self, root: str, objects: HTTPStore, query: str, client: Mapping[str, Any], retries: Retries) -> None:
        """Send `query` and the headers of `client`, the options of obstore's HTTP client, with every request.

        `objects` makes requests to the server without secrets.
        """
        super().__init__(root, objects, lists=False, retries=retries)
        self._query = f"?{query}" if query else ""
        self._headers = client.get("default_headers", {})
        self._options = client
        self._client = Client(_SERVER, client)
        self._links = Links()

    async def _get(self, key: str, options: GetOptions) -> GetResult:
        return await self._links.use(
            key, lambda: self._find(key), lambda objects: obstore.get_async(objects, "", options=options)
        )

    async def _find(self, key: str) -> FileLink:
        """Ask where a file is.

        The request is a GET, for which the URL may be signed. It has no range, as the server may sign a link for the
        requested range only. The body is not read.
        """
        url = f"{self.root}/{quote(key, safe=_PLAIN)}{self._query}"
        answer = await in_thread(lambda: self._client.get(url))
        if answer.link is not None:
            return link_to(_SERVER, answer.link, {}, self._options, expires=True)
        if answer.status == HTTPStatus.NOT_FOUND:
            raise FileNotFoundError
        if answer.status != HTTPStatus.OK:
            code = code_of(answer.refusal.decode(errors="replace"))
            raise RefusedError(f"{_SERVER} answered {answer.status}{code}", answer.status)
        return link_to(_SERVER, answer.url, self._headers, self._options, expires=False)
