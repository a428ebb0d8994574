"""Safetensors files as one checkpoint: which tensors there are, and where their bytes lie.

Only headers and the index are read here; the bytes of tensors are moved by `transfer`.
"""

from __future__ import annotations

import logging
import posixpath
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from orbax_safetensors.errors import IndexFileError, MissingError, SafetensorsError, StorageError, TensorMismatchError
from orbax_safetensors.format.dtypes import DType, held
from orbax_safetensors.format.header import MAX_HEADER_BYTES, PREFIX_BYTES, Header, TensorEntry, header_length
from orbax_safetensors.format.index import INDEX_SUFFIX, Index
from orbax_safetensors.format.layout import FILE_NAME, INDEX_NAME
from orbax_safetensors.format.names import some
from orbax_safetensors.format.sharding_info import saved_offsets
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.quantization import Quantized
from orbax_safetensors.storage.memory import no_collection
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import UNKNOWN, File, Stamp, Store
from orbax_safetensors.transfer.plan import Location

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
# Between a tensor's name and the number of its piece, where a view has several. No header can hold it, so that no
# tensor is called like a piece.
_PIECE = "\ud800"
_NUMBERED = re.compile(rf"(.*)-(\d+)-of-(\d+){re.escape(SUFFIX)}")

_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class StoredFile:
    """One `.safetensors` file: its path, the state it was in when its header was read, and the header."""

    path: str
    stamp: Stamp
    header: Header


class Piece(NamedTuple):
    """A tensor of a file: `file` is its position in `Checkpoint.files`, `start` where it begins in the whole tensor."""

    file: int
    entry: TensorEntry
    start: tuple[int, ...]


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, in one piece except in PyTorch's sharded files, where its pieces tile it."""

    stored_dtype: DType
    stored_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in which the tensor is held: as stored; packed where an element is less than a byte."""
        return held(self.stored_dtype, self.stored_shape)[0]

    @property
    def dtype(self) -> np.dtype:
        """NumPy dtype in which the tensor is held; `uint8` where an element is less than a byte."""
        return held(self.stored_dtype, self.stored_shape)[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return sum(piece.entry.nbytes for piece in self.pieces)

    @property
    def file(self) -> int:
        """Position in `Checkpoint.files` of the file that has the tensor, or its first piece."""
        return self.pieces[0].file


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a file or a directory, by name, in the order of the files and of their bytes in them.

    `leaves` is what is restored of it.
    """

    path: str
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, StoredTensor]
    store: Store
    mapped: Mapping[str, View] | None = None  # what a family makes of the tensors, by path in the model's tree
    quantized: Mapping[str, Quantized] = field(default_factory=dict)  # tensors that are decoded, by name
    decoded_dtype: np.dtype = _BFLOAT16  # that they have where no other is asked for

    @cached_property
    def leaves(self) -> Mapping[str, View]:
        """What can be restored, by name: the tensors as they are held, or the tree that a family makes of them."""
        return {name: self.view(name) for name in self.tensors} if self.mapped is None else self.mapped

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` of all files; the first file that has a key gives its value."""
        return {key: text for file in reversed(self.files) for key, text in file.header.metadata.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def tree(self, leaf: Callable[[str, View], Any]) -> dict[str, Any]:
        """`leaf(name, view)` of all leaves: in a flat dict by stored name, or nested as the family has them."""
        if self.mapped is None:
            return {name: leaf(name, view) for name, view in self.leaves.items()}
        tree: dict[str, Any] = {}
        for path, view in self.mapped.items():
            *parents, last = path.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = leaf(path, view)
        return tree

    def __getitem__(self, name: str) -> StoredTensor:
        """The tensor `name`; `TensorMismatchError` where there is none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise TensorMismatchError(f"{self.path}: there is no tensor {name!r}") from None

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that there is a view of; those that encode others are not among them."""
        encoding = {name for tensor in self.quantized.values() for name in (tensor.codes, tensor.scales)}
        plain = {name: tensor.shape for name, tensor in self.tensors.items() if name not in encoding}
        decoded = {
            name: tuple(tensor.encoding.shape[axis] for axis in tensor.axes) for name, tensor in self.quantized.items()
        }
        return plain | decoded

    def view(self, name: str) -> View:
        """The tensor `name` as it is held. `location` knows the tensors of the view."""
        if name in self.quantized:
            quantized = self.quantized[name]
            return View.tensor(name, quantized.encoding.shape, self.decoded_dtype).transpose(quantized.axes)
        tensor = self[name]
        if len(tensor.pieces) == 1:
            return View.tensor(name, *held(tensor.stored_dtype, tensor.stored_shape))
        parts = [
            (piece.start, View.tensor(_key(name, number), piece.entry.shape, tensor.dtype))
            for number, piece in enumerate(tensor.pieces)
        ]
        return View.tile(tensor.shape, parts)

    def whole(self, name: str) -> str:
        """The name of the tensor that a view's tensor is, or is a piece of."""
        return name if name in self.quantized or name in self.tensors else name.rpartition(_PIECE)[0]

    def location(self, name: str) -> Location:
        """Where a tensor lies, or a piece of one as a view names it."""
        if name in self.quantized:
            quantized = self.quantized[name]
            return Location(*self.begin(name), _FLOAT32, quantized.encoding, self.begin(quantized.scales))
        tensor, piece = self._piece(name)
        return Location(piece.file, self.files[piece.file].header.data_start + piece.entry.begin, tensor.dtype)

    def begin(self, name: str) -> tuple[int, int]:
        """The file in which a tensor or a piece of one lies, as a view names it, and the offset of its first byte."""
        if name in self.quantized:
            name = self.quantized[name].codes
        _, piece = self._piece(name)
        return piece.file, self.files[piece.file].header.data_start + piece.entry.begin

    def _piece(self, name: str) -> tuple[StoredTensor, Piece]:
        tensor = self.tensors.get(name)
        if tensor is not None:
            return tensor, tensor.pieces[0]
        whole, _, number = name.rpartition(_PIECE)
        return self[whole], self[whole].pieces[int(number)]

    def open_file(self, index: int) -> File:
        """Opens a file to read tensors from; `StorageError` where it is not what its header was read from."""
        stored = self.files[index]
        return self.store.open(stored.path, stored.stamp)


def read_checkpoint(path: PathLike, storage_options: Mapping[str, Any] | None = None) -> Checkpoint:
    """`open_checkpoint`, without a family. `storage_options` are as in `SafetensorsOptions`."""

    def fail(fault: SafetensorsError) -> None:
        raise fault

    return _open(path, storage_options, fail)


def find_faults(path: PathLike, storage_options: Mapping[str, Any] | None = None) -> list[SafetensorsError]:
    """Everything for which `read_checkpoint` would refuse a checkpoint, where it stops at the first.

    Raises `StorageError` if there is no checkpoint, or nothing can be said of it.
    """
    faults: list[SafetensorsError] = []
    try:
        _open(path, storage_options, faults.append)
    except StorageError:
        raise
    except SafetensorsError as fault:
        faults.append(fault)
    return faults


def _open(
    path: PathLike,
    storage_options: Mapping[str, Any] | None,
    report: Callable[[SafetensorsError], None],
) -> Checkpoint:
    """`read_checkpoint`; faults that do not prevent looking for more are passed to `report`."""
    store, path = store_of(path, storage_options)
    paths, index = _files(store, path, report)
    files = []
    # Nothing but the caller, or the usual name, says that there is such a file.
    assumed = paths == [path] or (index is None and not store.lists)
    for stored_or_fault in _read_headers(store, paths):
        if assumed and isinstance(stored_or_fault, StorageError):
            raise stored_or_fault
        if isinstance(stored_or_fault, SafetensorsError):
            report(stored_or_fault)
        else:
            files.append(stored_or_fault)
    if any(stored.stamp.version == UNKNOWN for stored in files):
        warnings.warn(
            f"{path}: the server gives neither an ETag nor a Last-Modified, so that a file that changes while it is "
            "read goes unnoticed unless its size changes",
            stacklevel=2,
        )
    with no_collection():
        return Checkpoint(path, tuple(files), _tensors(path, files, index, report), store)


def _tensors(
    path: str, files: list[StoredFile], index: Index | None, report: Callable[[SafetensorsError], None]
) -> dict[str, StoredTensor]:
    """The tensors of `files` by name, those that the index names where there is one."""
    pieces: dict[str, list[Piece]] = {}
    for number, stored in enumerate(files):
        offsets = saved_offsets(stored.header, file=stored.path)
        base_name = posixpath.basename(stored.path)
        for name, entry in stored.header.tensors.items():
            if index is not None and index.weight_map.get(name) != base_name:
                continue
            if name not in pieces:
                pieces[name] = [Piece(number, entry, _origin(len(entry.shape)) if offsets is None else offsets[name])]
            elif offsets is not None:
                pieces[name].append(Piece(number, entry, offsets[name]))
            else:
                other = files[pieces[name][0].file].path
                report(IndexFileError(f"{stored.path}: tensor {name!r} is also in {other}"))
    tensors = {}
    for name, own in pieces.items():
        if len(own) == 1 and not any(own[0].start):
            tensors[name] = StoredTensor(own[0].entry.dtype, own[0].entry.shape, (own[0],))
            continue
        try:
            tensors[name] = _whole(name, own, files)
        except SafetensorsError as fault:
            report(fault)
    if index is not None:
        read = {posixpath.basename(stored.path) for stored in files}
        for name, file in index.weight_map.items():
            if name not in tensors and file in read:
                report(IndexFileError(f"{posixpath.join(path, file)}: the index says it has {name!r}, it does not"))
    return tensors


@lru_cache
def _origin(rank: int) -> tuple[int, ...]:
    return (0,) * rank


def _key(name: str, number: int) -> str:
    return f"{name}{_PIECE}{number}"


def _whole(name: str, pieces: list[Piece], files: list[StoredFile]) -> StoredTensor:
    """The tensor that `pieces` make; `IndexFileError` where they do not tile it."""
    first, first_file = pieces[0].entry, pieces[0].file
    for piece in pieces:
        where = f"{files[piece.file].path}: {name!r}"
        if piece.entry.dtype != first.dtype or len(piece.entry.shape) != len(first.shape):
            raise IndexFileError(
                f"{where}: expected a piece of {len(first.shape)} dimensions of {first.dtype.name}, found shape "
                f"{piece.entry.shape} of {piece.entry.dtype.name}"
            )
        if first.dtype.numpy is None:
            raise IndexFileError(f"{where}: pieces of {first.dtype.name}, which is packed, cannot be put together")
    shape = tuple(max(_end(piece, axis) for piece in pieces) for axis in range(len(first.shape)))
    filled = tuple(piece for piece in pieces if prod(piece.entry.shape))
    # How many pieces hold each cell of the grid that their edges make.
    edges = [
        sorted({0, shape[axis]} | {piece.start[axis] for piece in filled} | {_end(piece, axis) for piece in filled})
        for axis in range(len(shape))
    ]
    numbers = [{cut: number for number, cut in enumerate(cuts)} for cuts in edges]
    held_by = np.zeros([len(cuts) - 1 for cuts in edges], np.int64)
    for piece in filled:
        cells = (slice(at[piece.start[axis]], at[_end(piece, axis)]) for axis, at in enumerate(numbers))
        held_by[tuple(cells)] += 1
    if prod(shape) and (held_by != 1).any():
        cell = np.argwhere(held_by != 1)[0]
        at = tuple(cuts[number] for cuts, number in zip(edges, cell.tolist(), strict=True))
        raise IndexFileError(
            f"{files[first_file].path}: {name!r}: expected pieces that make up shape {shape}, found "
            f"{held_by[tuple(cell)]} of them at {at}"
        )
    return StoredTensor(first.dtype, shape, filled or tuple(pieces[:1]))


def _end(piece: Piece, axis: int) -> int:
    return piece.start[axis] + piece.entry.shape[axis]


def _file_names(
    path: str, names: list[str], index: Index | None, report: Callable[[SafetensorsError], None]
) -> list[str]:
    """The files of the directory `path`, which holds `names`, that belong to the checkpoint."""
    present = [name for name in names if name.endswith(SUFFIX) and not name.startswith(".")]
    if index is None:
        if not present:
            raise MissingError(f"{path}: holds no {SUFFIX} file and no *{INDEX_SUFFIX}")
        return present
    there = set(names)
    for name in sorted(set(index.files) - there):
        report(MissingError(f"{posixpath.join(path, name)}: is named by the index and missing"))
    if unnamed := sorted(set(present) - set(index.files)):
        logger.info("%s: the index does not name these files, they are ignored: %s", path, some(unnamed))
    return [name for name in index.files if name in there]


def read_header(store: Store, path: str) -> StoredFile:
    """Reads and validates one file's header."""
    file = store.open(path)
    try:
        prefix = bytearray(min(PREFIX_BYTES, file.stamp.nbytes))
        file.read([(0, [memoryview(prefix)])])
        text = bytearray(header_length(bytes(prefix), file.stamp.nbytes, file=path))
        file.read([(PREFIX_BYTES, [memoryview(text)])])
        with no_collection():
            return StoredFile(path, file.stamp, Header.parse(bytes(text), file.stamp.nbytes, file=path))
    finally:
        file.close()


def _read_headers(store: Store, paths: Sequence[str]) -> Iterator[StoredFile | SafetensorsError]:
    """`read_header` of all files, in their order: its result, or its error. Of many files at once on remote stores."""

    def read(path: str) -> StoredFile | SafetensorsError:
        try:
            return read_header(store, path)
        except SafetensorsError as fault:
            return fault

    if store.maps or len(paths) == 1:
        yield from map(read, paths)
        return
    with ThreadPoolExecutor(min(store.cost.requests, len(paths)), "safetensors") as pool:
        try:
            yield from pool.map(read, paths)
        except BaseException:  # an interrupt, or nobody wants to know more
            store.cancel()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _files(store: Store, path: str, report: Callable[[SafetensorsError], None]) -> tuple[list[str], Index | None]:
    """The paths of a checkpoint's files, and the index that names them where there is one."""
    if path.endswith(SUFFIX) and not store.maps:  # who may read an object may not be allowed to list what is beside it
        return [path], None
    index: Index | None
    if not store.lists:
        file = store.find(posixpath.join(path, INDEX_NAME))
        if file is None:
            return [posixpath.join(path, FILE_NAME)], None
        index = _read_index(file)
        return [posixpath.join(path, name) for name in index.files], index
    names = store.list(path)
    if names is None:
        return [path], None
    index_name = _index_name(path, names)
    index = None if index_name is None else _read_index(store.open(posixpath.join(path, index_name)))
    if index is None and not store.maps:
        _check_set(path, names)
    return [posixpath.join(path, name) for name in _file_names(path, names, index, report)], index


def _check_set(path: str, names: Sequence[str]) -> None:
    """Raises `IndexFileError` where files say that there are more of them.

    Objects appear one by one, each whole, and the index that makes a checkpoint of them last.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            found.setdefault((match[1], match[3]), set()).add(match[2])
    for (stem, count), numbers in found.items():
        if len(numbers) < int(count):
            raise IndexFileError(
                f"{path}: expected {int(count)} files {stem}-*-of-{count}{SUFFIX} or an index, found {len(numbers)}: "
                "a checkpoint that was not written to its end"
            )


def _index_name(path: str, names: Sequence[str]) -> str | None:
    """The name of the index in the directory `path`, which holds `names`."""
    found = [name for name in names if name.endswith(INDEX_SUFFIX) and not name.startswith(".")]
    if not found:
        return None
    # Some repositories keep a second index for a variant (`model.fp16.safetensors.index.json`).
    name = INDEX_NAME if INDEX_NAME in found else found[0]
    if len(found) > 1 and name != INDEX_NAME:
        raise IndexFileError(f"{path}: expected one index, found {some(found)} and none is {INDEX_NAME}")
    return name


def _read_index(file: File) -> Index:
    """Reads and closes an index."""
    try:
        if file.stamp.nbytes > MAX_HEADER_BYTES:
            raise IndexFileError(f"{file.path}: expected at most {MAX_HEADER_BYTES} bytes, found {file.stamp.nbytes}")
        text = bytearray(file.stamp.nbytes)
        file.read([(0, [memoryview(text)])])
    finally:
        file.close()
    index = Index.parse(bytes(text), file=file.path)
    if not index.weight_map:
        raise IndexFileError(f"{file.path}: names no tensor")
    return index
