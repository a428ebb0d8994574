"""Which files a checkpoint is made of, and what their headers say.

Only headers and the index are read here; the bytes of tensors are moved by `transfer`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from orbax_safetensors.checkpoint.header_texts import (
    HEADERS_NAME,
    StoredText,
    read_all,
    read_text,
    recorded_texts,
    text_of,
)
from orbax_safetensors.errors import HeaderError, IndexFileError, MissingError, SafetensorsError, StorageError
from orbax_safetensors.format.foreign import of_bytes
from orbax_safetensors.format.header import Header, fingerprint
from orbax_safetensors.format.index import INDEX_SUFFIX, Index
from orbax_safetensors.format.layout import ADAPTER_NAME, FILE_NAME, INDEX_NAME
from orbax_safetensors.format.names import some
from orbax_safetensors.orbax_store.directories import is_on_gcs
from orbax_safetensors.orbax_store.index_note import read_note
from orbax_safetensors.storage.process_memory import no_collection
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Stamp, Store
from orbax_safetensors.storage.whereabouts import instead

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
# Each rank of PyTorch has its own part of a numbered file, and need not have one.
_NUMBERED = re.compile(rf"(?:shard-\d+-)?(.*)-(\d+)-of-(\d+){re.escape(SUFFIX)}")
_NAMED = 8  # missing files in a message


@dataclass(frozen=True)
class StoredFile:
    """One `.safetensors` file: its path, its state when its header was read, the header, and its `fingerprint`."""

    path: str
    stamp: Stamp
    header: Header
    fingerprint: Mapping[str, Any]

    @staticmethod
    @no_collection()
    def of(path: str, stamp: Stamp, header: bytes) -> StoredFile:
        """Return the file with this header, which is parsed; raises `HeaderError` if it is not valid."""
        parsed = Header.parse(header, stamp.nbytes, file=path)
        return StoredFile(path, stamp, parsed, fingerprint(stamp.nbytes, header))


def is_orbax(path: str, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Return whether `path`, which may be a `gs://` URL, is a checkpoint of Orbax: a directory without safetensors."""
    names: Collection[str] | None
    if is_on_gcs(path):
        if path.endswith(SUFFIX):  # a reader of an object may not be allowed to list its neighbours
            return False
        store, path = store_of(path, storage_options)
        names = store.list(path)
    else:
        try:
            names = os.listdir(path) if os.path.isdir(path) else None
        except OSError as error:
            raise StorageError(f"{path}: cannot list the directory: {error.strerror}") from error
    return names is not None and not any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


class Opening(NamedTuple):
    """The requests that open a checkpoint, for its listing, its index and its headers.

    Attributes:
      requests: of each process, with the record of headers if the directory has one.
      requests_without_record: of each process if there were no record.
    """

    requests: int
    requests_without_record: int


NO_OPENING = Opening(0, 0)


@dataclass(frozen=True)
class Found:
    """The files of a checkpoint, before their headers are known.

    Attributes:
      index: what names the files, if there is one.
      states: those of the directory's listing, by path; none if it was not listed.
      recorded: the headers that a record has of these files, by path.
      opening: the requests that found all this, before any header is read.
      assumed: whether only the caller, or the usual name, says that there is such a file.
    """

    paths: list[str]
    index: Index | None = None
    states: Mapping[str, Stamp | None] = field(default_factory=dict)
    recorded: Mapping[str, StoredText] = field(default_factory=dict)
    opening: Opening = NO_OPENING
    assumed: bool = False


def checkpoint_files(store: Store, path: str, report: Callable[[SafetensorsError], None], *, use_record: bool) -> Found:
    """Find the files of a checkpoint, the index that names them, and with `use_record` the headers in a record."""
    if path.endswith(SUFFIX) and not store.is_local:  # a reader of an object may not be allowed to list its neighbours
        return Found([path], assumed=True)
    if path.endswith(INDEX_SUFFIX) and not (store.is_local and os.path.isdir(path)):
        raise HeaderError(f"{path}: is not a safetensors file; it is {of_bytes(b'{', path)}")
    index: Index | None
    if not store.lists:
        file = store.find(posixpath.join(path, INDEX_NAME))
        if file is None:
            return Found([posixpath.join(path, FILE_NAME)], opening=Opening(1, 1), assumed=True)
        index = _index(file.path, text_of(file))
        return Found([posixpath.join(path, name) for name in index.files], index, opening=Opening(1, 1))
    states = store.list(path)
    if states is None:
        return Found([path], assumed=True)
    names = list(states)
    has_record = use_record and states.get(HEADERS_NAME) is not None
    recorded = recorded_texts(store, path, states) if has_record else {}
    index, index_name = None, _index_name(path, names)
    if index_name is not None:
        index = _read_index(store, posixpath.join(path, index_name), recorded.get(index_name))
    files = _file_names(path, names, index, report)
    incomplete = [] if index is not None else list(_incomplete_sets(files))
    if incomplete and not _are_linked(store, path, files):
        # Objects appear one by one, each whole, and last the index: a save may not have ended.
        kind = MissingError if store.is_local else IndexFileError
        for lacking in incomplete:
            report(kind(f"{path}: is not complete: {lacking}"))
    without_record = 1 + (index is not None)
    return Found(
        [posixpath.join(path, name) for name in files],
        index,
        {posixpath.join(path, name): state for name, state in states.items()},
        {posixpath.join(path, name): text for name, text in recorded.items()},
        Opening(without_record + has_record - (index_name in recorded), without_record),
    )


def _file_names(
    path: str, names: list[str], index: Index | None, report: Callable[[SafetensorsError], None]
) -> list[str]:
    """Return which of the `names` in the directory `path` belong to the checkpoint."""
    present = [name for name in names if name.endswith(SUFFIX) and not name.startswith(".")]
    if index is None:
        if not present:
            raise MissingError(f"{path}: holds no {SUFFIX} file and no *{INDEX_SUFFIX}{instead(path, names)}")
        return present
    there = set(names)
    for name in sorted(set(index.files) - there):
        report(MissingError(f"{posixpath.join(path, name)}: is missing, and the index names it"))
    if unnamed := sorted(set(present) - set(index.files)):
        logger.info("%s: the index does not name these files, they are ignored: %s", path, some(unnamed))
    return [name for name in index.files if name in there]


def _incomplete_sets(names: Sequence[str]) -> Iterator[str]:
    """Yield what is missing of each set of files whose names say that there are more of them, and that has no index."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            sets.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, count), numbers in sets.items():
        if (lacking := int(count) - len(numbers)) > 0:
            first = 0 if 0 in numbers else 1
            missing = (number for number in range(first, first + int(count)) if number not in numbers)
            listed = [f"{stem}-{number:0{len(count)}}-of-{count}{SUFFIX}" for number in islice(missing, _NAMED)]
            more = f" and {lacking - len(listed)} more" if lacking > len(listed) else ""
            yield f"{lacking} of {int(count)} files are missing, and there is no index: {', '.join(listed)}{more}"


def _are_linked(store: Store, path: str, names: Sequence[str]) -> bool:
    """Return whether a link or a save has made the directory `path` for just these files; a link may be of one."""
    note = read_note(store, path)
    return note is not None and note.files.keys() == set(names)


def _index_name(path: str, names: Sequence[str]) -> str | None:
    """Return the name of the index among the `names` in the directory `path`, or None."""
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX) and not name.startswith(".")]
    if not indexes:
        return None
    # Some repositories keep a second index for a variant (`model.fp16.safetensors.index.json`).
    name = INDEX_NAME if INDEX_NAME in indexes else indexes[0]
    if len(indexes) > 1 and name != INDEX_NAME:
        raise IndexFileError(f"{path}: expected {INDEX_NAME} or one other index, found {some(indexes)}")
    return name


def _read_index(store: Store, path: str, recorded: StoredText | None) -> Index:
    if recorded is not None:
        with contextlib.suppress(IndexFileError):  # of the record, perhaps, and not of the index
            return _index(path, recorded)
    return _index(path, read_text(store, path))


def _index(path: str, text: StoredText) -> Index:
    index = Index.parse(text.text, file=path)
    if not index.weight_map:
        raise IndexFileError(f"{path}: names no tensor")
    return index


def read_usual(store: Store, path: str) -> Iterator[StoredFile | SafetensorsError]:
    """Yield the only file in a directory that cannot be listed, a model or an adapter, or its error."""
    model, adapter = (posixpath.join(path, name) for name in (FILE_NAME, ADAPTER_NAME))
    for file in read_files(store, [model]):
        others = read_files(store, [adapter]) if isinstance(file, MissingError) else ()
        yield next((other for other in others if not isinstance(other, MissingError)), file)


def read_files(
    store: Store, paths: Sequence[str], known: Mapping[str, StoredText] = MappingProxyType({})
) -> Iterator[StoredFile | SafetensorsError]:
    """Yield each file with its header, in their order, or its error; `known` are headers that need not be read."""
    return read_all(store, paths, partial(_stored_file, known))


def _stored_file(known: Mapping[str, StoredText], store: Store, path: str) -> StoredFile:
    """Return a file whose header is valid: the known one, or if it is not, that of the file."""
    if path in known:
        with contextlib.suppress(HeaderError):  # of the record, perhaps, and not of the file
            return StoredFile.of(path, *known[path])
    return StoredFile.of(path, *read_text(store, path))
