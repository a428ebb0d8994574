"""The versions that a trainer publishes, as their readers have laid them out: `docs/decisions.md`.

A version is a directory that looks like a checkpoint. A full version is one. A delta holds the tensors that changed,
each a zstd frame of its new bytes XOR its old ones; what only its index says tells it from a full version.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.checksums import Recorded, read_checksums
from orbax_safetensors.checkpoint.data import check_data
from orbax_safetensors.checkpoint.files import StoredFile, read_text
from orbax_safetensors.errors import ChecksumError, HeaderError, IndexFileError, MissingError, StorageError
from orbax_safetensors.format.checksums import FileChecksums
from orbax_safetensors.format.header import MAX_HEADER_BYTES
from orbax_safetensors.format.index import SUFFIX, Index
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.format.names import some
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.storage.store import Store, find_small

MAX_VERSION = 999_999
FRAME_DTYPE = "U8"
_NAME = re.compile(r"weight_v(\d{6})")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")
# The one choice that all readers have in common.
_ENCODING = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}
# What stands in the place of an index on an object store until the files are there. A reader that came too early takes
# it for a delta of an unknown kind, and fails; files without an index it would take for a full version.
UNFINISHED = b'{"metadata": {"delta_encoding": "unfinished"}, "unfinished": '


@dataclass(frozen=True)
class DeltaVersion:
    """A delta whose index and headers are valid.

    Attributes:
      files: by path.
      recorded: the CRC-32 of every tensor of the version, also of those that did not change; None if nobody wrote it.
    """

    path: str
    version: int
    files: Mapping[str, StoredFile]
    recorded: Recorded | None


def path_of(publish: str, version: int) -> str:
    """Return the directory of a version."""
    return posixpath.join(publish, f"weight_v{version:06}")


def index_of(version: int, weight_map: Mapping[str, str]) -> Index:
    """Return the index of the delta that makes `version` of the version before it."""
    return Index(weight_map, {"version": f"{version:06}", "base_version": f"{version - 1:06}", **_ENCODING})


def check_follows(store: Store, publish: str, version: int) -> None:
    """Raise `StorageError` unless `version` is the next one after all that are published.

    Version 0 is the model that engines have at first, and need not be there.
    """
    try:
        names = store.list(publish) or {}
    except MissingError:
        names = {}
    versions = {int(match[1]) for match in map(_NAME.fullmatch, names) if match}
    if version in versions and not _is_unfinished(store, path_of(publish, version)):
        raise StorageError(f"{path_of(publish, version)}: already exists; a published version never changes")
    latest = max(versions - {version}, default=0)
    if version != latest + 1:
        raise StorageError(
            f"{publish}: version {version} does not follow: expected {latest + 1}, the one after the latest version"
        )
    if _is_unfinished(store, path_of(publish, latest)):
        raise StorageError(f"{path_of(publish, latest)}: is not complete; publish that version first")


def _is_unfinished(store: Store, path: str) -> bool:
    content = find_small(store, posixpath.join(path, INDEX_NAME), MAX_HEADER_BYTES)
    return content is not None and content.startswith(UNFINISHED)


def check(checkpoint: Checkpoint, recorded: Recorded, options: SafetensorsOptions, fault: str) -> Recorded:
    """Raise `ChecksumError`, which says the `fault`, unless all tensors have the recorded bytes.

    They may lie in other files than those that the record is of. Returns the record of the files of this checkpoint.
    """
    crcs = {name: crc for checksums in recorded.values() for name, crc in checksums.tensors.items()}
    if names := sorted(crcs.keys() ^ checkpoint.tensors.keys()):
        raise ChecksumError(f"{checkpoint.path}: {fault}: it has other tensors: {some(names)}")
    recorded = {
        posixpath.basename(file.path): FileChecksums(
            file.fingerprint, {name: crcs[name] for name in file.header.tensors}
        )
        for file in checkpoint.files
    }
    if faults := check_data(checkpoint, recorded, options).faults:
        raise ChecksumError(f"{checkpoint.path}: {fault}: {some(faults, separator='; ')}")
    return recorded


def read_delta(store: Store, path: str) -> DeltaVersion:
    """Read the index and the headers of a delta.

    Raises `IndexFileError` or `HeaderError` if they are not valid, or of an encoding that this package does not write,
    and `StorageError` if there is no delta.
    """
    index_path = posixpath.join(path, INDEX_NAME)
    content = find_small(store, index_path, MAX_HEADER_BYTES)
    if content is None:
        raise MissingError(f"{index_path}: is missing; a delta has an index")
    index = Index.parse(content, file=index_path)
    if "delta_encoding" not in index.metadata:
        raise IndexFileError(f"{index_path}: is of a full version, which needs no base: load it as it is")
    version = _version_of(index, posixpath.basename(path), index_path)
    names: dict[str, set[str]] = defaultdict(set)
    for tensor, name in index.weight_map.items():
        names[posixpath.join(path, name)].add(tensor)
    if store.lists and (store.is_local or not names):  # a run that has lost may have left other objects
        for file in store.list(path) or ():
            if file.endswith(SUFFIX) and not file.startswith("."):
                names[posixpath.join(path, file)] |= set()
    files = {file: StoredFile.of(file, *read_text(store, file)) for file in names}
    for file, stored in files.items():
        _check_file(file, stored, names[file])
    return DeltaVersion(path, version, files, read_checksums(store, path))


def _version_of(index: Index, name: str, index_path: str) -> int:
    found = {key: index.metadata.get(key) for key in ("version", "base_version", *_ENCODING)}
    version = found["version"]
    number = int(version) if isinstance(version, str) and re.fullmatch(r"\d{6}", version) else 0
    if found != dict(index_of(number, {}).metadata) or number == 0:
        expected = {"version": "six digits", "base_version": "the version before", **_ENCODING}
        raise IndexFileError(f"{index_path}: expected {expected}, found {found}")
    if (named := _NAME.fullmatch(name)) and int(named[1]) != number:
        raise IndexFileError(f"{index_path}: expected the version of the directory, {named[1]}, found {version}")
    return number


def _check_file(path: str, stored: StoredFile, names: set[str]) -> None:
    header = stored.header
    if header.tensors.keys() != names:
        raise HeaderError(f"{path}: its tensors are not those that the index names: {header.tensors.keys() ^ names}")
    for name, entry in header.tensors.items():
        if entry.dtype.name != FRAME_DTYPE or len(entry.shape) != 1:
            raise HeaderError(f"{path}: tensor {name!r}: expected a line of {FRAME_DTYPE}, found {entry}")
        if not _CHECKSUM.fullmatch(header.metadata.get(name, "")):
            raise HeaderError(f"{path}: tensor {name!r}: expected an adler32 of its new bytes in __metadata__")
