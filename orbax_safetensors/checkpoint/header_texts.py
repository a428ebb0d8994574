"""The texts that describe the files of a checkpoint, their headers and the index, as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from orbax_safetensors.errors import IndexFileError, SafetensorsError
from orbax_safetensors.format.header import MAX_HEADER_BYTES, PREFIX_BYTES, header_length
from orbax_safetensors.format.index import is_index
from orbax_safetensors.storage.store import File, Stamp, Store
from orbax_safetensors.storage.threads import Threads

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
