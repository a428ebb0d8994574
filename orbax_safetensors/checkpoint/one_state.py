"""What is read of a checkpoint is of one state of it, or that it changed is the error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.errors import ChecksumError, MissingError, SafetensorsError, StorageError
from orbax_safetensors.storage.paths import PathLike, as_text

# How often a checkpoint may be replaced while it is read.
_ATTEMPTS = 10

_T = TypeVar("_T")


def of_one_state(
    path: PathLike, read: str, attempt: Callable[[], _T], files: Callable[[], object] = lambda: None
) -> _T:
    """Return what `attempt` returns or raises of a path that no other directory or file replaces in the meantime.

    A forced save exchanges directories: otherwise, some files could be of the old one, and some of the new one. `files`
    returns what tells states of the files apart, unless their bytes are compared with the state of their file anyway.
    `read` is what `attempt` does, for the error of a path that is replaced again and again.
    """
    text = as_text(path)
    for _ in range(_ATTEMPTS):
        with _keep_identity(text):
            before = _identity(text), files()
            try:
                result = attempt()
            except SafetensorsError:
                if (_identity(text), files()) == before:
                    raise
            else:
                if (_identity(text), files()) == before:
                    return result
    raise StorageError(f"{text}: was replaced while it was {read}, {_ATTEMPTS} times")


@contextlib.contextmanager
def _keep_identity(path: str) -> Iterator[None]:
    """Keep the identity of a directory or file from being given to another one once it is deleted."""
    opened: list[int] = []
    try:
        with contextlib.suppress(OSError, ValueError):  # it is not there, or a URL
            opened.extend(map(os.open, [path], [os.O_PATH | os.O_CLOEXEC]))  # an interrupt comes before or after
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _identity(path: str) -> tuple[int, int] | None:
    """Return what tells a directory or file from another one of the same name; None if nothing has the name here."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError):
        return None
    return facts.st_dev, facts.st_ino


@contextlib.contextmanager
def unless_changed(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise a `StorageError` for a `ChecksumError` or `MissingError` if a file has changed since it was opened.

    What lies beside the files of a checkpoint may be read after another one has taken its place.
    """
    try:
        yield
    except (ChecksumError, MissingError) as error:
        if (change := _change(checkpoint)) is not None:
            raise change from error
        raise


def _change(checkpoint: Checkpoint) -> StorageError | None:
    """Return the error of the first file that is not in the state in which its header was read, if there is one."""
    for stored in checkpoint.files:
        try:
            file = checkpoint.store.find(stored.path)
        except StorageError:
            return None  # what was found before says more
        found = None if file is None else file.stamp
        if file is not None:
            file.close()
        if found != stored.stamp:
            return StorageError(
                f"{stored.path}: changed while it was in use: expected {stored.stamp}, found {found or 'no file'}"
            )
    return None
