"""Azurite, Microsoft's emulator of Azure Blob Storage; it needs Node."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
from collections.abc import Iterator
from email.utils import formatdate

from tests.support.servers import processes
from tests.support.servers.server import App, Request

# The account that every emulator has, and its key, which is no secret.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2023-11-03"


@contextlib.contextmanager
def serving(command: str) -> Iterator[str]:
    """Runs `azurite-blob`, which holds its blobs in memory; gives its URL."""
    options = ["--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    with processes.serving([command, *options], r"successfully listens on (http://\S+)") as url:
        yield url


def create_container(app: App, name: str) -> None:
    """Makes a container, which obstore does not."""
    request = Request("PUT", f"/{ACCOUNT}/{name}?restype=container")
    signed = f"x-ms-date:{formatdate(usegmt=True)}\nx-ms-version:{_VERSION}"
    for line in signed.splitlines():
        request.headers.add_header(*line.split(":", 1))
    # The method, eleven headers that are not there, those of Azure, and what is asked for.
    text = "\n".join(["PUT", *[""] * 11, signed, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    digest = hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
    request.headers.add_header("Authorization", f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}")
    response = app(request)
    if response.status != 201:
        raise RuntimeError(f"Azurite makes no container: {response.status} {response.headers}")
