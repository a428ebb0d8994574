"""`delta`: what changed between two saved checkpoints, published as the next version.

Threads write a file each, tensor by tensor, on a local disk. Nothing says what the files are before all checksums have
been compared.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import posixpath
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.checksums import Recorded, read_checksums
from orbax_safetensors.checkpoint.one_state import unless_changed
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.delta.frames import PIECE_BYTES, FileRange, encode, open_files, range_of, zstandard
from orbax_safetensors.delta.hidden_directory import HiddenDirectory
from orbax_safetensors.delta.version import (
    FRAME_DTYPE,
    MAX_VERSION,
    UNFINISHED,
    check,
    check_follows,
    index_of,
    path_of,
)
from orbax_safetensors.devices.reported_progress import reported_progress
from orbax_safetensors.errors import SafetensorsError, StorageError, TensorMismatchError
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.format.checksums import encode as encode_checksums
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.format.header import MAX_HEADER_BYTES, Header, TensorEntry
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.format.names import some
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.storage.memory import allocate
from orbax_safetensors.storage.paths import PathLike, absolute_path, check_one_store
from orbax_safetensors.storage.remote import READ_ONLY
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import File, Store, find_small, write_small
from orbax_safetensors.storage.upload import PARTS
from orbax_safetensors.storage.workspace import already_running_error
from orbax_safetensors.transfer.progress import Meter
from orbax_safetensors.transfer.threads import run_tasks

logger = logging.getLogger(__name__)

# Files of a delta, each of one thread, unless the caller says otherwise.
_MAX_FILES = 16

_Check = tuple[Checkpoint, Recorded, str]  # what a checkpoint has to agree with, and its fault if it does not


@dataclass(frozen=True)
class Delta:
    """What was published.

    ```python
    ost.save("/models/before", {"w": jnp.zeros(64)})
    ost.save("/models/after", {"w": jnp.ones(64)})
    done = ost.delta("/models/before", "/models/after", "/models/published", version=1)
    print(f"{done.changed_tensors} of {done.tensors} tensors changed: {done.path} has {done.delta_bytes:,} bytes")
    ```

    Attributes:
      path: the directory of the new version.
      version: its number.
      tensors: tensors of the model.
      changed_tensors: how many of them changed.
      elements: elements of the model; packed elements of less than a byte count as bytes.
      changed_elements: how many of them changed.
      model_bytes: of all tensors, which a receiver keeps a copy of.
      delta_bytes: of the files that a receiver fetches.
      seconds: how long it took.
    """

    path: str
    version: int
    tensors: int
    changed_tensors: int
    elements: int
    changed_elements: int
    model_bytes: int
    delta_bytes: int
    seconds: float


def delta(
    old: PathLike, new: PathLike, publish: PathLike, *, version: int, options: SafetensorsOptions | None = None
) -> Delta:
    """Publish what changed from the checkpoint `old` to the checkpoint `new`, for engines that hold `old`.

    ```python
    for step in (1, 2):
        ost.save(f"/models/rl/{step}", {"w": jnp.full((64, 8), step, jnp.bfloat16)})
    done = ost.delta("/models/rl/1", "/models/rl/2", "/models/published", version=1)
    print(f"{done.path}: {done.delta_bytes:,} bytes for {done.changed_elements:,} elements that changed")
    ```

    Experimental: the layout belongs to its readers, and may change with them.

    Writes the directory `weight_v000001` below `publish`, which readers see once it is complete. `version` is the one
    after the latest version there; version 1 changes the model that the engines started with. Each path is of a file
    system or the URL of an object store; `old` and `new` may also be on other servers. Of `options`, `threads`,
    `storage_options` and `progress` count, which is called with the bytes that are read. Needs
    `zstandard`, and no device.

    Raises:
      TensorMismatchError: names, dtypes or shapes differ, so that only a full version can follow.
      ChecksumError: a checkpoint differs from the checksums of its save, or `old` from those of the version before.
      StorageError: the version exists or does not follow, or something cannot be read or written. Nothing is published.
    """
    options = SafetensorsOptions.of(options)
    zstandard()
    if type(version) is not int or not 1 <= version <= MAX_VERSION:
        raise SafetensorsError(f"version is {version!r}, must be an integer from 1 to {MAX_VERSION}")
    old, new, publish = absolute_path(old), absolute_path(new), absolute_path(publish)
    check_one_store(options.storage_options, old, new, publish)
    before, after = (read_checkpoint(path, options.storage_options) for path in (old, new))
    _check_alike(before, after)
    store, publish = store_of(publish, options.storage_options)
    if not store.writes:
        raise StorageError(f"{publish}: {READ_ONLY}")
    check_follows(store, publish, version)
    return _DeltaJob(before, after, version, store, publish, options).run()


def _check_alike(old: Checkpoint, new: Checkpoint) -> None:
    if names := sorted(old.tensors.keys() ^ new.tensors.keys()):
        raise TensorMismatchError(
            f"{new.path}: {some(names)}: in only one of it and {old.path}; publish a full version"
        )
    for name, before in old.tensors.items():
        after = new[name]
        if before[:2] != after[:2] or len(before.pieces) != 1 or len(after.pieces) != 1:
            raise TensorMismatchError(
                f"{new.path}: {name!r}: expected {before.stored_dtype.name} {before.stored_shape} in one piece, as in "
                f"{old.path}, found {after.stored_dtype.name} {after.stored_shape}; publish a full version"
            )


@dataclass(frozen=True)
class _DeltaJob:
    """A delta that can be published: both checkpoints have the same tensors, and the version follows."""

    old: Checkpoint
    new: Checkpoint
    version: int
    store: Store
    publish: str
    options: SafetensorsOptions

    def run(self) -> Delta:
        """Compare, write and publish; see `delta`."""
        started = time.perf_counter()
        path = path_of(self.publish, self.version)
        checks = self._checks()
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(reported_progress(self.options.progress, "delta"))
            compared = sum(checkpoint.nbytes for checkpoint, _, _ in checks)
            meter = Meter(progress or (lambda done, total: None), self.old.nbytes + self.new.nbytes + compared)
            if self.store.is_local:
                workspace = HiddenDirectory(path)
                stack.callback(workspace.release)
                workspace.begin(resume=False)
                changed, nbytes = self._write(workspace.path, "model", checks, meter)
                workspace.finish()
            else:
                directory = stack.enter_context(tempfile.TemporaryDirectory())
                # Another run has files of other names, so that none of them ends up in the delta of this index.
                changed, nbytes = self._write(directory, f"model-{secrets.token_hex(4)}", checks, meter)
                self._upload(directory, path)
        tensors = self.new.tensors.values()
        done = Delta(
            path,
            self.version,
            tensors=len(tensors),
            changed_tensors=sum(elements > 0 for elements in changed.values()),
            elements=sum(8 * tensor.nbytes // max(8, tensor.stored_dtype.bits) for tensor in tensors),
            changed_elements=sum(changed.values()),
            model_bytes=self.new.nbytes,
            delta_bytes=nbytes,
            seconds=time.perf_counter() - started,
        )
        logger.info("%s", done)
        return done

    def _write(
        self, directory: str, stem: str, checks: Sequence[_Check], meter: Meter
    ) -> tuple[Mapping[str, int], int]:
        """Write all files of the delta; return how many elements of each tensor changed, and the bytes of tensors."""
        meter.begin(self.old.nbytes + self.new.nbytes)
        read: list[int] = []
        changed: dict[str, int] = {}
        headers: dict[str, Header] = {}
        groups = _balanced(self.new, self.options.threads or min(_MAX_FILES, self.new.store.cost.requests))
        with contextlib.ExitStack() as stack:
            old, new = open_files(self.old, stack), open_files(self.new, stack)

            def write(name: str, tensors: Sequence[str]) -> None:
                headers[name] = self._write_file(os.path.join(directory, name), tensors, old, new, changed, read.append)

            names = [f"{stem}-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
            tasks = [partial(write, name, group) for name, group in zip(names, groups, strict=True)]
            total = max(self.new.nbytes, 1)
            run_tasks(iter(tasks), len(tasks), lambda: None, lambda: meter.moved(sum(read) / total))
            for file, stored in zip([*old, *new], [*self.old.files, *self.new.files], strict=True):
                file.check(stored.stamp)
        for checkpoint, recorded, fault in checks:
            meter.begin(checkpoint.nbytes)
            options = replace(self.options, progress=lambda done, total: meter.moved(done / max(total, 1)))
            with unless_changed(checkpoint):
                check(checkpoint, recorded, options, fault)
        meter.end()
        if (saved := read_checksums(self.new.store, self.new.directory)) is not None:
            write_small(LocalStore(), os.path.join(directory, CHECKSUMS_NAME), encode_checksums(saved))
        weight_map = {tensor: name for name, header in headers.items() for tensor in header.tensors}
        index = index_of(self.version, weight_map)
        write_small(LocalStore(), os.path.join(directory, INDEX_NAME), index.encode())
        return changed, sum(headers[name].file_bytes for name in index.files)

    def _write_file(
        self,
        path: str,
        tensors: Sequence[str],
        old: Sequence[File],
        new: Sequence[File],
        changed: dict[str, int],
        report: Callable[[int], object],
    ) -> Header:
        """Write the frames of the `tensors` that changed, and the header last, into the room that was left for it.

        `report` is called with the bytes of each piece that is compared.
        """
        dtype, buffers = DTYPES[FRAME_DTYPE], allocate([PIECE_BYTES] * 2)
        longest = [(name, dtype, (2 * self.new[name].nbytes + PIECE_BYTES,)) for name in tensors]
        data_start = Header.layout(longest, dict.fromkeys(tensors, "checksum")).data_start
        entries, checksums, end = {}, {}, 0
        with contextlib.closing(LocalStore().create(path)) as file:

            def write(content: bytes) -> None:
                nonlocal end
                file.write(data_start + end, [memoryview(content)])
                end += len(content)

            for name in tensors:
                begin, bits = end, self.new[name].stored_dtype.bits
                before, after = range_of(self.old, name, old), range_of(self.new, name, new)
                changed[name], checksum = encode(before, after, bits, buffers, write, report)
                if changed[name]:
                    entries[name] = TensorEntry(name, dtype, (end - begin,), begin, end)
                    checksums[name] = checksum
                else:
                    end = begin
        header = Header(entries, checksums, data_start)
        write_small(LocalStore(), path, header.encoded, nbytes=header.file_bytes)
        return header

    def _checks(self) -> list[_Check]:
        """Return what has to be checked once all is written, as far as anything is recorded.

        The old bytes have to be those of the version before, or of their save, and the new ones those of their save.
        """
        before = path_of(self.publish, self.version - 1)
        published, saved = read_checksums(self.store, before), "its bytes are not those of its save"
        checks = (
            (self.old, published, f"is not the checkpoint that {before} has published"),
            (self.old, None if published else read_checksums(self.old.store, self.old.directory), saved),
            (self.new, read_checksums(self.new.store, self.new.directory), saved),
        )
        return [(checkpoint, recorded, fault) for checkpoint, recorded, fault in checks if recorded is not None]

    def _upload(self, directory: str, path: str) -> None:
        """Write the files as objects, the index last; until then, what is in its place makes readers fail."""
        check_follows(self.store, self.publish, self.version)
        self.store.delete(path, self.store.below(path))
        index_path, unfinished = posixpath.join(path, INDEX_NAME), UNFINISHED + f'"{secrets.token_hex(8)}"}}'.encode()
        write_small(self.store, index_path, unfinished)
        (buffer,) = allocate([PIECE_BYTES])
        for name in sorted(os.listdir(directory), key=INDEX_NAME.__eq__):
            if name == INDEX_NAME and find_small(self.store, index_path, MAX_HEADER_BYTES) != unfinished:
                raise already_running_error(path)
            with contextlib.closing(LocalStore().open(os.path.join(directory, name))) as file:
                source = FileRange(file, 0, file.stamp.nbytes)
                object_path = posixpath.join(path, name)
                with contextlib.closing(self.store.create(object_path, source.nbytes, PARTS, sync=True)) as new:
                    for number, piece in enumerate(source.pieces(buffer)):
                        new.write(number * buffer.nbytes, [piece.data])
                    new.sync()


def _balanced(checkpoint: Checkpoint, count: int) -> list[list[str]]:
    """Return the names of all tensors in up to `count` groups of about as many bytes, each sorted."""
    groups: list[tuple[int, int, list[str]]] = [(0, number, []) for number in range(count)]
    for name in sorted(checkpoint.tensors, key=lambda name: (-checkpoint[name].nbytes, name)):
        nbytes, number, names = heapq.heappop(groups)
        heapq.heappush(groups, (nbytes + checkpoint[name].nbytes, number, [*names, name]))
    return [sorted(names) for _, _, names in sorted(groups, key=lambda group: group[1]) if names]
