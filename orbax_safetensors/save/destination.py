"""The directory that a save goes to: what may be there before, and what becomes of it.

On a file system, `ocp.Checkpointer` gives a save a directory of its own, which takes its name when it is whole. Objects
have their names from the beginning, and so do the files of a handler that is called without a checkpointer. Files that
an earlier save has left beside those of this one, perhaps under an index that names neither, would make a checkpoint
that nobody saved.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.files import SUFFIX
from orbax_safetensors.errors import StorageError
from orbax_safetensors.format.index import INDEX_SUFFIX
from orbax_safetensors.format.names import some
from orbax_safetensors.orbax_store.addressed_item import INDEX_NAMES
from orbax_safetensors.storage.remote import READ_ONLY
from orbax_safetensors.storage.store import Store

# What becomes of what is there: nothing, but there must be no file of a checkpoint; there must be nothing; it is
# deleted, with all that is below it.
Existing = Literal["kept", "refused", "deleted"]


def make_room(store: Store, directory: str, existing: Existing) -> None:
    """Sees to it that a save to `directory` meets no file of another one; called by one process, before any byte.

    Raises `StorageError` where there is one and nobody has asked to delete it, or where nothing can be written.
    """
    if not store.whole:  # a file system
        _check_text(directory)
        # What a killed save has left in a temporary directory Orbax deletes, perhaps in the background after this.
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


def _check_text(directory: str) -> None:
    """Orbax writes a checkpoint's path into a file once all else is written, and fails if the path is not text."""
    try:
        directory.encode()
    except UnicodeEncodeError as error:
        raise StorageError(f"{directory}: nothing can be saved at a path that is not UTF-8") from error


def _of_checkpoints(names: Sequence[str]) -> list[str]:
    """Names of what a reader takes for a part of a checkpoint, or what would be a part of this one."""
    files = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX)) and not name.startswith(".")]
    return files + [name for name in names if name.startswith(INDEX_NAMES) and name not in files]
