"""`restore`: resolve a caller's request against the checkpoint at a path, and fill it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.family import FamilyLike, fitted, mapped
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.devices.agreement import first, new_key
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore import cooperative
from orbax_safetensors.restore import request as requests
from orbax_safetensors.restore.exchanges import exchangeable
from orbax_safetensors.restore.plan import cooperates
from orbax_safetensors.restore.request import ShardingOf
from orbax_safetensors.restore.saved_tree import saved_tree
from orbax_safetensors.restore.variants import resolved
from orbax_safetensors.storage.memory import no_collection
from orbax_safetensors.storage.paths import PathLike, as_text
from orbax_safetensors.storage.schemes import is_unpinned


def restore(
    path: PathLike,
    item: Any = None,
    restore_args: Any = None,
    *,
    sharding_of: ShardingOf | None = None,
    partial_restore: bool = False,
    family: FamilyLike = None,
    variant: Mapping[str, Any] | None = None,
    options: SafetensorsOptions,
) -> Any:
    """Restore a checkpoint; see `SafetensorsRestore` for the arguments.

    Without `item` and `restore_args`, `sharding_of` returns the shardings of all arrays.

    Raises:
      TensorMismatchError: the request does not fit the checkpoint.
      MappingError: there is no such family, or it does not fit the checkpoint.
      StorageError, HeaderError, IndexFileError: the checkpoint cannot be read or is not valid.
    """
    path = as_text(path)

    def resolve(stored: Checkpoint) -> tuple[Checkpoint, requests.Request]:
        everything = item is None and restore_args is None
        if not everything:
            return resolved(
                stored,
                item,
                restore_args,
                partial=partial_restore,
                family=family,
                variant=variant,
                dequantize=options.dequantize,
            )
        saved = saved_tree(path, stored, family, variant)
        checkpoint = mapped(
            stored,
            family if saved is None else saved.family,
            variant if saved is None else saved.variant,
            complete=not partial_restore,
            dequantize=options.dequantize,
        )
        if saved is not None:
            request = requests.resolve(checkpoint, None, saved.restore_args(checkpoint, sharding_of), partial=False)
        elif jax.process_count() > 1 and sharding_of is None:
            raise TensorMismatchError(
                f"{checkpoint.path}: has no saved tree, and there are {jax.process_count()} processes; give each "
                "array a sharding with item or restore_args"
            )
        else:
            request = requests.everything(checkpoint, sharding_of)
        return checkpoint, request

    together = _all_together(path, item, restore_args, sharding_of, options)
    return _restored(path, together, options, resolve, partial=partial_restore)


def restore_leaves(
    path: PathLike, leaves: Mapping[str, ocp.RestoreArgs], *, options: SafetensorsOptions
) -> dict[str, Any]:
    """Restore leaves by name: stored tensors, or the whole tree of a family that is registered for the architecture.

    The variant is the one whose tree has these leaves. Raises what `restore` raises, and `MappingError` if no
    registered family has such a tree or several have.
    """
    path = as_text(path)
    paths: dict[str, str] = {}

    def resolve(stored: Checkpoint) -> tuple[Checkpoint, requests.Request]:
        shapes = {name: requests.exact_shape(args) for name, args in leaves.items()}
        checkpoint, paths_in_tree = fitted(stored, shapes, dequantize=options.dequantize)
        paths.update(paths_in_tree)
        restore_args = {paths[name]: args for name, args in leaves.items()}
        return checkpoint, requests.resolve(checkpoint, None, restore_args, partial=checkpoint.mapped is None)

    restored = _restored(path, _all_together(path, None, dict(leaves), None, options), options, resolve)
    return {name: restored[paths[name]] for name in leaves}


def _restored(
    path: str,
    together: bool,
    options: SafetensorsOptions,
    resolve: Callable[[Checkpoint], tuple[Checkpoint, requests.Request]],
    *,
    partial: bool = False,
) -> Any:
    """Restore the request that `resolve` returns for the checkpoint at `path`, in all processes `together` or alone.

    If `partial`, files of the checkpoint may be missing.
    """
    # Made before anything can fail, and only for shared restores, so that all processes count keys alike.
    # A process may have a copy of the checkpoint at another path; devices exchange leaves in one order anyway.
    key = new_key("restore", "" if cooperates(options) else path) if together else None

    def placed() -> tuple[Checkpoint, requests.Request]:
        stored = _read_for(path, options.storage_options, key, partial)
        with no_collection():
            checkpoint, request = resolve(stored)
            return checkpoint, requests.placed(request, checkpoint)

    decided = cooperative.decide(placed, options, key)
    return decided.request.tree(cooperative.restore(decided, options))


def _all_together(
    path: str, item: Any, restore_args: Any, sharding_of: ShardingOf | None, options: SafetensorsOptions
) -> bool:
    """Return whether all processes make this restore together; otherwise each one restores alone.

    A shared restore has arrays over devices of all processes, and these exchange parts or must read one commit. Raises
    `TensorMismatchError` if arrays over devices of only some processes would have to be of one commit.
    """
    count = jax.process_count()
    if count == 1:
        return False
    if sharding_of is not None:  # its arrays are not known before the checkpoint is open
        return is_unpinned(path) or cooperates(options)
    spread = [leaf for leaf in requests.leaf_requests(item, restore_args) if len(leaf.processes) > 1]
    everywhere = [leaf for leaf in spread if len(leaf.processes) == count]
    if spread and is_unpinned(path):
        if not everywhere:
            raise TensorMismatchError(
                f"{path}: arrays over devices of some of {count} processes could come from different commits; name its "
                "commit, which is in the path of open_checkpoint"
            )
        return True
    return cooperates(options) and any(map(exchangeable, everywhere))


def _read_for(path: str, storage_options: Mapping[str, Any] | None, key: str | None, partial: bool) -> Checkpoint:
    """Read the checkpoint at `path`; with the `key` of a shared restore, all processes read one commit of a repository.

    The first process to come here decides on the commit; no process waits for another.
    """
    checkpoint = read_checkpoint(path, storage_options, partial=partial)
    if key is None or not is_unpinned(path):
        return checkpoint
    repository, _, pinned = first(f"{key}/commit", f"{path}\n{checkpoint.path}").partition("\n")
    if repository != path:
        raise TensorMismatchError(f"{path}: another process restores {repository} together with this one")
    return checkpoint if pinned == checkpoint.path else read_checkpoint(pinned, storage_options, partial=partial)
