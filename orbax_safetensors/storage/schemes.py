"""Chooses the store for a path: file systems for paths, object stores and HTTP servers for URLs."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from obstore.exceptions import BaseError
from obstore.store import HTTPStore, from_url

from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.storage import credentials, hub_path
from orbax_safetensors.storage.links import timeout_seconds
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.storage.paths import AZURE, GCS, HTTP, HUB, S3, SCHEMES, PathLike, as_text, is_url, shown
from orbax_safetensors.storage.remote import RemoteStore
from orbax_safetensors.storage.retries import Retries, reason
from orbax_safetensors.storage.store import Store
from orbax_safetensors.storage.web import WebStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore, RetryConfig

_T = TypeVar("_T")

# What obstore takes as options of its HTTP client rather than of a store.
_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_headers",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
# Of these, what `huggingface_hub` takes from the environment, as obstore does if it has no such option.
_OF_ENVIRONMENT = frozenset(
    {"allow_invalid_certificates", "proxy_ca_certificate", "proxy_excludes", "proxy_url", "root_certificate"}
)
# A connection that brings nothing for half a minute is dead; one that brings little is left alone for longer, because
# many share a link that may be slow.
_TIMEOUTS = {
    "connect_timeout": timedelta(seconds=10),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(minutes=5),
}
_RETRIES = Retries(attempts=10, seconds=120.0)
# Who has asked the Hub for too much in five minutes is told to wait for the rest of them.
_HUB_RETRIES = Retries(attempts=10, seconds=600.0)

# What a commit of a repository is called, and no branch.
_COMMIT = re.compile(r"[0-9a-f]{40}")

# The one variable of Azure's own tools, which object stores do not read.
_CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"
_OF_CONNECTION = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}
_ENDPOINTS = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
    "GOOGLE_BASE_URL",
)


def store_of(path: PathLike, storage_options: Mapping[str, Any] | None) -> tuple[Store, str]:
    """Return the store that a path belongs to, and the path as the store and its messages have it: without secrets.

    `storage_options` are for object stores and HTTP servers, see `SafetensorsOptions`; paths have no use for them.
    A repository of the Hub is asked for its commit, which is in the path that is returned. Raises `StorageError` if
    that fails or a URL is of no kind that is known, and `SafetensorsError` if an option is not.
    """
    path = as_text(path)
    if not is_url(path):
        return LocalStore(), path
    scheme = path.partition("://")[0]
    options = dict(storage_options or {})
    if scheme in HTTP:
        return _http(path, options)
    if scheme in HUB:
        return _hub(path, options)
    if scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise StorageError(f"{shown(path)}: expected a path or one of {known}")
    bucket, _, key = path.partition("://")[2].partition("/")
    root = f"{scheme}://{bucket}"
    if not bucket:
        raise StorageError(f"{path}: expected the name of a bucket after {scheme}://")
    if scheme in AZURE and "\\" in key:
        raise StorageError(f"{path}: Azure takes the backslash for a slash, and finds another blob")
    options = _from_environment(scheme) | options
    client, retries = _client(options, _is_plain(options))
    config: Any = {"config": options}
    if scheme in S3 and (provider := credentials.aws_profile(options)) is not None:
        config["credential_provider"] = provider

    def objects(client: Any, repeat: RetryConfig) -> ObjectStore:
        return _made(root, lambda: from_url(root, client_options=client, retry_config=repeat, **config))

    def writing() -> ObjectStore:
        # The answer to a part comes after all of its bytes have gone, which on a slow link takes long.
        patient = {name: value for name, value in client.items() if name != "read_timeout"}
        return objects(patient, retries.of_obstore())

    store = RemoteStore(root, objects(client, {"max_retries": 0}), lists=True, retries=retries, writing=writing)
    return store, f"{root}/{key.strip('/')}".rstrip("/")


def is_unpinned(path: str) -> bool:
    """Return whether a path names a branch or tag of a repository: processes may find different commits there.

    `store_of` pins the commit that it finds. Raises `StorageError` if the URL does not name a repository.
    """
    return path.partition("://")[0] in HUB and not _COMMIT.fullmatch(hub_path.parse(path).revision)


def _http(url: str, options: dict[str, Any]) -> tuple[Store, str]:
    """Return the files of a server, whose query, user and password go with every request.

    Paths are URLs without these, and with characters as they are rather than escaped. None of these, nor any header,
    goes further than to the server of `url` if that sends its clients elsewhere.
    """
    client, retries = _client(options, url.startswith("http://"))
    if options:
        raise SafetensorsError(f"storage_options: {', '.join(map(repr, options))} are not for HTTP servers")
    try:
        parts = urlsplit(url)
    except ValueError:  # which would tell the password
        parts = None
    if parts is None:
        raise StorageError(f"{shown(url)}: is not a URL")
    user, _, host = parts.netloc.rpartition("@")
    # Everything below the server's root, so that files beside this one are of the same store.
    root = urlunsplit((parts.scheme, host, "", "", ""))
    if user:
        basic = b64encode(unquote(user).encode()).decode()
        client["default_headers"] = {**client.get("default_headers", {}), "Authorization": f"Basic {basic}"}
    public: Any = {name: value for name, value in client.items() if name != "default_headers"}
    objects = _made(root, lambda: HTTPStore(root, client_options=public, retry_config={"max_retries": 0}))
    store = RemoteStore(root, objects, lists=False, retries=retries)
    if parts.query or client.get("default_headers"):
        store = WebStore(root, objects, parts.query, client, retries)
    return store, f"{root}/{unquote(parts.path).strip('/')}".rstrip("/")


def _hub(url: str, options: dict[str, Any]) -> tuple[Store, str]:
    """Return a repository at a commit, and the URL with that commit."""
    if find_spec("huggingface_hub") is None:
        raise StorageError(
            f"{url}: the Hub is read with huggingface_hub, which is not installed: pip install 'orbax-safetensors[hub]'"
        )
    from orbax_safetensors.storage import hub, hub_api  # which import it

    if theirs := [name for name in options if name in _OF_ENVIRONMENT]:
        raise SafetensorsError(
            f"storage_options: {', '.join(map(repr, theirs))} are not for the Hub: huggingface_hub has proxies and "
            "certificates from the environment (HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE)"
        )
    endpoint, token = hub_api.endpoint(options.pop("endpoint", None)), options.pop("token", None)
    client, retries = _client(options, endpoint.startswith("http://"), _HUB_RETRIES)
    if options:
        raise SafetensorsError(f"storage_options: {', '.join(map(repr, options))} are not for the Hub")
    api = hub_api.HubApi(endpoint, token, client, timeout_seconds(client, retries))
    return hub.hub_store(url, api, client, retries)


def _made(root: str, make: Callable[[], _T]) -> _T:
    """Return what `make` makes of storage options; `SafetensorsError` if they are wrong."""
    try:
        return make()
    except (BaseError, TypeError, ValueError) as error:
        fault = reason(error)
    # Out of the handler: the error may hold a secret.
    raise SafetensorsError(f"{root}: cannot be used with these storage_options: {fault}")


def _client(options: dict[str, Any], plain: bool, default: Retries = _RETRIES) -> tuple[Any, Retries]:
    """Take the options of the HTTP client and of retries out of `options`; `plain` is for a server without TLS."""
    client: dict[str, Any] = {**_TIMEOUTS}
    if plain:
        client["allow_http"] = True
    client |= {name: options.pop(name) for name in _CLIENT_OPTIONS & options.keys()}
    attempts = options.pop("max_retries", default.attempts - 1)
    seconds = options.pop("retry_timeout", default.seconds)
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    if not isinstance(attempts, int) or attempts < 0 or not isinstance(seconds, int | float) or seconds < 0:
        raise SafetensorsError(
            f"storage_options: max_retries is {attempts!r} and retry_timeout {seconds!r}, must be a number of retries "
            "and one of seconds"
        )
    return client, Retries(attempts + 1, float(seconds))


def _from_environment(scheme: str) -> dict[str, Any]:
    """Return what other clients of a store take from the environment and obstore does not."""
    if scheme in GCS and (host := os.environ.get("STORAGE_EMULATOR_HOST")):
        url = host if "://" in host else f"http://{host}"
        # An emulator wants no token. Before it writes, obstore asks Google for one all the same, unless it has any.
        return {"base_url": url.rstrip("/"), "skip_signature": True, "bearer_token": "token"}
    if scheme in AZURE and (text := os.environ.get(_CONNECTION_STRING)):
        values = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
        return {option: values[name] for name, option in _OF_CONNECTION.items() if name in values}
    return {}


def _is_plain(options: Mapping[str, Any]) -> bool:
    """Whether somebody asked for a server without TLS, by giving its address."""
    values = [*options.values(), *(os.environ.get(name, "") for name in _ENDPOINTS)]
    return any(isinstance(value, str) and value.startswith("http://") for value in values)
