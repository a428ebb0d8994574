"""The directory of an object store that a save goes to: what may be there before, and what becomes of it.

A file system gives a save a directory of its own, which takes its name when it is whole. Objects have theirs from the
beginning, and one that is written replaces another without a word: files that an earlier save has left beside those of
this one, perhaps under an index that names neither, would make a checkpoint that nobody saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from orbax_safetensors.checkpoint import SUFFIX
from orbax_safetensors.errors import StorageError
from orbax_safetensors.format.index import INDEX_SUFFIX
from orbax_safetensors.format.names import some
from orbax_safetensors.io.remote import READ_ONLY
from orbax_safetensors.io.store import Store

# What becomes of what is there: nothing, but there must be no file of a checkpoint; there must be nothing; it is
# deleted, with all that is below it.
Existing = Literal["kept", "refused", "deleted"]


def make_room(store: Store, directory: str, existing: Existing) -> None:
    """Sees to it that a save to `directory` meets no file of another one; called by one process, before any byte.

    Raises `StorageError` where there is one and nobody has asked to delete it, or where nothing can be written.
    """
    if not store.writes:
        raise StorageError(f"{directory}: {READ_ONLY}")
    if existing == "deleted":
        store.delete(directory)
        return
    names = store.list(directory) or []
    in_the_way = names if existing == "refused" else _of_checkpoints(names)
    if in_the_way:
        raise StorageError(
            f"{directory}: already exists, and holds {some(in_the_way)}; save elsewhere, or with force=True, which "
            "deletes all that is there"
        )


def _of_checkpoints(names: Sequence[str]) -> list[str]:
    """Names of files that a reader takes for those of a checkpoint."""
    return [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX)) and not name.startswith(".")]
