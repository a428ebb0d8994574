"""What all processes of a restore do together.

They have to read one commit of a repository, and raise together if one of them cannot open the checkpoint from which
another one reads for it. What that is follows from the request alone, before the checkpoint is open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.devices.agreement import first, new_key, together, withdraw
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.restore.request import RestoreRequest
from orbax_safetensors.storage.schemes import is_unpinned

_T = TypeVar("_T")


def restore_key(request: RestoreRequest) -> str | None:
    """Return the key of what this process does with all others in a restore; None if it restores alone.

    It does if devices send each other bytes, or if all have to read one commit. Raises `TensorMismatchError` if arrays
    over devices of only some processes would have to be of one commit.
    """
    path, count = request.path, jax.process_count()
    if count == 1:
        return None
    if request.shards_all:  # the arrays are not known before the checkpoint is open
        return new_key("restore", path) if is_unpinned(path) else None
    spread = [leaf for leaf in request.leaf_requests() if len(leaf.processes) > 1]
    everywhere = [leaf for leaf in spread if len(leaf.processes) == count]
    if spread and not everywhere and is_unpinned(path):
        raise TensorMismatchError(
            f"{path}: arrays over devices of some of {count} processes could come from different commits; name its "
            "commit, which is in the path of open_checkpoint"
        )
    # Made only for what all processes do, so that they count keys alike.
    if any(leaf.broadcast for leaf in everywhere):
        return new_key("restore")  # of no path: a process may have a copy of the checkpoint at another one
    return new_key("restore", path) if everywhere and is_unpinned(path) else None


def at_one_commit(checkpoint: Checkpoint, request: RestoreRequest, key: str) -> Checkpoint:
    """Return the checkpoint that was read for a request, or that of another commit which all processes read.

    The first process to come here decides on the commit; no process waits for another.
    """
    if not is_unpinned(request.path):
        return checkpoint
    repository, _, pinned = first(f"{key}/commit", f"{request.path}\n{checkpoint.path}").partition("\n")
    if repository != request.path:
        raise TensorMismatchError(f"{request.path}: another process restores {repository} together with this one")
    if pinned == checkpoint.path:
        return checkpoint
    return read_checkpoint(pinned, request.options.storage_options, partial=request.leaves_out)


def all_or_none(key: str, do: Callable[[], _T], *, timeout_secs: float) -> _T:
    """Call `do` in every process that makes the restore of `key`; if it fails in one, all raise."""
    try:
        return together(f"{key}/decided", do, timeout_secs=timeout_secs)
    finally:
        withdraw(f"{key}/commit")  # all have read it
