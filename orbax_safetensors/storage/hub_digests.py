"""The SHA-256 that the Hugging Face Hub has of a file, as `huggingface_hub` leaves it beside a download.

Large files are known to the Hub by that digest, which it sends as their ETag. Small ones have another.
"""

from __future__ import annotations

import os
import re

from orbax_safetensors.storage.paths import absolute_path

_SHA256 = re.compile("[0-9a-f]{64}")
_MAX_LINE = 1024  # characters; commits and digests are shorter
_METADATA = os.path.join(".cache", "huggingface", "download")


def sha256_of(etag: str | None) -> str | None:
    """Return the digest that is an ETag of the Hub; None if it is another."""
    return etag if etag is not None and _SHA256.fullmatch(etag) else None


def downloaded_sha256(path: str) -> str | None:
    """Return the digest of the file that was downloaded to `path`; None if nothing tells of one.

    In the cache of `huggingface_hub`, it is the name of what `snapshots/<commit>/<file>` links to. In a directory for
    `local_dir`, it is in `.cache/huggingface/download/<file>.metadata`. Touches only names and that small file.
    """
    try:
        target = os.path.realpath(path)
    except (OSError, ValueError):
        return None
    if os.path.islink(path) and os.path.basename(os.path.dirname(target)) == "blobs":
        return sha256_of(os.path.basename(target))
    directory, name = os.path.split(absolute_path(path))
    while True:
        etag = _etag(os.path.join(directory, _METADATA, f"{name}.metadata"))
        if etag is not None or directory == os.path.dirname(directory):
            return sha256_of(etag)
        directory, parent = os.path.split(directory)
        name = os.path.join(parent, name)


def _etag(path: str) -> str | None:
    """Return the second line of a regular file, which follows the commit; None if there is no such file."""
    if not os.path.isfile(path):  # to open a pipe would wait for its writer
        return None
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.readline(_MAX_LINE)
            return file.readline(_MAX_LINE).strip()
    except OSError:
        return None
