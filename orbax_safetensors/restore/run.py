"""`restore`: open a checkpoint, see it through its family, match leaves with it, plan requests, fill leaves."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.checksums import RestoreChecksums
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.family import fitted, mapped, nearest_variant, other_family_of, with_variant
from orbax_safetensors.checkpoint.one_state import of_one_state, unless_changed
from orbax_safetensors.checkpoint.quantized import check_casts
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.devices.arrays import explicit_transfers
from orbax_safetensors.devices.sharding import no_mesh
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.names import some
from orbax_safetensors.orbax_store.discovery import TREE_FILE
from orbax_safetensors.restore import replicas
from orbax_safetensors.restore.coordination import all_or_none, at_one_commit, restore_key
from orbax_safetensors.restore.match import Matched, assign_devices, match
from orbax_safetensors.restore.pipeline import fill
from orbax_safetensors.restore.request import RestoreRequest
from orbax_safetensors.restore.saved_tree import saved_tree
from orbax_safetensors.restore.sharding_choice import choose_shardings
from orbax_safetensors.storage.process_memory import no_collection

logger = logging.getLogger(__name__)


@explicit_transfers()
def restore(request: RestoreRequest) -> Any:
    """Return the tree of a request with this process's shards. No file stays open and no thread runs on.

    Raises:
      TensorMismatchError: the request does not fit the checkpoint, or a cast that it does not ask for would change
        values.
      MappingError: there is no such family, or it does not fit the checkpoint.
      StorageError, HeaderError, IndexFileError: the checkpoint cannot be read, is not valid, or changed. If one replica
        reads for others, also if another process fails.
    """
    options = request.options
    key = restore_key(request)
    if key is None:
        prepared = prepare(request)
    else:
        prepared = all_or_none(key, partial(_prepared, request, key), timeout_secs=options.join_timeout_secs)
    checkpoint, matched, checksums = prepared
    targets = matched.targets
    with unless_changed(checkpoint), no_mesh():
        if any(target.broadcast for target in targets):
            read = partial(fill, checkpoint, checksums=checksums, options=options)
            return matched.tree(replicas.fill_and_broadcast(read, targets))
        return matched.tree(fill(checkpoint, targets, checksums=checksums, options=options))


class Prepared(NamedTuple):
    """A restore before any tensor is read, with what checks tensors."""

    checkpoint: Checkpoint
    matched: Matched
    checksums: RestoreChecksums | None


def prepare(request: RestoreRequest, *, abstract: bool = False) -> Prepared:
    """Prepare a restore by this process alone; if `abstract`, arrays need no devices."""
    return of_one_state(request.path, "opened", lambda: _prepared(request, None, abstract=abstract))


def _prepared(request: RestoreRequest, key: str | None, *, abstract: bool = False) -> Prepared:
    """Open the checkpoint, see it through its family, match the leaves, and say where arrays go."""
    options = request.options
    stored = read_checkpoint(request.path, options.storage_options, partial=request.leaves_out)
    if key is not None:
        stored = at_one_commit(stored, request, key)
    with unless_changed(stored), no_collection():
        checkpoint, matched = match_through_family(request, stored)
        matched = assign_devices(matched, checkpoint.path, abstract=abstract)
        checksums = RestoreChecksums(checkpoint, partial=request.leaves_out) if options.checksums else None
        return Prepared(checkpoint, matched, checksums)


def match_through_family(request: RestoreRequest, stored: Checkpoint) -> tuple[Checkpoint, Matched]:
    """Return the checkpoint as its family sees it, if it has one, and the leaves of the request, matched with it.

    Switches that the request does not have follow from names and shapes of its leaves if the family's defaults do not
    fit. A request without a tree is for the one that was saved, or if none is recorded, for everything.
    """
    checkpoint, matched = _match_leaves(request, stored)
    if request.only:
        matched = matched.only(request.only)
    if request.casts is not None:
        check_casts(checkpoint, request.casts, request.options.dequantize)
        matched = matched.cast(request.casts)
    return checkpoint, matched


def _log_left_out(checkpoint: Checkpoint, names: Collection[str]) -> None:
    """Warn of leaves that Orbax's handlers do not ask for, unless a tree of Orbax is there, which they compare."""
    left_out = [name for name in checkpoint.leaves if name not in names]
    path = checkpoint.path
    if left_out and checkpoint.store.is_local and not os.path.exists(os.path.join(path, TREE_FILE)):
        logger.warning("%s: the tree has no leaf for these, which are not restored: %s", path, some(left_out))


def _match_leaves(request: RestoreRequest, stored: Checkpoint) -> tuple[Checkpoint, Matched]:
    """See `match_through_family`: with all leaves of the request, and the dtypes that they are described with."""
    dequantize = request.options.dequantize
    if request.by_name:
        checkpoint, paths = fitted(stored, request.leaf_shapes(), dequantize=dequantize)
        partial_ = checkpoint.mapped is None
        matched = match(checkpoint, None, request.restore_args, partial=partial_, paths=paths)
        _log_left_out(checkpoint, paths.values())
        return checkpoint, matched
    if request.has_tree:

        def attempt(switches: Mapping[str, Any]) -> tuple[Checkpoint, Matched]:
            complete = not request.partial
            checkpoint = mapped(stored, request.family, switches, complete=complete, dequantize=dequantize)
            return checkpoint, match(checkpoint, request.item, request.restore_args, partial=request.partial)

        def nearest(passed: Mapping[str, Any]) -> Mapping[str, Any] | None:
            return nearest_variant(stored, request.family, request.leaf_shapes(), passed)

        def other_family() -> str | None:
            return other_family_of(request.leaf_shapes(), read_config(stored), request.family)

        return with_variant(attempt, request.variant, nearest, other_family)
    tree = saved_tree(stored, request.family, request.variant, complete=not request.leaves_out, dequantize=dequantize)
    checkpoint, sharding_of = tree.checkpoint, request.sharding_of
    if request.mesh is not None:
        sharding_of = choose_shardings(checkpoint, request.mesh, request.options)
    if tree.recorded is None and sharding_of is None and jax.process_count() > 1:
        raise TensorMismatchError(
            f"{checkpoint.path}: has no saved tree, and there are {jax.process_count()} processes; pass a mesh, as "
            "ost.load(path, mesh) or ost.SafetensorsRestore(mesh), or a sharding for each array"
        )
    restore_args = tree.map(lambda leaf: leaf.restore_args(checkpoint.path, sharding_of))
    return checkpoint, match(checkpoint, None, restore_args, partial=False)
