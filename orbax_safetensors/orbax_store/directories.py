"""Where checkpoints are: directories of file systems, and below `gs://`, the one object store that Orbax writes to.

As in Orbax, `epath` reaches files, and TensorStore reaches chunks.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import shutil
import stat
from collections.abc import Iterator
from math import inf
from typing import Any

import tensorstore as ts
from etils import epath
from etils.epath import backend

from orbax_safetensors.errors import StorageError, storage_errors
from orbax_safetensors.format import strict_json
from orbax_safetensors.orbax_store._compat import build_kvstore_tspec
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.storage.paths import PathLike, absolute_path, is_url, shown
from orbax_safetensors.storage.store import read_small

_REMOTE = "gs://"
# `epath` reaches an object store with either of them.
_CLIENTS = ("gcsfs", "tensorflow")
# Bytes of a copied file that are in memory at once; gcsfs reads and writes as many anyway.
_COPY_BYTES = 4 << 20
# The most bytes of a file that is read as a whole. The longest is `_sharding`: each array has a list of all devices.
_MAX_BYTES = 256 << 20
# Of these, what TensorStore reads: of a database, of arrays, and of strings.
_READ_WHOLE = frozenset({"manifest.ocdbt", ".zarray", "zarr.json", "_strings.json"})


def is_on_gcs(path: PathLike) -> bool:
    """Return whether a path is on an object store, where nothing can be renamed and no directory is empty."""
    return os.fspath(path).startswith(_REMOTE)


def absolute(path: PathLike) -> str:
    """Return an absolute path, or a URL without a slash at its end.

    Raises `StorageError` if it is a URL of another kind, if no library reaches it, or if Orbax would take another path.
    """
    path = absolute_path(path)
    if is_url(path) and not is_on_gcs(path):
        raise StorageError(f"{shown(path)}: Orbax has checkpoints in file systems and below {_REMOTE}bucket only")
    if is_url(path) and not any(importlib.util.find_spec(name) for name in _CLIENTS):
        raise StorageError(f"{path}: Orbax needs gcsfs for {_REMOTE}: pip install gcsfs")
    check_literal(path)
    return path


def check_literal(path: str) -> None:
    """Raise `StorageError` if the libraries by which Orbax reaches files take an absolute path for another or none.

    TensorStore takes a backslash for a slash, Orbax a directory called `gs:` for a bucket and a `#` for the end of an
    object's name, `epath` a name with `**` for a pattern that it refuses, and gcsfs objects' names for patterns.
    """
    try:
        spec = ts.KvStore.Spec(build_kvstore_tspec(path, use_ocdbt=False)).to_json()
        reached = f"{_REMOTE}{spec['bucket']}/{spec.get('path', '')}".rstrip("/") if "bucket" in spec else spec["path"]
        others = {os.fspath(epath.Path(path)), reached} - {path}
        meaning = repr(others.pop()) if others else ""
    except Exception as error:  # no library says what it raises
        meaning = f"no path ({type(error).__name__})"
    if "**" in path or (is_on_gcs(path) and glob.has_magic(path)):
        meaning = "a pattern"
    if meaning:
        raise StorageError(f"{path}: cannot hold a checkpoint of Orbax, whose libraries take this path for {meaning}")


def fresh(path: PathLike) -> epath.Path:
    """Return a directory as it is now: gcsfs remembers what it has listed until its cache is invalidated."""
    directory = epath.Path(path)
    if directory._backend is backend.fsspec_backend:
        backend.fsspec_backend.fs(path).invalidate_cache()
    return directory


def names(directory: epath.Path, *, directories: bool = False) -> list[str]:
    """Return the sorted names in a directory, or of the directories in it; none if an object store has none."""
    if not is_on_gcs(directory):
        with os.scandir(directory) as entries:  # `epath` leaves out names that end with a tilde
            return sorted(entry.name for entry in entries if not directories or entry.is_dir())
    try:
        return sorted(entry.name for entry in fresh(directory).iterdir() if not directories or entry.is_dir())
    except FileNotFoundError:
        return []
    finally:  # Orbax waits for files of other processes, and would never see them in the cache
        fresh(directory)


def requests_at_once(path: str) -> int:
    """Return how many requests a process has in flight at most: Orbax's limit for files, TensorStore's for `gs://`."""
    return 32 if is_on_gcs(path) else 128


def read_bytes(path: epath.Path) -> bytes | None:
    """Return the content of a small file, or None if it is missing; `StorageError` if it is not a regular one."""
    where = os.fspath(path)
    with storage_errors(where):
        try:
            if not is_on_gcs(path):
                return read_small(LocalStore().open(where), _MAX_BYTES)
            if (nbytes := size(path) or 0) > _MAX_BYTES:
                raise StorageError(f"{where}: expected at most {_MAX_BYTES} bytes, found {nbytes}")
            return bytes(path.read_bytes())
        except FileNotFoundError:
            return None


def check_files(directory: str, most: float = inf) -> None:
    """Raise `StorageError` for a file in a directory of a file system that TensorStore or Orbax should not open.

    They would wait for the writer of a pipe, read a device for ever, and have all of a small file in memory, whatever
    its size, or one of more than `most` bytes. A link to a directory is refused because it may lead to such a file, or
    back.
    """
    waiting = [] if is_on_gcs(directory) else [directory]
    with storage_errors(directory, OSError):
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                        continue
                    limit = min(most, _MAX_BYTES) if entry.name in _READ_WHOLE else most
                    if limit < inf or not entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):  # a link to nothing, or deleted meanwhile
                            _check_file(entry, limit)


def _check_file(entry: os.DirEntry[str], most: float) -> None:
    facts = entry.stat()
    if stat.S_ISDIR(facts.st_mode):
        raise StorageError(f"{entry.path}: is a link to a directory, which is not followed")
    if not stat.S_ISREG(facts.st_mode):
        raise StorageError(f"{entry.path}: is not a regular file")
    if facts.st_size > most:
        raise StorageError(f"{entry.path}: expected at most {most} bytes, found {facts.st_size}")


def size(path: epath.Path) -> int | None:
    """Return the bytes of a file, or None if it is missing."""
    with storage_errors(os.fspath(path)):
        try:
            return int(path.stat().length)
        except FileNotFoundError:
            return None


def read_json(path: epath.Path) -> Any:
    """Return what a JSON file of Orbax says, or None if it is missing."""
    text = read_bytes(path)
    return None if text is None else parse_json(text, os.fspath(path))


def parse_json(text: bytes, where: str) -> Any:
    """Return what a JSON file of Orbax says, given its content; errors begin with `where`, its path."""
    with storage_errors(f"{where}: is not what Orbax writes"):
        return strict_json.loads(text)


def flush(directory: PathLike) -> None:
    """Return when all files and directories below a directory of a file system are on the disk."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir():
                flush(entry.path)
            else:
                with open(entry.path, "rb") as file:
                    os.fsync(file.fileno())
    LocalStore().sync(os.fspath(directory))


def remove(path: epath.Path) -> None:
    """Delete a file, a symbolic link, or a directory with all that is in it."""
    if path.is_dir() and not os.path.islink(path):
        path.rmtree()
    else:
        path.unlink()


def copy(source: epath.Path, destination: epath.Path) -> None:
    """Copy a file, or a directory with all that is in it; of a symbolic link, copy its target.

    On a file system, the copy is on the disk when this returns.
    """
    if source.is_dir():
        destination.mkdir()
        for name in names(source):
            copy(source / name, destination / name)
        return
    if not is_on_gcs(source):
        LocalStore().open(os.fspath(source)).close()  # raises unless it is a regular file
    with source.open("rb") as reading, destination.open("wb") as writing:
        shutil.copyfileobj(reading, writing, _COPY_BYTES)
        if not is_on_gcs(destination):
            writing.flush()
            os.fsync(writing.fileno())


def copied_nbytes(source: epath.Path) -> int:
    """Return the bytes that `copy` writes: of a file, or of all files in a directory."""
    with storage_errors(os.fspath(source)):
        if source.is_dir():
            return sum(copied_nbytes(source / name) for name in names(source))
    return size(source) or 0


def kvstore(directory: str, context: ts.Context, *, ocdbt: bool = False, **options: Any) -> ts.KvStore:
    """Open what is below a directory as a store of keys: Orbax's database of chunks, with `options`, or the files."""
    spec = {**build_kvstore_tspec(directory, use_ocdbt=ocdbt), **options}
    if not ocdbt:
        spec["path"] += "/"
    return ts.KvStore.open(ts.KvStore.Spec(spec), context=context).result()


def state(directory: str) -> dict[str, Any]:
    """Return what tells whether a file has changed, by the path of each file in a directory; equal on all hosts."""
    if not is_on_gcs(directory):
        return dict(_local_state(directory))
    store = kvstore(directory, ts.Context())
    # A read of no bytes returns the generation alone.
    reading = {key: store.read(key, byte_range=slice(0, 0)) for key in store.list().result()}
    return {os.fsdecode(key): future.result().stamp.generation for key, future in reading.items()}


def file_bytes(directory: str) -> int | None:
    """Return the bytes of all files in a directory; None below `gs://`, where each would take a request."""
    return None if is_on_gcs(directory) else sum(size for _, (size, _) in _local_state(directory))


def _local_state(root: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the path, and the size and modification time, of each file in a directory."""
    for directory, _, files in os.walk(root):
        for name in files:
            path = os.path.join(directory, name)
            facts = os.stat(path)
            yield os.path.relpath(path, root), (facts.st_size, facts.st_mtime_ns)
