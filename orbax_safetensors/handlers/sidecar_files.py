"""The small files of Orbax beside a save, for directories that Orbax itself does not read or write, such as URLs."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.agreement import new_key, together
from orbax_safetensors.format.index import SUFFIX
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.storage.paths import PathLike, as_text
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import find_small, write_small

# The most bytes to read of such a file.
_MAX_BYTES = 64 * 2**20


def write_sidecar_files(
    directory: PathLike, files: Mapping[str, str], *, options: SafetensorsOptions, active: ActiveProcesses
) -> None:
    """Write small files, in order, beside the save in `directory`; the `active` processes call this together.

    One process writes. Raises `StorageError` in every process if that one fails.
    """
    directory = as_text(directory)

    def write() -> None:
        store, path = store_of(directory, options.storage_options)
        for name, text in files.items():
            write_small(store, posixpath.join(path, name), text.encode(), sync=options.fsync)

    together(f"{new_key('beside', directory, active)}/written", active.by_primary(write), active=active)


def read_sidecar_file(directory: PathLike, name: str, *, options: SafetensorsOptions) -> bytes | None:
    """Return the content of a small file in `directory`; None if it does not exist, or if `directory` is a file.

    Raises `StorageError` if the file cannot be read.
    """
    store, path = store_of(directory, options.storage_options)
    return None if path.endswith(SUFFIX) else find_small(store, posixpath.join(path, name), _MAX_BYTES)
