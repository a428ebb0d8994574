"""`read_checkpoint`: the headers of safetensors files put together, with the index that names their tensors."""

from __future__ import annotations

import logging
import posixpath
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any

from orbax_safetensors.checkpoint.checkpoint import Checkpoint, StoredPiece, StoredTensor
from orbax_safetensors.checkpoint.files import Finding, StoredFile, checkpoint_files, read_files
from orbax_safetensors.checkpoint.one_state import of_one_state
from orbax_safetensors.errors import IndexFileError, MissingError, SafetensorsError, StorageError
from orbax_safetensors.format.header import shown
from orbax_safetensors.format.layout import FILE_NAME
from orbax_safetensors.format.names import some
from orbax_safetensors.format.sharding_info import saved_offsets
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.process_memory import no_collection
from orbax_safetensors.storage.replace import recover
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import UNKNOWN

logger = logging.getLogger(__name__)


def read_checkpoint(
    path: PathLike,
    storage_options: Mapping[str, Any] | None = None,
    *,
    partial: bool = False,
) -> Checkpoint:
    """Read the index and all headers, as `open_checkpoint` does, without a family.

    `storage_options` are as in `SafetensorsOptions`. If `partial`, files and tensors of the index may be missing.
    """

    def fail(fault: SafetensorsError) -> None:
        if not (partial and isinstance(fault, MissingError)):
            raise fault
        logger.warning("%s", fault)

    checkpoint = of_one_state(path, "opened", lambda: _read(path, storage_options, fail, partial=partial))
    if checkpoint.delta_of is not None:
        what = f"is a delta of version {checkpoint.delta_of}"
        raise IndexFileError(f"{checkpoint.path}: {what}; apply_delta makes the model")
    for level, finding in checkpoint.findings:
        logger.log(level, "%s", finding)
    if not checkpoint.files:
        raise MissingError(f"{checkpoint.path}: has none of the files that the index names")
    return checkpoint


def examine(path: PathLike, storage_options: Mapping[str, Any] | None = None) -> Checkpoint | list[SafetensorsError]:
    """Return a checkpoint, or everything for which `read_checkpoint` would refuse it, which stops at the first.

    Raises `StorageError` if it finds no checkpoint or cannot read it.
    """
    faults: list[SafetensorsError] = []
    try:
        checkpoint = _read(path, storage_options, faults.append, examined=True)
    except StorageError:
        raise
    except SafetensorsError as fault:
        return [*faults, fault]
    return [*faults, *(finding.fault for finding in checkpoint.findings)] if faults else checkpoint


def _read(
    path: PathLike,
    storage_options: Mapping[str, Any] | None,
    report: Callable[[SafetensorsError], None],
    *,
    partial: bool = False,
    examined: bool = False,
) -> Checkpoint:
    """Read a checkpoint, and pass each fault to `report` that does not prevent looking for more.

    If `examined`, the `safetensors` package checks headers as well.
    """
    store, path = store_of(path, storage_options)
    if store.is_local:
        recover(path)
    found = checkpoint_files(store, path, report)
    paths, index = found.paths, found.index
    files = []
    for stored_or_fault in read_files(store, paths, found.known, by_reference=examined):
        if found.assumed and isinstance(stored_or_fault, StorageError):
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
    names = None if index is None else index.weight_map
    whole = [posixpath.basename(path) for path in paths] == [FILE_NAME]  # whatever an index says
    tensors = _tensors(files, None if whole else names, report)
    omitted, findings = {}, found.findings
    if names is not None:
        for fault in _lacking(path, files, names, tensors):
            if whole:
                findings = (*findings, Finding(logging.WARNING, fault))
            elif partial:
                logger.warning("%s", fault)
            else:
                report(fault)
    if names is not None and not whole:
        omitted = _tensors(files, dict(_omitted(files, names)), lambda fault: None)
    if omitted:
        text = f"holds {len(omitted)} tensors that {found.index_name} does not name, and that are not read"
        finding = IndexFileError(f"{path}: {text}: {some(list(omitted), shown)}")
        findings = (*findings, Finding(logging.WARNING, finding))
    return Checkpoint(
        path,
        tuple(files),
        tensors,
        store,
        open_requests=found.requests + len(paths) - len(found.known),
        index_name=found.index_name,
        omitted=omitted,
        delta_of=None if index is None else index.delta_of,
        findings=findings,
    )


def _lacking(
    path: str, files: list[StoredFile], weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> Iterator[IndexFileError]:
    """Yield an error for each tensor that the index names in one of `files` and that is not there."""
    read = {posixpath.basename(stored.path) for stored in files}
    for name, file in weight_map.items():
        if name not in tensors and file in read:
            where = posixpath.join(path, file)
            yield IndexFileError(f"{where}: expected tensor {name!r}, which the index says is there, found none")


def _omitted(files: list[StoredFile], weight_map: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the tensors that the index does not name, with the files that hold them."""
    for stored in files:
        for name in stored.header.tensors:
            if name not in weight_map:
                yield name, posixpath.basename(stored.path)


@no_collection()
def _tensors(
    files: list[StoredFile], weight_map: Mapping[str, str] | None, report: Callable[[SafetensorsError], None]
) -> dict[str, StoredTensor]:
    """Return the tensors of `files` by name, only those of `weight_map`, which has their files, if there is one."""
    tensors: dict[str, StoredTensor] = {}
    several: dict[str, list[StoredPiece]] = {}
    sharded = False
    for number, stored in enumerate(files):
        offsets = saved_offsets(stored.header, file=stored.path)
        sharded = sharded or offsets is not None
        base_name = posixpath.basename(stored.path)
        for name, entry in stored.header.tensors.items():
            if weight_map is not None and weight_map.get(name) != base_name:
                continue
            piece = StoredPiece(number, entry, _origin(len(entry.shape)) if offsets is None else offsets[name])
            other = tensors.get(name)
            if other is None:
                tensors[name] = StoredTensor(entry.dtype, entry.shape, (piece,))
            elif offsets is not None:
                several.setdefault(name, [*other.pieces]).append(piece)
            else:
                also = f"tensor {name!r} is also in {files[other.file].path}"
                report(IndexFileError(f"{stored.path}: {also}; pass the path of one file to read it alone"))
    for name, tensor in list(tensors.items()) if sharded else ():
        if name in several or any(tensor.pieces[0].start):
            try:
                tensors[name] = _whole(name, tuple(several.get(name, tensor.pieces)), files)
            except SafetensorsError as fault:
                report(fault)
                del tensors[name]
    return tensors


def _whole(name: str, pieces: tuple[StoredPiece, ...], files: list[StoredFile]) -> StoredTensor:
    """Return the tensor that `pieces` make up; raises `IndexFileError` if they do not tile it."""
    first, first_file = pieces[0].entry, pieces[0].file
    for piece in pieces:
        where = f"{files[piece.file].path}: {name!r}"
        if piece.entry.dtype != first.dtype or len(piece.entry.shape) != len(first.shape):
            raise IndexFileError(
                f"{where}: expected a piece of {len(first.shape)} dimensions of {first.dtype.name}, found shape "
                f"{piece.entry.shape} of {piece.entry.dtype.name}"
            )
        if first.dtype.numpy is None:
            raise IndexFileError(f"{where}: {first.dtype.name} has several elements in a byte; pieces cannot be joined")
    boxes = [Box((at, at + size) for at, size in zip(start, entry.shape, strict=True)) for _, entry, start in pieces]
    shape = tuple(stop for _, stop in Box.hull(boxes))
    expected = f"{files[first_file].path}: {name!r}: expected pieces that make up shape {shape}, found"
    if (found := sum(box.volume for box in boxes)) < prod(shape):
        raise IndexFileError(f"{expected} {found} of its {prod(shape)} elements")
    if overlapping := _two_that_overlap([box for box in boxes if box.volume]):
        one, other = overlapping
        raise IndexFileError(f"{expected} two that overlap, from {one.start} and from {other.start} on")
    nonempty = tuple(piece for piece, box in zip(pieces, boxes, strict=True) if box.volume)
    return StoredTensor(first.dtype, shape, nonempty or pieces[:1])


def _two_that_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two of `boxes`, none of which is empty, that have elements in common; None if no two have.

    Divides boxes wherever none lies across, along one axis after another, so that few pairs are left to compare.
    """
    groups = [boxes]
    while groups:
        group = groups.pop()
        divisions = (_divided(group, axis) for axis in range(len(group[0]) if group else 0))
        divided = next((parts for parts in divisions if len(parts) > 1), None)
        if divided is not None:
            groups += [part for part in divided if len(part) > 1]
            continue
        for one, other in combinations(group, 2):
            if all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True)):
                return one, other
    return None


def _divided(boxes: Sequence[Box], axis: int) -> list[list[Box]]:
    """Return `boxes` in groups, each of which begins along `axis` where all before it have ended."""
    groups: list[list[Box]] = []
    reached = 0
    for box in sorted(boxes, key=lambda box: box[axis]):
        start, stop = box[axis]
        if not groups or start >= reached:
            groups.append([])
        groups[-1].append(box)
        reached = max(reached, stop)
    return groups


@lru_cache
def _origin(rank: int) -> tuple[int, ...]:
    return (0,) * rank
