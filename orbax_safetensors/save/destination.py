"""The directory that a save goes to: which files may already be there, and what happens to them.

On a file system, a checkpointer gives a save a temporary directory, and renames it when the save is complete. Objects
have their final names when they appear, and so do the files of a handler without a checkpointer. There, files of an
earlier save could mix with those of this one into a checkpoint that nobody saved.
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
# an error; "replaced", with all that is below the directory on an object store, once the new files are there.
Existing = Literal["kept", "refused", "replaced"]


def make_room(store: Store, directory: str, existing: Existing) -> None:
    """Make sure that a save to `directory` meets no file of another save; one process calls it before any write.

    Raises `StorageError` if there is such a file and `existing` is not "replaced", or if nothing can be written there.
    """
    if store.is_local:  # a file system
        _check_text(directory)
        if existing == "replaced":
            raise StorageError(f"{directory}: is replaced as a whole, by SafetensorsCheckpointer or save")
        # Orbax deletes what a killed save has left in a temporary directory, perhaps in the background.
        if not os.path.isdir(directory) or ocp.path.atomicity.TMP_DIR_SUFFIX in directory:
            return
    if not store.writes:
        raise StorageError(f"{directory}: {READ_ONLY}")
    if existing == "replaced":
        store.delete(directory, ())  # raises if all of a bucket is to be replaced
        return
    names = store.list(directory) or []
    in_the_way = names if existing == "refused" else _of_checkpoints(names)
    if in_the_way:
        instead = "delete these files, or save elsewhere"
        if existing == "refused":
            instead = "save elsewhere, or with force=True, which replaces all that is there"
        raise StorageError(f"{directory}: already exists, and holds {some(in_the_way)}; {instead}")


def check_kept(directory: str, *sources: Any) -> None:
    """Raise `StorageError` if a save that replaces `directory` reads one of `sources`, as far as these are paths."""
    for source in sources:
        if isinstance(source, str | os.PathLike) and is_below(place(source), directory):
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
