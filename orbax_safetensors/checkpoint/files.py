"""Which files a checkpoint is made of, and what their headers say.

Only headers and the index are read here; the bytes of tensors are moved by `transfer`.
"""

from __future__ import annotations

import errno
import logging
import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from orbax_safetensors.errors import HeaderError, IndexFileError, MissingError, SafetensorsError, StorageError
from orbax_safetensors.format.foreign import of_bytes
from orbax_safetensors.format.header import MAX_HEADER_BYTES, PREFIX_BYTES, Header, fingerprint, header_length
from orbax_safetensors.format.index import INDEX_SUFFIX, SUFFIX, Index, index_stem, is_index
from orbax_safetensors.format.layout import ADAPTER_NAME, FILE_NAME, INDEX_NAME, USUAL_STEMS, file_stem
from orbax_safetensors.format.names import some
from orbax_safetensors.format.reference_verdict import check_by_reference
from orbax_safetensors.orbax_store.directories import is_on_gcs
from orbax_safetensors.orbax_store.index_note import read_note
from orbax_safetensors.storage.process_memory import no_collection
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import File, Stamp, Store
from orbax_safetensors.storage.threads import Threads
from orbax_safetensors.storage.whereabouts import directory_hint

logger = logging.getLogger(__name__)

# Each rank of PyTorch has its own part of a numbered file, and need not have one.
_NUMBERED = re.compile(rf"(?:shard-\d+-)?(.*)-(\d+)-of-(\d+){re.escape(SUFFIX)}")
_NAMED = 8  # missing files in a message
# What is known to be a variant; after a name that is not a usual one, all else may be a part of the same model.
_VARIANT = (
    r"(?:(?:bf|fp|nf|mxfp|nvfp|u?int|b?float)\d+(?:_?e\dm\d\w*)?|half|scaled|pruned|(?:non[_-]?)?ema(?:[_-]?only)?)"
)
_VARIANTS = re.compile(rf"{_VARIANT}(?:[._-]{_VARIANT})*", re.IGNORECASE)
# How the names of Mistral's and Meta's own copies of a model begin.
_COPY = "consolidated"


class StoredText(NamedTuple):
    """The JSON of a header, or a whole index, and the state of the file that it was read from."""

    stamp: Stamp
    text: bytes


def read_text(store: Store, path: str) -> StoredText:
    """Read the header of a `.safetensors` file, or a whole index; raises `SafetensorsError` if it can be neither."""
    return text_of(store.open(path))


def text_of(file: File) -> StoredText:
    """Return what `read_text` returns of an open file, and close it."""
    try:
        begin, nbytes = 0, file.stamp.nbytes
        if not is_index(file.path):
            prefix = bytearray(min(PREFIX_BYTES, nbytes))
            file.read([(0, [memoryview(prefix)])])
            begin, nbytes = PREFIX_BYTES, header_length(bytes(prefix), nbytes, file=file.path)
        elif nbytes > MAX_HEADER_BYTES:
            raise IndexFileError(f"{file.path}: expected at most {MAX_HEADER_BYTES} bytes, found {nbytes}")
        text = bytearray(nbytes)
        file.read([(begin, [memoryview(text)])])
        return StoredText(file.stamp, bytes(text))
    finally:
        file.close()


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
    return names is not None and not any(map(is_part, names))


class Finding(NamedTuple):
    """What a directory holds and no load reads: a load logs it at this level, and to `verify` it is a fault."""

    level: int
    fault: IndexFileError


@dataclass(frozen=True)
class Found:
    """The files of a checkpoint, before their headers are known.

    Attributes:
      index: what names the files, if there is one.
      index_name: the name of its file.
      known: the headers that were read to find the files, by path.
      requests: those that found all this.
      assumed: whether only the caller, or the usual name, says that there is such a file.
      findings: what a load logs.
    """

    paths: list[str]
    index: Index | None = None
    index_name: str | None = None
    known: Mapping[str, StoredText] = field(default_factory=dict)
    requests: int = 0
    assumed: bool = False
    findings: tuple[Finding, ...] = ()


def checkpoint_files(store: Store, path: str, report: Callable[[SafetensorsError], None]) -> Found:
    """Find the files of a checkpoint, and the index that names them.

    Of a directory, they are the files that `transformers` reads: `model.safetensors`, or the files that the index
    names, or without either what is there; `_chosen` says which of several.
    """
    if path.endswith(SUFFIX) and not store.is_local:  # a reader of an object may not be allowed to list its neighbours
        return Found([path], assumed=True)
    if is_index(path) and not (store.is_local and os.path.isdir(path)):
        raise HeaderError(f"{path}: is not a safetensors file; it is {of_bytes(b'{', path)}")
    if not store.lists:
        return _unlisted(store, path)
    states = store.list(path)
    if states is None:
        return Found([path], assumed=True)
    names = [name for name in states if is_part(name)]
    if not names:
        raise MissingError(f"{path}: holds no {SUFFIX} file and no *{INDEX_SUFFIX}{directory_hint(path, states)}")
    index, (index_name, files) = None, _chosen(path, names)
    findings = []
    requests = 1 + (index_name is not None)
    if index_name is not None:
        index_path = posixpath.join(path, index_name)
        try:
            index = _index(index_path, read_text(store, index_path))
        except IndexFileError as damage:
            if files != [FILE_NAME]:
                raise
            findings.append(Finding(logging.WARNING, IndexFileError(f"{damage}; {FILE_NAME} is read without it")))
            names.remove(index_name)
        if index is not None and files != [FILE_NAME]:
            files = _files_of(path, index, names, report)
        elif index is not None and index.files != (FILE_NAME,):
            index = None
    if index is None:
        index_name = None
        # Objects appear one by one, each whole, and last the index: a save may not have ended.
        kind = MissingError if store.is_local else IndexFileError
        incomplete = list(_incomplete_sets(files))
        for lacking in incomplete if incomplete and not _are_linked(store, path, files) else ():
            report(kind(f"{path}: is not complete: {lacking}"))
    read = {index_name, *files}
    if beside := [name for name in names if name not in read]:
        model = f"the model is {some(files)}" if index is None else f"the model is what {index_name} names"
        fault = IndexFileError(f"{path}: {model}; pass the path of a file to read it instead; not read: {some(beside)}")
        findings.append(Finding(logging.WARNING if index is None else logging.INFO, fault))
    return Found(
        [posixpath.join(path, name) for name in files],
        index,
        index_name,
        requests=requests,
        findings=tuple(findings),
    )


def is_part(name: str) -> bool:
    """Return whether a file of a directory is a safetensors file or an index of some, by its name."""
    return not name.startswith(".") and (name.endswith(SUFFIX) or is_index(name))


def _unlisted(store: Store, path: str) -> Found:
    """Find the files of a directory that cannot be listed, by their usual names."""
    faults: list[StorageError] = []
    for name in (FILE_NAME, INDEX_NAME, ADAPTER_NAME):
        try:
            file = store.open(posixpath.join(path, name))
        except StorageError as fault:
            if not isinstance(fault, MissingError) and fault.errno != errno.EACCES:  # or what is missing is forbidden
                raise
            faults.append(fault)
            continue
        tries, text = len(faults) + 1, text_of(file)
        if name != INDEX_NAME:
            return Found([file.path], known={file.path: text}, requests=tries, assumed=True)
        index = _index(file.path, text)
        return Found([posixpath.join(path, name) for name in index.files], index, name, requests=tries)
    raise next((fault for fault in faults if not isinstance(fault, MissingError)), faults[0])


def _chosen(path: str, names: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the index among the `names` in the directory `path`, and the files to read unless it says which.

    A variant (`model.fp16.safetensors`) is passed over if the same without the variant is there, and so are files
    beside those of a usual name: programs keep copies of a model, or parts of their own, in files of other names.
    Otherwise several files together are the model. Raises `IndexFileError` if there are several indexes to choose from.
    """
    if FILE_NAME in names:
        return INDEX_NAME if INDEX_NAME in names else None, [FILE_NAME]
    stems = {name: index_stem(name) if is_index(name) else file_stem(name) for name in names}
    there = {*stems.values()}
    plain = [name for name, stem in stems.items() if not any(before in there for before in _without_variant(stem))]
    indexes = [name for name in plain if is_index(name)]
    candidates = indexes or plain
    for usual in USUAL_STEMS:
        if preferred := [name for name in candidates if stems[name] == usual]:
            candidates = preferred
            break
    else:
        candidates = [name for name in candidates if not stems[name].startswith(_COPY)] or candidates
    if not indexes:
        return None, candidates
    if len(candidates) > 1:
        raise IndexFileError(
            f"{path}: expected {INDEX_NAME} or one other index, found {some(candidates)}; pass the path of one file to "
            "read it alone"
        )
    return candidates[0], []


def _without_variant(stem: str) -> Iterator[str]:
    """Yield each name that `stem` may be a variant of: `model` for `model.fp16`, the same weights in another precision.

    A variant follows a dot. After a name that is not usual, only a known one counts, as "fp16" or "ema" do.
    """
    for dot in re.finditer(r"\.", stem):
        before, after = stem[: dot.start()], stem[dot.end() :]
        if before in USUAL_STEMS or _VARIANTS.fullmatch(after):
            yield before


def _files_of(path: str, index: Index, names: Sequence[str], report: Callable[[SafetensorsError], None]) -> list[str]:
    """Return the files of an index that are there, and report those that are not."""
    there = {*names}
    for name in index.files:
        if name not in there:
            report(MissingError(f"{posixpath.join(path, name)}: is missing, and the index names it"))
    if not index.weight_map:  # a delta of nothing, which has a file as well
        return [name for name in names if name.endswith(SUFFIX)]
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


def _index(path: str, text: StoredText) -> Index:
    index = Index.parse(text.text, file=path)
    if not index.weight_map and index.delta_of is None:
        raise IndexFileError(f"{path}: names no tensor")
    return index


def read_files(
    store: Store, paths: Sequence[str], known: Mapping[str, StoredText], *, by_reference: bool
) -> Iterator[StoredFile | SafetensorsError]:
    """Yield each file with its header, in their order, or its error; `known` are headers that need not be read.

    If `by_reference`, the `safetensors` package checks each header as well. On remote stores, many files are read at
    once.
    """

    def read(path: str) -> StoredFile | SafetensorsError:
        try:
            stamp, text = known.get(path) or read_text(store, path)
            file = StoredFile.of(path, stamp, text)
            if by_reference:
                check_by_reference(file.header, text, file=path)
            return file
        except SafetensorsError as fault:
            return fault

    if store.is_local or len(paths) < 2:
        yield from map(read, paths)
        return
    with Threads(min(store.cost.requests, len(paths)), "safetensors") as pool:
        try:
            yield from pool.map(read, paths)
        except BaseException:  # an interrupt, or the caller has stopped to iterate
            store.cancel()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
