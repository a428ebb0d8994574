"""The files of an HTTP server to which requests carry secrets: headers, or a URL's query. No other server gets them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from orbax_safetensors.storage.event_loop import in_thread
from orbax_safetensors.storage.links import FileLink, Links, Ranged, link_to, timeout_seconds
from orbax_safetensors.storage.redirects import Client
from orbax_safetensors.storage.remote import RemoteStore
from orbax_safetensors.storage.retries import Retries
from orbax_safetensors.storage.secret_reads import link_within, refusal

if TYPE_CHECKING:  # obstore has these for type checkers only
    from obstore import GetOptions
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
        self._options = client
        self._client = Client(_SERVER, client, timeout_seconds(client, retries))
        self._links = Links()

    async def _get(self, key: str, options: GetOptions) -> Ranged:
        return await self._links.use(key, lambda: self._find(key), lambda link: link.get(options))

    async def _find(self, key: str) -> FileLink:
        """Ask where a file is.

        The request is a GET, for which the URL may be signed. It has no range, as the server may sign a link for the
        requested range only. The body is not read.
        """
        url = f"{self.root}/{quote(key, safe=_PLAIN)}{self._query}"
        answer = await in_thread(lambda: self._client.get(url))
        if answer.link is not None:
            return link_to(_SERVER, answer.link, self._options)
        if answer.status != HTTPStatus.OK:
            raise refusal(_SERVER, answer)
        return link_within(_SERVER, answer.url, self._client)
