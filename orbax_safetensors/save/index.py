"""The index of a save, as `link` writes one, which makes the saved files an Orbax checkpoint.

Stock Orbax then restores the saved tree, with its structure and its shardings, from the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.devices.trees import flatten
from orbax_safetensors.format.layout import Layout
from orbax_safetensors.format.names import some
from orbax_safetensors.mapping.family import FamilyUse
from orbax_safetensors.orbax_store.addressed_item import (
    AddressedArray,
    addressed_array,
    array_entries,
    item_files,
    misread,
)
from orbax_safetensors.orbax_store.index_note import NOTE_FILE, fingerprints, note_content
from orbax_safetensors.orbax_store.leaf import JAX_ARRAY, NUMPY_ARRAY, SCALAR, OrbaxLeaf
from orbax_safetensors.orbax_store.ocdbt import Entry, write_references
from orbax_safetensors.orbax_store.shardings import add_shardings
from orbax_safetensors.transfer.plan import Location

# Bytes that Orbax restores at once even if it needs only a part of them.
_CHUNK_BYTES = 16 * 2**20


class IndexAs(NamedTuple):
    """Which index a save writes.

    Attributes:
      wanted: True for an index or an error, None for an index if one is possible, False for none.
      zarr3: whether the index describes arrays in version 3 of Zarr.
      whole_tree: whether the index holds the tree; otherwise Orbax itself writes the tree.
    """

    wanted: bool | None = None
    zarr3: bool = True
    whole_tree: bool = True


NO_INDEX = IndexAs(False)


@dataclass(frozen=True)
class SavedIndex:
    """The index of a save.

    Attributes:
      arrays: of the tree, by name.
      tree: with an `OrbaxLeaf` for each leaf; None if Orbax itself records the tree.
      zarr3: whether the index describes arrays in version 3 of Zarr.
      names_tensors: whether arrays have the names of the stored tensors.
      saved: the family and the variant, as for `orbax_store.index_note.note_content`.
    """

    arrays: Mapping[str, AddressedArray]
    tree: Any
    layout: Layout
    places: Mapping[str, Location]
    zarr3: bool
    names_tensors: bool
    saved: Mapping[str, Any] | None

    def write(self, directory: str, write: Callable[[str, bytes], None]) -> None:
        """Call `write` with the name and the content of every file, the one that makes it a checkpoint last.

        If Orbax itself records the tree, add the shardings of `arrays` to Orbax's file of shardings in `directory`.
        """
        whole = all(array.is_whole for array in self.arrays.values())
        small = {} if self.tree is None else item_files(self.tree, whole=whole)
        write(NOTE_FILE, note_content(fingerprints(self.layout), self.names_tensors, small, saved=self.saved))
        write_references(self._entries(), write)
        if self.tree is None:
            add_shardings(directory, {name: array.leaf for name, array in self.arrays.items()})
        for name, content in small.items():
            write(name, content)

    def _entries(self) -> Iterator[Entry]:
        for name, array in self.arrays.items():
            yield from array_entries(name, array, self._locate, zarr3=self.zarr3)

    def _locate(self, tensor: str) -> tuple[str, int]:
        location = self.places[tensor]
        return self.layout.files[location.file][0], location.begin


def saved_index(
    item: Any,
    leaves: Sequence[Leaf],
    layout: Layout,
    places: Mapping[str, Location],
    *,
    use: FamilyUse,
    zarr3: bool = True,
    whole_tree: bool = True,
) -> SavedIndex | str:
    """Return the index of the tree `item`, which has these `leaves`, or the reason why it cannot have one."""
    saved = use._asdict()
    try:
        json.dumps(saved)
    except (TypeError, ValueError, RecursionError) as error:
        return f"its variant {use.variant!r:.200} cannot be recorded: {error}"
    structure, values = flatten(item)
    arrays: dict[str, AddressedArray] = {}
    reasons = {}
    for leaf in leaves:
        view = leaf.view if leaf.view.dtype == leaf.dtype else replace(leaf.view, dtype=leaf.dtype)
        array = misread(leaf.name, leaf.shape) or addressed_array(
            view, _leaf(leaf, _kind(values[leaf.name])), _CHUNK_BYTES, zarr3=zarr3
        )
        if isinstance(array, str):
            reasons[leaf.name] = array
        else:
            arrays[leaf.name] = array
    if reasons:
        name, reason = next(iter(reasons.items()))
        return f"{some(list(reasons))} cannot be found in the files as they are: {name!r}: {reason}"
    names_tensors = use.family is None and arrays.keys() <= places.keys()
    tree = jax.tree.unflatten(structure, [arrays[name].leaf for name in values]) if whole_tree else None
    return SavedIndex(arrays, tree, layout, places, zarr3, names_tensors, saved if whole_tree else None)


def _kind(leaf: Any) -> str:
    """Return the kind of leaf that Orbax restores."""
    if isinstance(leaf, jax.Array):
        return JAX_ARRAY
    return NUMPY_ARRAY if isinstance(leaf, np.ndarray) else SCALAR


def _leaf(leaf: Leaf, kind: str) -> OrbaxLeaf:
    """Return a leaf with its shards as chunks."""
    if not isinstance(leaf.value, jax.Array):
        return OrbaxLeaf(leaf.shape, leaf.dtype, leaf.shape, kind)
    sharding = leaf.value.sharding
    return OrbaxLeaf(leaf.shape, leaf.dtype, sharding.shard_shape(leaf.shape), kind, sharding=_recorded(sharding))


def _recorded(sharding: jax.sharding.Sharding) -> ocp.metadata.ShardingMetadata | None:
    """Return a sharding as Orbax records it; None for a kind of sharding that Orbax does not know."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding)
    return None
