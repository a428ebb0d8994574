"""The directory that a save goes to: which files may already be there, and what happens to them.

On a file system, `ocp.Checkpointer` gives a save a temporary directory, and renames it when the save is complete.
Objects have their final names from the beginning, and so do the files of a handler without a checkpointer. There, files
of an earlier save could mix with those of this one into a checkpoint that nobody saved.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.files import SUFFIX
from orbax_safetensors.errors import StorageError
from orbax_safetensors.format.index import INDEX_SUFFIX
from orbax_safetensors.format.names import some
from orbax_safetensors.orbax_store.addressed_item import INDEX_NAMES
from orbax_safetensors.storage.paths import place
from orbax_safetensors.storage.remote import READ_ONLY
from orbax_safetensors.storage.store import Store
from orbax_safetensors.streaming.pipeline import is_below

# What happens to files that are already there: "kept", but files of a checkpoint are an error; "refused": any file is
# an error; "deleted", with all that is below the directory.
Existing = Literal["kept", "refused", "deleted"]


def make_room(store: Store, directory: str, existing: Existing) -> None:
    """Make sure that a save to `directory` meets no file of another save; one process calls it before any write.

    Raises `StorageError` if there is such a file and `existing` does not delete it, or if nothing can be written there.
    """
    if store.is_local:  # a file system
        _check_text(directory)
        # Orbax deletes what a killed save has left in a temporary directory, perhaps in the background.
        if not os.path.isdir(directory) or ocp.path.atomicity.TMP_DIR_SUFFIX in directory:
            return
    if not store.writes:
        raise StorageError(f"{directory}: {READ_ONLY}")
    if existing == "deleted":
        store.delete(directory)
        return
    names = store.list(directory) or []
    in_the_way = names if existing == "refused" else _of_checkpoints(names)
    if in_the_way:
        instead = "delete these files, or save elsewhere"
        if existing == "refused":
            instead = "save elsewhere, or with force=True, which deletes all that is there"
        raise StorageError(f"{directory}: already exists, and holds {some(in_the_way)}; {instead}")


def check_kept(directory: str, existing: Existing, *sources: Any) -> None:
    """Raise `StorageError` if a save reads one of `sources`, as far as these are paths, and would delete it before."""
    for source in sources:
        if existing == "deleted" and isinstance(source, str | os.PathLike):
            path = place(source)
            # Of a directory, also where its files lead: those of a link may be in the destination.
            inside = [entry.path for entry in os.scandir(path)] if os.path.isdir(path) else []
            if any(is_below(file, directory) for file in (path, *inside)):
                raise StorageError(f"{source}: is in {directory}, which the save would delete; save elsewhere")


def _check_text(directory: str) -> None:
    """Raise `StorageError` if a path is not text: Orbax writes it into a file at the end, and would fail."""
    try:
        directory.encode()
    except UnicodeEncodeError as error:
        raise StorageError(f"{directory}: nothing can be saved at a path that is not UTF-8") from error


def _of_checkpoints(names: Sequence[str]) -> list[str]:
    """Return the names that a reader would take for files of a checkpoint."""
    files = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX)) and not name.startswith(".")]
    return files + [name for name in names if name.startswith(INDEX_NAMES) and name not in files]
