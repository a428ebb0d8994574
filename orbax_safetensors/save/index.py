"""The index of a save, as `link` writes one, which makes the saved files an Orbax checkpoint.

Stock Orbax then restores the saved tree, with its structure and its shardings, from the files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.devices.trees import Nodes, nodes
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.layout import Layout
from orbax_safetensors.format.names import some
from orbax_safetensors.orbax_store.addressed_array import (
    AddressedArray,
    addressed_array,
    array_entries,
    misread,
)
from orbax_safetensors.orbax_store.index_note import NOTE_FILE, note_content
from orbax_safetensors.orbax_store.leaf import JAX_ARRAY, NUMPY_ARRAY, SCALAR, OrbaxLeaf
from orbax_safetensors.orbax_store.metadata import item_files, readable
from orbax_safetensors.orbax_store.ocdbt import write_references
from orbax_safetensors.save.contents import Contents
from orbax_safetensors.save.request import SaveRequest
from orbax_safetensors.storage.paths import as_text
from orbax_safetensors.transfer.plan import Location

logger = logging.getLogger(__name__)

# Bytes that Orbax restores at once even if it needs only a part of them.
_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class SavedIndex:
    """The index of a save.

    Attributes:
      arrays: of the tree, by name.
      nodes: of the tree, with an `OrbaxLeaf` for each leaf; None if Orbax itself records the tree.
      zarr3: whether the index describes arrays in version 3 of Zarr.
      names_tensors: whether arrays have the names of the stored tensors.
      saved: the family and the variant, as for `orbax_store.index_note.note_content`.
    """

    arrays: Mapping[str, AddressedArray]
    nodes: Nodes | None
    zarr3: bool
    names_tensors: bool
    saved: Mapping[str, Any] | None

    def write(
        self,
        layout: Layout,
        locations: Mapping[str, Location],
        write: Callable[[str, bytes], None],
    ) -> None:
        """Call `write` with the name and the content of every file, the one that makes it a checkpoint last.

        `locations` say where tensors lie in the files of `layout`.
        """
        whole = all(array.is_whole for array in self.arrays.values())
        small = {} if self.nodes is None else item_files(self.nodes, whole=whole)
        write(NOTE_FILE, note_content(layout.fingerprints, self.names_tensors, small, saved=self.saved))
        files = [name for name, _ in layout.files]
        write_references(array_entries(self.arrays, locations.__getitem__, files, zarr3=self.zarr3), write)
        for name, content in small.items():
            write(name, content)


def saved_index(request: SaveRequest, contents: Contents) -> SavedIndex | None:
    """Return the index of what a save stores.

    Without a possible index, return None, or raise `TensorMismatchError` if the caller requires one.
    """
    if request.index is False:
        return None
    use = contents.model_files.use
    saved = use._asdict()
    try:
        json.dumps(saved)
    except (TypeError, ValueError, RecursionError) as error:
        _leave_out(request, f"its variant {use.variant!r:.200} cannot be recorded: {error}")
        return None
    tree = nodes(request.item)
    recorded = readable(tree) if request.whole_tree else None
    if isinstance(recorded, str):
        _leave_out(request, recorded)
        return None
    values = {name: node for _, name, node in tree}
    arrays: dict[str, AddressedArray] = {}
    reasons = {}
    for leaf in contents.leaves:
        view = leaf.view if leaf.view.dtype == leaf.dtype else replace(leaf.view, dtype=leaf.dtype)
        array = misread(leaf.name, leaf.shape) or addressed_array(
            view, _orbax_leaf(leaf, values[leaf.name]), _CHUNK_BYTES, zarr3=request.zarr3
        )
        if isinstance(array, str):
            reasons[leaf.name] = array
        else:
            arrays[leaf.name] = array
    if reasons:
        name, reason = next(iter(reasons.items()))
        _leave_out(request, f"{some(list(reasons))} cannot be found in the files as they are: {name!r}: {reason}")
        return None
    return SavedIndex(
        arrays,
        recorded and [(path, name, _recorded(node, arrays.get(name))) for path, name, node in recorded],
        request.zarr3,
        names_tensors=use.family is None and arrays.keys() <= contents.tensors.keys(),
        saved=saved if request.whole_tree else None,
    )


def _recorded(node: Any, array: AddressedArray | None) -> Any:
    """Return what the index has in the place of a node; Orbax has None for a placeholder."""
    if array is not None:
        return array.leaf
    return None if node is ocp.PLACEHOLDER else node


def _leave_out(request: SaveRequest, reason: str) -> None:
    path = as_text(request.path)
    if request.index:
        raise TensorMismatchError(f"{path}: Orbax cannot read this save, as index=True requires: {reason}")
    logger.info("%s: is saved without an index for Orbax: %s", path, reason)


def _orbax_leaf(leaf: Leaf, value: Any) -> OrbaxLeaf:
    """Return the leaf that Orbax restores, with shards as chunks; `value` is the leaf of the caller's tree."""
    if not isinstance(leaf.value, jax.Array):
        kind = NUMPY_ARRAY if isinstance(value, np.ndarray) else SCALAR
        return OrbaxLeaf(leaf.shape, leaf.dtype, leaf.shape, kind)
    sharding = leaf.value.sharding
    chunk_shape = sharding.shard_shape(leaf.shape)
    return OrbaxLeaf(leaf.shape, leaf.dtype, chunk_shape, JAX_ARRAY, sharding=_sharding(sharding))


def shardings_of(contents: Contents) -> dict[str, ocp.metadata.ShardingMetadata]:
    """Return the records of the shardings of arrays, by name, as far as Orbax knows their kinds."""
    shardings = {
        leaf.name: _sharding(leaf.value.sharding) for leaf in contents.leaves if isinstance(leaf.value, jax.Array)
    }
    return {name: sharding for name, sharding in shardings.items() if sharding is not None}


@lru_cache
def _sharding(sharding: jax.sharding.Sharding) -> ocp.metadata.ShardingMetadata | None:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding)
    return None
