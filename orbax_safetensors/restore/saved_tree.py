"""The tree of a save, as its index records it: the result of a restore without `item` and `restore_args`."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.family import FamilyLike, mapped
from orbax_safetensors.errors import MappingError, TensorMismatchError
from orbax_safetensors.format.names import by_path
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping import registry
from orbax_safetensors.mapping.family import Family, switches_of
from orbax_safetensors.options import Dequantize
from orbax_safetensors.orbax_store.discovery import TREE_FILE
from orbax_safetensors.orbax_store.index_note import read_note
from orbax_safetensors.orbax_store.leaf import JAX_ARRAY, SCALAR
from orbax_safetensors.orbax_store.metadata import RecordedTree
from orbax_safetensors.orbax_store.shardings import SHARDING_FILE, parse_shardings
from orbax_safetensors.restore.match import args_of, spelled
from orbax_safetensors.restore.request import ShardingOf
from orbax_safetensors.storage.store import find_small

logger = logging.getLogger(__name__)

# The most bytes to read of a file in which Orbax records a tree; it writes fewer.
_MAX_BYTES = 2**30

_SCALARS = {"b": bool, "i": int, "u": int, "f": float}


class SavedLeaf(NamedTuple):
    """A leaf that a restore without a tree returns.

    Attributes:
      name: its path in the tree, joined by dots.
      path: its name in the checkpoint, which may spell it differently.
      kind: `jax.Array`, `np.ndarray`, or the type of a scalar.
      sharding: of a `jax.Array`, as it was recorded.
    """

    name: str
    path: str
    view: View
    kind: type
    sharding: ocp.metadata.ShardingMetadata | None

    def restore_args(self, where: str, sharding_of: ShardingOf | None) -> ocp.RestoreArgs:
        """Return what restores the leaf as it was saved, or as `sharding_of` says; `where` begins messages."""
        if sharding_of is not None and self.kind in (jax.Array, np.ndarray):
            return args_of(sharding_of, self.path, self.view.shape)
        if self.kind is jax.Array:
            return _array(self.sharding, f"{where}: {self.name!r}")
        return ocp.RestoreArgs(restore_type=self.kind)


@dataclass(frozen=True)
class SavedTree:
    """The tree that a restore without a tree returns: the one that was saved, or all leaves of the checkpoint.

    Attributes:
      checkpoint: as the family of the save sees it, or that of the caller.
      recorded: the tree of the save; None if it is not recorded.
      complete: whether it is an error that the checkpoint lacks leaves of it; otherwise these are placeholders.
    """

    checkpoint: Checkpoint
    recorded: RecordedTree | None
    complete: bool
    _shardings: Mapping[str, ocp.metadata.ShardingMetadata]

    @property
    def fits(self) -> bool:
        """Return whether the checkpoint has all leaves of the recorded tree."""
        leaves, recorded = self.checkpoint.leaves, self.recorded
        return recorded is None or by_path(recorded.leaves, leaves).keys() <= leaves.keys()

    def map(self, leaf: Callable[[SavedLeaf], Any]) -> Any:
        """Return the tree with `leaf(...)` for its leaves, and with its empty nodes.

        Raises `TensorMismatchError` if `complete` and the checkpoint lacks a leaf of the recorded tree.
        """
        recorded = self.recorded
        if recorded is None:
            return self.checkpoint.tree(lambda name, view: leaf(SavedLeaf(name, name, view, np.ndarray, None)))
        views, named = self.checkpoint.leaves, {name: name for name in recorded.leaves}
        paths = {name: path for path, name in spelled(self.checkpoint, named).items()}

        def of_name(name: str) -> Any:
            if paths[name] not in views:
                if not self.complete:
                    return ocp.PLACEHOLDER
                raise TensorMismatchError(f"{self.checkpoint.path}: the tree was saved with {name!r}, which is missing")
            kind, view = recorded.leaves[name], views[paths[name]]
            scalar = _SCALARS.get(view.dtype.kind, np.ndarray) if kind == SCALAR else np.ndarray
            found = jax.Array if kind == JAX_ARRAY else scalar
            return leaf(SavedLeaf(name, paths[name], view, found, self._shardings.get(name)))

        return recorded.map(of_name)


def saved_tree(
    stored: Checkpoint, family: FamilyLike, variant: Mapping[str, Any] | None, *, complete: bool, dequantize: Dequantize
) -> SavedTree:
    """Return the tree that a checkpoint was saved as.

    It is all leaves of the checkpoint if no tree is recorded, or if another family or variant is requested; `complete`
    and `dequantize` are as for `mapped`. Raises `StorageError` if the files are no longer those that were saved.
    """
    found = _recorded(stored, family, variant, complete=complete)
    if found is not None:
        tree, saved_family, saved_variant = found
        shardings = parse_shardings(_read_beside(stored, SHARDING_FILE), stored.path)
        checkpoint = mapped(stored, saved_family, saved_variant, complete=complete, dequantize=dequantize)
        saved = SavedTree(checkpoint, RecordedTree.parse(tree, stored.path), complete, shardings)
        # A family of the caller's may be another of the same name.
        if not complete or not isinstance(saved_family, Family) or saved.fits:
            return saved
    return SavedTree(mapped(stored, family, variant, complete=complete, dequantize=dequantize), None, complete, {})


def _recorded(
    checkpoint: Checkpoint, family: FamilyLike, variant: Mapping[str, Any] | None, *, complete: bool
) -> tuple[bytes, Family | str, Mapping[str, Any]] | None:
    """Return the content of `TREE_FILE`, and the family or its name, and the variant: `identity` if the save had none.

    Unless `complete`, files of the save may be missing.
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
    for fault in note.changed(checkpoint.path, checkpoint.fingerprints, partial=not complete):
        raise fault
    return tree, family if isinstance(family, Family) else saved_family, saved_variant


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
                f"{where}: was saved over devices that are not here; pass a mesh, as ost.load(path, mesh) or "
                "ost.SafetensorsRestore(mesh), or a sharding for each array"
            ) from error
        logger.warning("%s: was saved over devices that are not here, and is restored as a NumPy array", where)
        return ocp.RestoreArgs(restore_type=np.ndarray)
