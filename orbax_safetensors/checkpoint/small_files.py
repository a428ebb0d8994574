"""Which files of a directory go along when its model is written elsewhere: all small ones that are not weights.

A model's own code, its tokenizer and its modules have files of any names, also in subdirectories. So this is a rule of
what stays behind: weights of any format and their indexes, what Orbax and this package record of a checkpoint, other
checkpoints in subdirectories, hidden files, links out of the directory, and what is not small.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import stat
from collections import deque
from collections.abc import Mapping
from itertools import islice

from orbax_safetensors.checkpoint.files import is_part
from orbax_safetensors.checkpoint.record import RECORD_NAME
from orbax_safetensors.errors import StorageError
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.format.names import some
from orbax_safetensors.orbax_store.discovery import RECORD_FILE, STRINGS_FILE, UNFINISHED
from orbax_safetensors.orbax_store.metadata import INDEX_NAMES, STEP_FILES
from orbax_safetensors.orbax_store.ocdbt import DATA_DIRECTORY
from orbax_safetensors.storage.store import Stamp, Store

logger = logging.getLogger(__name__)

SMALL_BYTES = 128 * 2**20
"""The largest file that goes along; tokenizers have up to 40 MB."""
# All files together. A directory with more holds something besides a model.
_MOST_BYTES = 2**29
_MOST_FILES = 1000

# The endings of weights, of their indexes, and of the further files of some formats.
_WEIGHTS = re.compile(
    r"(.+)\.(?:safetensors|pt|pth|ckpt|distcp|h5|hdf5|keras|msgpack|ot|tflite|mlmodel|mlpackage|nemo|pdparams|gguf|ggml"
    r"|onnx|engine|pte|(bin|pkl|pickle|npz|pb))([._]data.*)?(\.index(\.[^.]+)?(\.json)?)?",
    re.IGNORECASE,
)
# What names of weights and of a training's state say. Other files may have some of these endings (`vocab.bin`).
_WEIGHTS_STEM = re.compile(
    r"(?<![a-z])(model|weights?|params|adapter|lora|ggml|consolidated|checkpoint|optim(izer)?|scheduler|scaler|sampler"
    r"|states?|training)(?![a-z])",
    re.IGNORECASE,
)
# What Orbax and this package write beside tensors, or did once.
_RECORDS = {*INDEX_NAMES, *STEP_FILES, STRINGS_FILE, RECORD_FILE, CHECKSUMS_NAME, RECORD_NAME}
_RECORDS |= {"safetensors.headers.json.gz"}
# What shows that a subdirectory is a checkpoint, or an array of Zarr's.
_CHECKPOINTS = {*_RECORDS, "trainer_state.json", ".zarray", "zarr.json"}
_NOT_COPIED = {*_RECORDS, DATA_DIRECTORY, "__pycache__"}

# The Hugging Face Hub's cache: the files of a snapshot are links to `blobs`.
_SNAPSHOT = re.compile(r"(.*/models--[^/]+)/snapshots/.+")
_BLOBS = re.compile(r".*/models--[^/]+/blobs")


def small_files(store: Store, directory: str) -> dict[str, str]:
    """Return the paths of the files of a directory that go along, by their names, which may be paths below it.

    Files of the directory itself come first, then those of subdirectories. A warning names what one might expect to go
    along, and stays behind. Raises `StorageError` if the directory cannot be listed, or if something in it is neither a
    file nor a directory.
    """
    files, left_out = found_small(store, directory)
    if left_out:
        logger.warning("%s: not copied: %s", directory, some(left_out))
    return files


def found_small(store: Store, directory: str) -> tuple[dict[str, str], list[str]]:
    """Return what `small_files` returns, and what its warning would name."""
    walk = _Walk(store, directory)
    walk.run()
    return walk.files, walk.left_out


class _Walk:
    """A walk through a directory, level by level."""

    def __init__(self, store: Store, directory: str) -> None:
        self.files: dict[str, str] = {}
        self.left_out: list[str] = []
        self._store, self._directory = store, directory
        self._nbytes = 0
        names = store.list(directory) or {}
        self._pending: deque[tuple[str, Mapping[str, Stamp | None]]] = deque([("", names)])
        if store.is_local:
            # A link of ours, and the Hub's cache, have links in place of all files.
            self._real = os.path.realpath(directory)
            self._linked = {
                os.path.dirname(os.path.realpath(os.path.join(directory, name))) for name in names if is_part(name)
            }
            self._blobs = {path for path in self._linked if _BLOBS.fullmatch(path)}
            if snapshot := _SNAPSHOT.fullmatch(self._real):
                self._blobs.add(f"{snapshot[1]}/blobs")

    def run(self) -> None:
        """Take the files of the directory and of its subdirectories, until there are too many."""
        while self._pending and len(self.files) <= _MOST_FILES:
            below, states = self._pending.popleft()
            if below and not _CHECKPOINTS.isdisjoint(states):
                continue
            for base_name, state in states.items():
                if base_name.startswith(".") or base_name in _NOT_COPIED or UNFINISHED in base_name:
                    continue
                name = posixpath.join(below, base_name)
                if self._store.is_local:
                    self._visit_local(name)
                elif state is None and (inside := self._store.list(posixpath.join(self._directory, name))) is not None:
                    self._pending.append((name, inside))
                else:
                    self._take(name, 0 if state is None else state.nbytes)
        if beyond := list(self.files)[_MOST_FILES:]:
            self.files = dict(islice(self.files.items(), _MOST_FILES))
            self.left_out.append(f"{beyond[0]} and what follows (more than {_MOST_FILES} files)")

    def _visit_local(self, name: str) -> None:
        path = os.path.join(self._directory, name)
        try:
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode) and not os.path.islink(path):
                self._pending.append((name, self._store.list(path) or {}))
        except (OSError, StorageError):  # a link to nowhere, or nothing that this process may read
            self.left_out.append(f"{name} (cannot be read)")
            return
        if stat.S_ISDIR(status.st_mode):
            return
        if not stat.S_ISREG(status.st_mode):  # who opens a pipe waits for ever
            raise StorageError(f"{path}: is not a regular file")
        if self._is_inside(path, name):
            self._take(name, status.st_size)
        else:
            self.left_out.append(f"{name} (a link out of the directory)")

    def _is_inside(self, path: str, name: str) -> bool:
        real = os.path.realpath(path)
        return (
            real.startswith(os.path.join(self._real, ""))
            or os.path.dirname(real) in self._blobs
            or any(real == os.path.join(linked, name) for linked in self._linked)
        )

    def _take(self, name: str, nbytes: int) -> None:
        """Take a file unless it is weights or too large."""
        match = _WEIGHTS.fullmatch(posixpath.basename(name))
        is_known = match is not None and _WEIGHTS_STEM.search(match[1]) is not None
        if match is not None and (is_known or match[2] is None):
            if "/" in name or not (is_known or is_part(name)):
                self.left_out.append(f"{name} (weights)")
            return
        if nbytes > SMALL_BYTES or self._nbytes + nbytes > _MOST_BYTES:
            self.left_out.append(f"{name} (of {nbytes} bytes)")
            return
        self._nbytes += nbytes
        self.files[name] = posixpath.join(self._directory, name)
