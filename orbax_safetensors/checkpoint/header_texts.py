"""The texts that describe a checkpoint's files, their headers and the index, as they are read, sent and recorded.

The record is `safetensors.headers.json.gz`: all texts of a directory, to be read in one request. What writes a
checkpoint into an object store writes the record last. A text of it stands for its file as long as the listing of the
directory has the file in the recorded state. Otherwise, or if anything is wrong with the record, the file itself is
read: a record saves requests, and nothing depends on it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import posixpath
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from orbax_safetensors.errors import IndexFileError, SafetensorsError
from orbax_safetensors.format import strict_json
from orbax_safetensors.format.header import MAX_HEADER_BYTES, PREFIX_BYTES, header_length
from orbax_safetensors.format.index import is_index
from orbax_safetensors.storage.store import File, Stamp, Store, read_small, write_small
from orbax_safetensors.storage.threads import Threads

logger = logging.getLogger(__name__)

HEADERS_NAME = "safetensors.headers.json.gz"

# Of many texts together. The largest models have some 200,000 tensors, whose headers have 30 MB.
MAX_BYTES = 128 * 2**20
_GZIP = 31  # `wbits` of zlib for the format of gzip, which has a checksum

_T = TypeVar("_T")


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


def read_all(store: Store, paths: Sequence[str], read: Callable[[Store, str], _T]) -> Iterator[_T | SafetensorsError]:
    """Yield `read` of each file, in their order, or its error. On remote stores, many files are read at once."""

    def attempt(path: str) -> _T | SafetensorsError:
        try:
            return read(store, path)
        except SafetensorsError as fault:
            return fault

    if store.is_local or len(paths) < 2:
        yield from map(attempt, paths)
        return
    with Threads(min(store.cost.requests, len(paths)), "safetensors") as pool:
        try:
            yield from pool.map(attempt, paths)
        except BaseException:  # an interrupt, or the caller has stopped to iterate
            store.cancel()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def encode(texts: Mapping[str, StoredText]) -> bytes:
    """Return texts by name as JSON, `{name: {"nbytes": ..., "version": ..., "text": ...}}`, compressed by gzip.

    Leaves out what is not UTF-8, and so not valid.
    """
    document = {}
    for name, (stamp, text) in texts.items():
        with contextlib.suppress(UnicodeDecodeError):
            document[name] = {"nbytes": stamp.nbytes, "version": stamp.version, "text": text.decode()}
    return zlib.compress(json.dumps(document).encode(), wbits=_GZIP)


def decode(content: bytes) -> dict[str, StoredText]:
    """Return what `encode` was given; `ValueError` if that is not what `content` has."""
    try:
        unpacking = zlib.decompressobj(_GZIP)
        document = unpacking.decompress(content, MAX_BYTES)
        if not unpacking.eof or unpacking.unused_data:
            raise ValueError(f"expected one gzip stream of at most {MAX_BYTES} bytes")
        return {
            name: StoredText(Stamp(int(facts["nbytes"]), str(facts["version"])), facts["text"].encode())
            for name, facts in strict_json.loads(document).items()
        }
    except (zlib.error, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{error!r:.200}") from error


def recorded_texts(store: Store, directory: str, states: Mapping[str, Stamp | None]) -> dict[str, StoredText]:
    """Return the recorded texts of the files that are still as they were, by name; none if the record is not valid.

    `states` are those of the directory's listing, which has the record.
    """
    path = posixpath.join(directory, HEADERS_NAME)
    try:
        # The answer has to be in the state that the listing has: later reads of the files compare their answers so.
        texts = decode(read_small(store.open(path, states[HEADERS_NAME]), MAX_BYTES))
    except (SafetensorsError, ValueError) as error:
        logger.debug("%s: is not used, and the headers are read: %s", path, error)
        return {}
    current = {name: text for name, text in texts.items() if is_exact(text.stamp) and states.get(name) == text.stamp}
    if len(current) < len(texts):
        logger.debug("%s: %d of %d files have changed since", path, len(texts) - len(current), len(texts))
    return current


def is_exact(stamp: Stamp) -> bool:
    """Return whether only one content has this state: by a strong ETag, not by a date."""
    return stamp.version.startswith('"')


def write_header_record(store: Store, directory: str, names: Iterable[str]) -> None:
    """Record the headers of files in a directory, and the indexes beside them, if it is on an object store.

    Reads them, as another program may have replaced a file that this one has written. Writes no record if that fails,
    or if the listing has other states.
    """
    if store.is_local:
        return
    path = posixpath.join(directory, HEADERS_NAME)
    try:
        states = store.list(directory) or {}
        names = [*names, *(name for name in states if is_index(name))]
        read = read_all(store, [posixpath.join(directory, name) for name in names], read_text)
        texts: dict[str, StoredText] = {}
        for name, text in zip(names, read, strict=True):
            if isinstance(text, SafetensorsError):
                raise text
            if not is_exact(text.stamp) or text.stamp != states.get(name):
                logger.debug("%s: is not written: %s is listed in another state than it is sent", path, name)
                return
            texts[name] = text
        content = encode(texts)
        decode(content)  # what is too long to be read is not worth a request of every load
        write_small(store, path, content)
    except (SafetensorsError, ValueError) as error:
        logger.warning("%s: is not written, so that each load reads all headers: %s", path, error)
