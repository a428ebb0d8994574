"""Chooses the store for a path: file systems for paths, object stores and HTTP servers for URLs."""

from __future__ import annotations

import contextlib
import os
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import HTTPStore, from_url

from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.storage import credentials
from orbax_safetensors.storage.bucket import BucketStore
from orbax_safetensors.storage.http_options import ENVIRONMENT_OPTIONS, HUB_RETRIES, RETRIES, HttpOptions
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.storage.paths import (
    AZURE,
    GCS,
    HTTP,
    HUB,
    S3,
    SCHEMES,
    HubPath,
    PathLike,
    as_text,
    is_url,
    shown,
)
from orbax_safetensors.storage.remote import RemoteStore
from orbax_safetensors.storage.retries import safe_reason, secrets_of
from orbax_safetensors.storage.store import Store
from orbax_safetensors.storage.web import WebStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore, RetryConfig

_T = TypeVar("_T")

# A repository as people see it, where no file is.
_HUB_HOSTS, _HUB_PAGE = ("huggingface.co", "hf.co"), re.compile(r"/([^/]+/[^/]+)(?:/(?:tree|blob)/.*)?/?")
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

    `storage_options` are for URLs, see `SafetensorsOptions`; paths ignore them. For a repository of the Hub, this
    requests its commit and returns a path with it. Raises `StorageError` if that fails or the scheme of a URL is
    unsupported, and `SafetensorsError` if an option is.
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
        return _fsspec(path, options)
    bucket, _, key = path.partition("://")[2].partition("/")
    root = f"{scheme}://{bucket}"
    if not bucket:
        raise StorageError(f"{path}: expected the name of a bucket after {scheme}://")
    if scheme in AZURE and "\\" in key:
        raise StorageError(f"{path}: Azure takes the backslash for a slash, and finds another blob")
    options = _from_environment(scheme) | options
    http = HttpOptions.pop_from(options, plain=_is_plain(options))
    for name, value in options.items():  # obstore would panic
        if isinstance(value, str) and not value.isprintable() and not name.lower().endswith("service_account_key"):
            raise SafetensorsError(f"storage_options: {name} has a character that no header has, such as a newline")
    config: Any = {"config": options}
    if scheme in S3 and (provider := credentials.aws_profile(options)) is not None:
        config["credential_provider"] = provider

    def objects(client: Any, repeat: RetryConfig) -> ObjectStore:
        return _made(root, options, lambda: from_url(root, client_options=client, retry_config=repeat, **config))

    def for_writing() -> ObjectStore:
        # The answer to a part comes after all of its bytes have gone, which on a slow link takes long.
        patient = {name: value for name, value in http.client.items() if name != "read_timeout"}
        return objects(patient, http.retries.of_obstore())

    store = BucketStore(root, objects(http.client, {"max_retries": 0}), http.retries, for_writing)
    return store, f"{root}/{key.strip('/')}".rstrip("/")


def is_unpinned(path: str) -> bool:
    """Return whether a path names a branch or tag of a repository: processes may find different commits there.

    `store_of` pins the commit that it finds. Raises `StorageError` if the URL does not name a repository.
    """
    return path.partition("://")[0] in HUB and not _COMMIT.fullmatch(HubPath.parse(path).revision)


def _http(url: str, options: dict[str, Any]) -> tuple[Store, str]:
    """Return the files of a server, whose query, user and password go with every request.

    Paths are URLs without these, and with characters as they are rather than escaped. None of these, nor any header,
    goes further than to the server of `url` if that sends its clients elsewhere.
    """
    http = HttpOptions.pop_from(options, plain=url.startswith("http://"))
    if options:
        raise SafetensorsError(f"storage_options: {', '.join(map(repr, options))} are not for HTTP servers")
    parts, root = None, ""
    with contextlib.suppress(ValueError):  # which would tell the password
        parts = urlsplit(url)
        # Everything below the server's root, so that files beside this one are of the same store.
        root = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if parts is None or shown(root) != root:  # a part of a password stands where the port should be
        raise StorageError(f"{shown(url)}: is not a URL")
    user, _, host = parts.netloc.rpartition("@")
    if host in _HUB_HOSTS and (page := _HUB_PAGE.fullmatch(parts.path)):
        raise StorageError(f"{shown(url)}: is a page of the Hub: write hf://{page[1]}, with its revision as @revision")
    if user:
        basic = b64encode(unquote(user).encode()).decode()
        headers = {**http.client.get("default_headers", {}), "Authorization": f"Basic {basic}"}
        http = replace(http, client={**http.client, "default_headers": headers})
    public: Any = {name: value for name, value in http.client.items() if name != "default_headers"}
    objects = _made(root, {}, lambda: HTTPStore(root, client_options=public, retry_config={"max_retries": 0}))
    store = RemoteStore(root, objects, http.retries)
    if parts.query or http.client.get("default_headers"):
        store = WebStore(root, objects, parts.query, http)
    return store, f"{root}/{unquote(parts.path).strip('/')}".rstrip("/")


def _hub(url: str, options: dict[str, Any]) -> tuple[Store, str]:
    """Return a repository at a commit, and the URL with that commit."""
    if find_spec("huggingface_hub") is None:
        raise StorageError(
            f"{url}: the Hub is read with huggingface_hub, which is not installed: pip install huggingface_hub"
        )
    from orbax_safetensors.storage import hub, hub_api  # which import it

    if theirs := [name for name in options if name in ENVIRONMENT_OPTIONS]:
        raise SafetensorsError(
            f"storage_options: {', '.join(map(repr, theirs))} are not for the Hub: huggingface_hub has proxies and "
            "certificates from the environment (HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE)"
        )
    endpoint, token = hub_api.endpoint(options.pop("endpoint", None)), options.pop("token", None)
    http = HttpOptions.pop_from(options, plain=endpoint.startswith("http://"), default=HUB_RETRIES)
    if options:
        raise SafetensorsError(f"storage_options: {', '.join(map(repr, options))} are not for the Hub")
    return hub.hub_store(url, hub_api.HubApi(endpoint, token, http), http)


def _fsspec(url: str, options: dict[str, Any]) -> tuple[Store, str]:
    """Return the files of a file system that fsspec knows."""
    from orbax_safetensors.storage import fsspec_store  # which imports it

    if not fsspec_store.knows(url):
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        advice = f"; write {unquote(urlsplit(url).path)} alone" if url.startswith("file://") else ""
        raise StorageError(
            f"{shown(url)}: expected a path or one of {known}, or a URL of a file system of fsspec{advice}"
        )
    path = shown(url).rstrip("/")
    if path.endswith("/..."):
        raise StorageError(f"{path}: is not a URL")
    return fsspec_store.FsspecStore(url, options, RETRIES), path


def _made(root: str, options: Mapping[str, Any], make: Callable[[], _T]) -> _T:
    """Return what `make` makes of storage options; `SafetensorsError` if they are wrong."""
    try:
        return make()
    except (BaseError, TypeError, ValueError) as error:
        fault = safe_reason(error, secrets_of(options))
    # Out of the handler: the error may hold a secret.
    raise SafetensorsError(f"{root}: cannot be used with these storage_options: {fault}")


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
    """Return whether an address that the user has set is of a server without TLS."""
    values = [*options.values(), *(os.environ.get(name, "") for name in _ENDPOINTS)]
    return any(isinstance(value, str) and value.startswith("http://") for value in values)
