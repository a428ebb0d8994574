"""The tree of a save, as its index records it: the result of a restore without `item` and `restore_args`."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.errors import MappingError, TensorMismatchError
from orbax_safetensors.format.names import by_path
from orbax_safetensors.mapping import registry
from orbax_safetensors.mapping.family import Family, switches_of
from orbax_safetensors.orbax_store.discovery import TREE_FILE
from orbax_safetensors.orbax_store.index_note import read_note
from orbax_safetensors.orbax_store.leaf import JAX_ARRAY, SCALAR
from orbax_safetensors.orbax_store.metadata import RecordedTree
from orbax_safetensors.orbax_store.shardings import SHARDING_FILE, parse_shardings
from orbax_safetensors.restore.match import args_of
from orbax_safetensors.restore.request import ShardingOf
from orbax_safetensors.storage.store import find_small

logger = logging.getLogger(__name__)

# The most bytes to read of a file in which Orbax records a tree; it writes fewer.
_MAX_BYTES = 2**30

_SCALARS = {"b": bool, "i": int, "u": int, "f": float}


@dataclass(frozen=True)
class SavedTree:
    """A tree as it was saved.

    Attributes:
      family, variant: the family that the save used, or its name, and its variant; `identity` if it used none.
    """

    family: Family | str
    variant: Mapping[str, Any]
    _recorded: RecordedTree
    _shardings: Mapping[str, ocp.metadata.ShardingMetadata]

    def fits(self, checkpoint: Checkpoint) -> bool:
        """Return whether the checkpoint, as its family sees it, has all leaves of the tree."""
        return by_path(self._recorded.leaves, checkpoint.leaves).keys() <= checkpoint.leaves.keys()

    def restore_args(
        self, checkpoint: Checkpoint, sharding_of: ShardingOf | None = None, *, partial: bool = False
    ) -> Any:
        """Return the tree with the `ocp.RestoreArgs` that restore each leaf as it was saved.

        `sharding_of` returns other shardings for all arrays, those of NumPy included. If `partial`, leaves that the
        checkpoint does not have are placeholders.
        """
        stored = by_path(dict.fromkeys(checkpoint.leaves), self._recorded.leaves) if partial else self._recorded.leaves

        def args(name: str) -> Any:
            return self._of_leaf(checkpoint, name, sharding_of) if name in stored else ocp.PLACEHOLDER

        return self._recorded.map(args)

    def _of_leaf(self, checkpoint: Checkpoint, name: str, sharding_of: ShardingOf | None) -> ocp.RestoreArgs:
        kind = self._recorded.leaves[name]
        view = checkpoint.leaves.get(name)
        if sharding_of is not None and kind != SCALAR and view is not None:
            return args_of(sharding_of, name, view.shape)
        if kind == JAX_ARRAY:
            return _array(self._shardings.get(name), f"{checkpoint.path}: {name!r}")
        if kind == SCALAR and view is not None and view.dtype.kind in _SCALARS:
            return ocp.RestoreArgs(restore_type=_SCALARS[view.dtype.kind])
        return ocp.RestoreArgs(restore_type=np.ndarray)


def saved_tree(
    checkpoint: Checkpoint, family: FamilyLike, variant: Mapping[str, Any] | None, *, partial: bool = False
) -> SavedTree | None:
    """Return the tree that a checkpoint was saved as.

    Return None if no tree is recorded, or if another family or variant is requested. Raises `StorageError`
    if the files are no longer those that were saved; if `partial`, some may be missing.
    """
    if checkpoint.is_file or not checkpoint.store.writes:
        return None
    note = read_note(checkpoint.store, checkpoint.path)
    if note is None or note.saved is None or (tree := _read_beside(checkpoint, TREE_FILE)) is None:
        return None
    saved_family = note.saved.get("family") or registry.IDENTITY.name
    saved_variant = note.saved.get("variant") or {}
    config = read_config(checkpoint)
    try:
        known = registry.find(saved_family, config)
    except MappingError as error:
        if family is None:
            logger.warning(
                "%s: was saved with the family %r, which is not known here; pass family= to get its tree: %s",
                checkpoint.path,
                saved_family,
                error,
            )
        if not (isinstance(family, Family) and family.name == saved_family):
            return None
        known = family
    if family is not None and registry.find(family, config) != known:
        return None
    if any(name not in saved_variant or saved_variant[name] != value for name, value in switches_of(variant).items()):
        return None
    for fault in note.changed(checkpoint.path, checkpoint.fingerprints, partial=partial):
        raise fault
    shardings = parse_shardings(_read_beside(checkpoint, SHARDING_FILE), checkpoint.path)
    used = family if isinstance(family, Family) else saved_family
    return SavedTree(used, saved_variant, RecordedTree.parse(tree, checkpoint.path), shardings)


def _read_beside(checkpoint: Checkpoint, name: str) -> bytes | None:
    return find_small(checkpoint.store, posixpath.join(checkpoint.path, name), _MAX_BYTES)


def _array(sharding: ocp.metadata.ShardingMetadata | None, where: str) -> ocp.RestoreArgs:
    """Return the arguments for an array as it was saved, or for a NumPy array if one process lacks its devices."""
    if sharding is None:
        return ocp.ArrayRestoreArgs()
    try:
        return ocp.ArrayRestoreArgs(sharding=sharding.to_jax_sharding())
    except (ValueError, KeyError, RuntimeError) as error:
        if jax.process_count() > 1:
            raise TensorMismatchError(
                f"{where}: was saved over devices that are not here; give it a sharding with item or restore_args"
            ) from error
        logger.warning("%s: was saved over devices that are not here, and is restored as a NumPy array", where)
        return ocp.RestoreArgs(restore_type=np.ndarray)
