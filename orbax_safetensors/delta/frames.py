"""A tensor of a delta: one zstd frame of its new bytes XOR its old ones, made and read piece by piece."""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.errors import ChecksumError, SafetensorsError
from orbax_safetensors.storage.store import File

# Of a tensor in memory. Short enough that what was read is still in the processor's cache when it is compressed.
PIECE_BYTES = 2**20
# What all publishers use. Higher levels take longer than they save.
_LEVEL = 1


def zstandard() -> ModuleType:
    """Return the library, which is an extra; raises `SafetensorsError` if it is not installed."""
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise SafetensorsError("deltas need zstandard: pip install zstandard") from error


class FileRange(NamedTuple):
    """Bytes of an open file."""

    file: File
    begin: int
    nbytes: int

    def pieces(self, buffer: np.ndarray) -> Iterator[np.ndarray]:
        """Yield all bytes in turn, in `buffer`."""
        for at in range(0, self.nbytes, buffer.nbytes):
            piece = buffer[: min(buffer.nbytes, self.nbytes - at)]
            self.file.read([(self.begin + at, [piece.data])])
            yield piece


def open_files(checkpoint: Checkpoint, stack: contextlib.ExitStack) -> list[File]:
    """Open all files of a checkpoint, which `stack` closes."""
    return [stack.enter_context(contextlib.closing(checkpoint.open_file(n))) for n in range(len(checkpoint.files))]


def range_of(checkpoint: Checkpoint, name: str, files: Sequence[File]) -> FileRange:
    """Return the bytes of a tensor, which is in one piece."""
    location = checkpoint.location(name)
    return FileRange(files[location.file], location.begin, checkpoint[name].nbytes)


def encode(
    old: FileRange,
    new: FileRange,
    bits: int,
    buffers: Sequence[np.ndarray],
    write: Callable[[bytes], object],
    report: Callable[[int], object],
) -> tuple[int, str]:
    """Write the frame of two states of a tensor; return how many elements differ, and the checksum of the new bytes.

    Elements have so many `bits`; packed ones count as bytes. `report` is called with the bytes of each piece.
    """
    compressor = zstandard().ZstdCompressor(level=_LEVEL).compressobj(size=new.nbytes)
    element = np.dtype(f"u{max(1, bits // 8)}")
    changed, checksum = 0, 1
    for before, after in zip(old.pieces(buffers[0]), new.pieces(buffers[1]), strict=True):
        checksum = zlib.adler32(after.data, checksum)
        np.bitwise_xor(before, after, out=before)
        changed += int(np.count_nonzero(before.view(element)))
        write(compressor.compress(before.data))
        report(after.nbytes)
    write(compressor.flush())
    return changed, f"{checksum:08x}"


def decode(frame: FileRange, nbytes: int, buffer: np.ndarray, where: str) -> Iterator[np.ndarray]:
    """Yield the `nbytes` bytes of a frame in turn, in `buffer`.

    Raises `ChecksumError`, which begins with `where`, if it is not a frame of so many bytes.
    """
    library = zstandard()
    try:
        reader = library.ZstdDecompressor().stream_reader(_Source(frame), read_size=PIECE_BYTES)
        for at in range(0, nbytes, buffer.nbytes):
            piece = buffer[: min(buffer.nbytes, nbytes - at)]
            if reader.readinto(piece) != piece.nbytes:
                raise ChecksumError(f"{where}: expected a frame of {nbytes} bytes, found fewer")
            yield piece
        if reader.read(1):
            raise ChecksumError(f"{where}: expected a frame of {nbytes} bytes, found more")
    except library.ZstdError as error:
        raise ChecksumError(f"{where}: is not a zstd frame: {error}") from error


class _Source:
    """Bytes of a file as what the library reads from."""

    def __init__(self, frame: FileRange) -> None:
        self._frame, self._at = frame, 0

    def read(self, most: int) -> Any:
        """Return the next bytes, at most so many; none at the end."""
        content = bytearray(min(most, self._frame.nbytes - self._at))
        self._frame.file.read([(self._frame.begin + self._at, [memoryview(content)])])
        self._at += len(content)
        return bytes(content)
