"""The texts that describe the files of a checkpoint, their headers and the index, as they are read."""

from __future__ import annotations

from typing import NamedTuple

from orbax_safetensors.errors import IndexFileError
from orbax_safetensors.format.header import MAX_HEADER_BYTES, PREFIX_BYTES, header_length
from orbax_safetensors.format.index import is_index
from orbax_safetensors.storage.store import File, Stamp, Store


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
