"""Where checkpoints are: directories of file systems, and below `gs://`, the one object store that Orbax writes to.

Files are reached as Orbax reaches them, through `epath`, chunks through TensorStore.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import tensorstore as ts
from etils import epath
from etils.epath import backend
from etils.epath.gpath import PosixGPath

from orbax_safetensors.errors import StorageError
from orbax_safetensors.orbax_store._compat import build_kvstore_tspec
from orbax_safetensors.orbax_store.operations import storage_errors
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.storage.paths import PathLike

_REMOTE = "gs://"
# What `epath` reaches an object store with, either of them.
_CLIENTS = ("gcsfs", "tensorflow")
# What is in memory of a file that is copied: gcsfs reads and writes as much at once anyway.
_COPY_BYTES = 4 << 20
# Files of metadata that are longer hold at most one object or list in as many bytes as this, on average.
_SMALL_BYTES = 64 << 10
_DENSE = 6


def is_remote(path: PathLike) -> bool:
    """Whether a path is of an object store, where nothing can be renamed and no directory is without a file."""
    return os.fspath(path).startswith(_REMOTE)


def absolute(path: PathLike) -> str:
    """An absolute path, or a URL without a slash at its end.

    Raises `StorageError` where it is a URL of another kind, there is nothing to reach it with, or Orbax cannot have it.
    """
    path = os.fsdecode(path)
    if "://" not in path:
        path = os.path.abspath(path)
        check_literal(path)
        return path
    if not path.removeprefix(_REMOTE).strip("/") or not is_remote(path):
        raise StorageError(f"{path}: Orbax has checkpoints in file systems and below {_REMOTE}bucket only")
    if not any(importlib.util.find_spec(name) for name in _CLIENTS):
        raise StorageError(f"{path}: Orbax needs gcsfs for {_REMOTE}: pip install 'orbax-safetensors[gcs]'")
    check_literal(path.rstrip("/"))
    return path.rstrip("/")


def check_literal(path: str) -> None:
    """Raises `StorageError` if what Orbax reaches files with takes an absolute path for another one, or for none.

    TensorStore takes a backslash for a slash, Orbax a directory called `gs:` for a bucket and a `#` for the end of an
    object's name, `epath` what has `**` in it for a pattern that it refuses, and gcsfs objects' names for patterns.
    """
    try:
        spec = ts.KvStore.Spec(build_kvstore_tspec(path, use_ocdbt=False)).to_json()
        reached = f"{_REMOTE}{spec['bucket']}/{spec.get('path', '')}".rstrip("/") if "bucket" in spec else spec["path"]
        others = {os.fspath(epath.Path(path)), reached} - {path}
        meaning = repr(others.pop()) if others else ""
    except Exception as error:  # none of them says what it raises
        meaning = f"no path ({type(error).__name__})"
    if "**" in path or (is_remote(path) and glob.has_magic(path)):
        meaning = "a pattern"
    if meaning:
        raise StorageError(f"{path}: cannot hold a checkpoint of Orbax, whose libraries take this path for {meaning}")


class LiteralPath(PosixGPath):
    """A path that is no pattern itself where something below it is looked for by one, as Orbax does to merge."""

    def glob(self, pattern: str) -> Iterator[Any]:
        """The paths below this one that match `pattern`."""
        yield from epath.Path(glob.escape(os.fspath(self))).glob(pattern)


def fresh(path: PathLike) -> epath.Path:
    """A directory as it is now: what gcsfs has listed it takes for all that is there until it is told to forget it."""
    found = epath.Path(path)
    if found._backend is backend.fsspec_backend:
        backend.fsspec_backend.fs(path).invalidate_cache()
    return found


def names(directory: epath.Path, *, directories: bool = False) -> list[str]:
    """The names of what is in a directory, sorted, or of the directories there; none where an object store has none."""
    if not is_remote(directory):
        with os.scandir(directory) as entries:  # `epath` leaves out what ends with a tilde
            return sorted(entry.name for entry in entries if not directories or entry.is_dir())
    try:
        return sorted(entry.name for entry in fresh(directory).iterdir() if not directories or entry.is_dir())
    except FileNotFoundError:
        return []
    finally:  # Orbax waits for what other processes make, and would never see it
        fresh(directory)


def requests_at_once(path: str) -> int:
    """The most requests that a process has in flight: Orbax's own limit for files, TensorStore's for Google's store."""
    return 32 if is_remote(path) else 128


def read_bytes(path: epath.Path) -> bytes | None:
    """Return the content of a file, or None if it is missing."""
    with storage_errors(os.fspath(path)):
        try:
            return bytes(path.read_bytes())
        except FileNotFoundError:
            return None


def read_json(path: epath.Path) -> Any:
    """Return what a JSON file of Orbax says, or None if it is missing."""
    text = read_bytes(path)
    return None if text is None else parse_json(text, os.fspath(path))


def parse_json(text: bytes, where: str) -> Any:
    """Return what a JSON file of Orbax says, given its content; errors begin with `where`, its path."""
    # Built, an empty list takes thirty times the memory of its text. What Orbax writes is names and numbers.
    nested = text.count(b"[") + text.count(b"{")
    if len(text) > _SMALL_BYTES and nested * _DENSE > len(text):
        raise StorageError(
            f"{where}: is not what Orbax writes: expected at most {len(text) // _DENSE} objects and lists in "
            f"{len(text)} bytes, found {nested}"
        )
    with storage_errors(f"{where}: is not what Orbax writes"):
        return json.loads(text)


def make(directory: str) -> None:
    """Makes a directory of a file system, and those that it is in; their names are on the disk when this returns."""
    if not os.path.isdir(directory):
        make(os.path.dirname(directory))
        os.makedirs(directory, exist_ok=True)
        flush_names(os.path.dirname(directory))


def flush_names(directory: PathLike) -> None:
    """Returns when the names of what is in a directory of a file system are on the disk."""
    LocalStore().sync(os.fspath(directory))


def flush(directory: PathLike) -> None:
    """Returns when all that is in a directory of a file system, and in the directories in it, is on the disk."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir():
                flush(entry.path)
            else:
                with open(entry.path, "rb") as file:
                    os.fsync(file.fileno())
    flush_names(directory)


def remove(path: epath.Path) -> None:
    """Deletes a file, a link or a directory with all that is in it."""
    if path.is_dir() and not os.path.islink(path):
        path.rmtree()
    else:
        path.unlink()


def copy(source: epath.Path, destination: epath.Path) -> None:
    """Copies a file, or a directory with all that is in it; what links lead to is copied itself.

    On a file system, all of it is on the disk when this returns.
    """
    if source.is_dir():
        destination.mkdir()
        for name in names(source):
            copy(source / name, destination / name)
        return
    with source.open("rb") as reading, destination.open("wb") as writing:
        shutil.copyfileobj(reading, writing, _COPY_BYTES)
        if not is_remote(destination):
            writing.flush()
            os.fsync(writing.fileno())


def kvstore(directory: str, context: ts.Context, *, ocdbt: bool = False) -> ts.KvStore:
    """What is below a directory: Orbax's database of chunks, or files."""
    spec = build_kvstore_tspec(directory, use_ocdbt=ocdbt)
    if not ocdbt:
        spec["path"] += "/"
    return ts.KvStore.open(ts.KvStore.Spec(spec), context=context).result()


def state(directory: str) -> dict[str, Any]:
    """Of every file in a directory, by its path in there, what tells that it has changed: on all hosts the same."""
    if not is_remote(directory):
        return dict(_local_state(directory))
    store = kvstore(directory, ts.Context())
    # Without bytes, only the generation is asked for.
    reading = {key: store.read(key, byte_range=slice(0, 0)) for key in store.list().result()}
    return {os.fsdecode(key): future.result().stamp.generation for key, future in reading.items()}


def file_bytes(directory: str) -> int | None:
    """Bytes of all files in a directory; None below `gs://`, where each of them would have to be asked for."""
    return None if is_remote(directory) else sum(size for _, (size, _) in _local_state(directory))


def _local_state(root: str) -> Any:
    """Size and modification time."""
    for directory, _, files in os.walk(root):
        for name in files:
            path = os.path.join(directory, name)
            facts = os.stat(path)
            yield os.path.relpath(path, root), (facts.st_size, facts.st_mtime_ns)
