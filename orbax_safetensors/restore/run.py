"""`restore`: resolve a caller's request against the checkpoint at a path, and fill it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.family import FamilyLike, fitted, mapped
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.checkpoint.shared_headers import MIN_PROCESSES
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
from orbax_safetensors.storage.paths import PathLike, as_text, is_url
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

    company = _company(path, item, restore_args, sharding_of, options)
    return _restored(path, company, options, resolve, partial=partial_restore)


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

    restored = _restored(path, _company(path, None, dict(leaves), None, options), options, resolve)
    return {name: restored[paths[name]] for name in leaves}


class _Company(NamedTuple):
    """What this process does with all others in a restore.

    Attributes:
      together: they agree on the request, as `cooperative.decide` says.
      share: they read headers for each other.
    """

    together: bool
    share: bool


def _restored(
    path: str,
    company: _Company,
    options: SafetensorsOptions,
    resolve: Callable[[Checkpoint], tuple[Checkpoint, requests.Request]],
    *,
    partial: bool = False,
) -> Any:
    """Restore the request that `resolve` returns for the checkpoint at `path`; if `partial`, files may be missing."""
    # Made before anything can fail, and only for what all processes do, so that they count keys alike.
    # A process may have a copy of the checkpoint at another path; devices exchange leaves in one order anyway.
    key = new_key("restore", "" if cooperates(options) else path) if company.together else None
    shared_by = new_key("headers", path) if company.share else None

    def placed() -> tuple[Checkpoint, requests.Request]:
        stored = _read_for(path, options.storage_options, key, shared_by, partial)
        with no_collection():
            checkpoint, request = resolve(stored)
            return checkpoint, requests.placed(request, checkpoint)

    decided = cooperative.decide(placed, options, key)
    return decided.request.tree(cooperative.restore(decided, options))


def _company(
    path: str, item: Any, restore_args: Any, sharding_of: ShardingOf | None, options: SafetensorsOptions
) -> _Company:
    """Return what this process does with all others.

    A restore together has arrays over devices of all processes, and these exchange parts or must read one commit.
    Headers are shared in any restore of such arrays from a server if there are many processes. Raises
    `TensorMismatchError` if arrays over devices of only some processes would have to be of one commit.
    """
    count = jax.process_count()
    if count == 1:
        return _Company(together=False, share=False)
    many = count >= MIN_PROCESSES and is_url(path)
    if sharding_of is not None:  # its arrays are not known before the checkpoint is open
        together = is_unpinned(path) or cooperates(options)
        return _Company(together, many and together)
    spread = [leaf for leaf in requests.leaf_requests(item, restore_args) if len(leaf.processes) > 1]
    everywhere = [leaf for leaf in spread if len(leaf.processes) == count]
    if spread and is_unpinned(path):
        if not everywhere:
            raise TensorMismatchError(
                f"{path}: arrays over devices of some of {count} processes could come from different commits; name its "
                "commit, which is in the path of open_checkpoint"
            )
        return _Company(together=True, share=many)
    together = cooperates(options) and any(map(exchangeable, everywhere))
    return _Company(together, many and bool(everywhere))


def _read_for(
    path: str, storage_options: Mapping[str, Any] | None, key: str | None, shared_by: str | None, partial: bool
) -> Checkpoint:
    """Read the checkpoint at `path`; processes may share headers, see `read_checkpoint` for `shared_by`.

    With the `key` of a restore together, all processes read one commit of a repository. The first process to come here
    decides on the commit; no process waits for another.
    """
    checkpoint = read_checkpoint(path, storage_options, partial=partial, shared_by=shared_by)
    if key is None or not is_unpinned(path):
        return checkpoint
    repository, _, pinned = first(f"{key}/commit", f"{path}\n{checkpoint.path}").partition("\n")
    if repository != path:
        raise TensorMismatchError(f"{path}: another process restores {repository} together with this one")
    return checkpoint if pinned == checkpoint.path else read_checkpoint(pinned, storage_options, partial=partial)
