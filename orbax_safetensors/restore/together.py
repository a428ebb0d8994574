"""What all processes of a restore do together.

They may read headers for each other, have to read one commit of a repository, and raise together if one of them cannot
open the checkpoint. What that is follows from the request alone, before the checkpoint is open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.checkpoint.shared_headers import MIN_PROCESSES
from orbax_safetensors.devices.agreement import first, new_key, together, withdraw
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.restore.request import RestoreRequest
from orbax_safetensors.storage.paths import is_url
from orbax_safetensors.storage.schemes import is_unpinned

_T = TypeVar("_T")


class Keys(NamedTuple):
    """Keys of what this process does with all others in a restore, None for what it does alone.

    Attributes:
      restore: of the agreements of a restore that all processes make, because their devices send each other bytes, or
        because all have to read one commit.
      headers: of the headers that processes read for each other; see `read_checkpoint`.
    """

    restore: str | None
    headers: str | None


# A restore of one process.
ALONE = Keys(None, None)


def keys_of(request: RestoreRequest) -> Keys:
    """Return the keys of a restore if there are several processes.

    Headers are shared in any restore of arrays over devices of all processes from a server, if there are many. Raises
    `TensorMismatchError` if arrays over devices of only some processes would have to be of one commit.
    """
    path, count = request.path, jax.process_count()
    if request.shards_all:  # the arrays are not known before the checkpoint is open
        sends = False
        all_restore = shared = is_unpinned(path)
    else:
        spread = [leaf for leaf in request.leaf_requests() if len(leaf.processes) > 1]
        everywhere = [leaf for leaf in spread if len(leaf.processes) == count]
        if spread and not everywhere and is_unpinned(path):
            raise TensorMismatchError(
                f"{path}: arrays over devices of some of {count} processes could come from different commits; name its "
                "commit, which is in the path of open_checkpoint"
            )
        shared = bool(everywhere)
        sends = any(leaf.broadcast for leaf in everywhere)
        all_restore = sends or (shared and is_unpinned(path))
    # Made only for what all processes do, so that they count keys alike. If devices send bytes to each other, a process
    # may have a copy of the checkpoint at another path.
    shared = shared and count >= MIN_PROCESSES and is_url(path)
    return Keys(
        new_key("restore", "" if sends else path) if all_restore else None,
        new_key("headers", path) if shared else None,
    )


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
