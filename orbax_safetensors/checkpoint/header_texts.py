"""The texts that describe a checkpoint's files, their headers and the index, as they are read, sent and recorded."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from orbax_safetensors.errors import IndexFileError, SafetensorsError
from orbax_safetensors.format.header import MAX_HEADER_BYTES, PREFIX_BYTES, header_length
from orbax_safetensors.format.index import INDEX_SUFFIX
from orbax_safetensors.storage.store import File, Stamp, Store

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
        return _index(file) if file.path.endswith(INDEX_SUFFIX) else _header(file)
    finally:
        file.close()


def _header(file: File) -> StoredText:
    prefix = bytearray(min(PREFIX_BYTES, file.stamp.nbytes))
    file.read([(0, [memoryview(prefix)])])
    text = bytearray(header_length(bytes(prefix), file.stamp.nbytes, file=file.path))
    file.read([(PREFIX_BYTES, [memoryview(text)])])
    return StoredText(file.stamp, bytes(text))


def _index(file: File) -> StoredText:
    if file.stamp.nbytes > MAX_HEADER_BYTES:
        raise IndexFileError(f"{file.path}: expected at most {MAX_HEADER_BYTES} bytes, found {file.stamp.nbytes}")
    text = bytearray(file.stamp.nbytes)
    file.read([(0, [memoryview(text)])])
    return StoredText(file.stamp, bytes(text))


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
    with ThreadPoolExecutor(min(store.cost.requests, len(paths)), "safetensors") as pool:
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
            for name, facts in json.loads(document).items()
        }
    except (zlib.error, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{error!r:.200}") from error
