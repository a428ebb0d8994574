"""What tells whether files are still those that an index was made of: their sizes, and digests of their headers.

An index has addresses. It is only as good as the files are the same, which Orbax and TensorStore cannot notice.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Iterable, Mapping
from typing import Any

from orbax_safetensors.errors import StorageError
from orbax_safetensors.format.header import PREFIX_BYTES, header_length
from orbax_safetensors.io.store import Store, read_small

# Beside the index: `{"files": {name: {"nbytes": ..., "header_sha256": ...}}}`.
TRUST_FILE = "_LINKED_FILES"

_MAX_BYTES = 64 * 2**20


def fingerprints(store: Store, paths: Iterable[str]) -> bytes:
    """The content of `TRUST_FILE` for some files of one directory."""
    return noted({posixpath.basename(path): _fingerprint(store, path) for path in paths})


def noted(files: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The content of `TRUST_FILE`, given the `fingerprint` of each file."""
    return json.dumps({"files": files}, indent=1).encode()


def fingerprint(nbytes: int, header: bytes | bytearray) -> dict[str, Any]:
    """What tells a file apart: its size, and its header without the eight bytes before it."""
    return {"nbytes": nbytes, "header_sha256": hashlib.sha256(header).hexdigest()}


def changed(store: Store, directory: str) -> list[StorageError] | None:
    """The files that are no longer those that the index in a directory was made of; None if it has none of ours."""
    path = posixpath.join(directory, TRUST_FILE)
    file = store.find(path)
    if file is None:
        return None
    try:
        noted: Mapping[str, Mapping[str, Any]] = json.loads(read_small(file, _MAX_BYTES))["files"]
        faults = []
        for name, own in noted.items():
            at = posixpath.join(directory, name)
            try:
                found = _fingerprint(store, at)
            except StorageError as error:
                faults.append(error)
                continue
            if found != own:
                faults.append(
                    StorageError(
                        f"{at}: is not the file that the index beside it was made of: expected {own}, found {found}"
                    )
                )
        return faults
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path}: is not what a link has written: {error!r:.200}") from error


def _fingerprint(store: Store, path: str) -> dict[str, Any]:
    file = store.open(path)
    try:
        nbytes = file.stamp.nbytes
        prefix = bytearray(min(PREFIX_BYTES, nbytes))
        file.read([(0, [memoryview(prefix)])])
        header = bytearray(header_length(bytes(prefix), nbytes, file=path))
        file.read([(PREFIX_BYTES, [memoryview(header)])])
    finally:
        file.close()
    return fingerprint(nbytes, header)
