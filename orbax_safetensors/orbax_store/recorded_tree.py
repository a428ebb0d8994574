"""The file `_METADATA` of an item, in which Orbax records its tree without the arrays: parsed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.orbax_store._compat import InternalTreeMetadata
from orbax_safetensors.orbax_store.directories import parse_json
from orbax_safetensors.orbax_store.discovery import TREE_FILE
from orbax_safetensors.orbax_store.leaf import ARRAYS, EMPTY_NODES, SCALAR, STRING
from orbax_safetensors.orbax_store.operations import storage_errors

_KINDS = (*ARRAYS, SCALAR, STRING)


class RecordedLeaf(NamedTuple):
    """A leaf that is not empty.

    Attributes:
      kind: `jax.Array`, `np.ndarray`, `scalar` or `string`.
      write_shape: the shape of the shards that were written, if it is recorded.
    """

    kind: str
    write_shape: tuple[int, ...] | None


class _Empty(NamedTuple):
    """An empty node of the tree."""

    node: Any


@dataclass(frozen=True)
class RecordedTree:
    """The tree of an item without its arrays.

    Attributes:
      leaves: by key path, joined by dots.
      custom_metadata: what the user has saved with the item.
      ocdbt: whether arrays are in Orbax's database; None if a checkpoint of an old Orbax does not say.
      zarr3: whether arrays are in version 3 of Zarr.
      zeros_stored: whether chunks of zeros are stored, so that a chunk that is missing is an error.
    """

    leaves: Mapping[str, RecordedLeaf]
    custom_metadata: Any
    ocdbt: bool | None
    zarr3: bool
    zeros_stored: bool
    _structure: Any = field(repr=False)

    @classmethod
    def parse(cls, content: bytes | None, directory: str) -> RecordedTree:
        """Parse the content of `TREE_FILE` in a directory.

        Raises `StorageError` if it is not what Orbax writes, and `TensorMismatchError` if a leaf is of a kind that is
        not known here or two leaves have the same name.
        """
        path = f"{directory}/{TREE_FILE}"
        if content is None:
            raise StorageError(f"{path}: is missing")
        document = parse_json(content, path)
        with storage_errors(f"{path}: is not what Orbax writes"):
            metadata = InternalTreeMetadata.from_json(document)
            leaves: dict[str, RecordedLeaf] = {}
            structure = _structure(metadata.as_nested_tree(), None, leaves, directory)
        return cls(
            leaves,
            metadata.custom_metadata,
            metadata.use_ocdbt,
            bool(metadata.use_zarr3),
            metadata.store_array_data_equal_to_fill_value,
            structure,
        )

    def map(self, leaf: Callable[[str], Any]) -> Any:
        """Return the tree of dicts and lists with `leaf(name)` for its leaves, and with its empty nodes."""
        return _mapped(self._structure, None, leaf)


def _mapped(node: Any, name: str | None, leaf: Callable[[str], Any]) -> Any:
    below = "" if name is None else f"{name}."
    if isinstance(node, _Empty):
        return copy.copy(node.node)
    if isinstance(node, dict):
        return {key: _mapped(child, f"{below}{key}", leaf) for key, child in node.items()}
    if isinstance(node, list):
        return [_mapped(child, f"{below}{number}", leaf) for number, child in enumerate(node)]
    return leaf(name or "")


def _structure(node: Any, name: str | None, leaves: dict[str, RecordedLeaf], directory: str) -> Any:
    """Return a tree of dicts and lists with None for leaves and `_Empty` for empty nodes, and add its leaves by name.

    The root has no name; the name of a leaf may be empty.
    """
    below = "" if name is None else f"{name}."
    if isinstance(node, dict):
        return {key: _structure(child, f"{below}{key}", leaves, directory) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return [_structure(child, f"{below}{number}", leaves, directory) for number, child in enumerate(node)]
    name = name or ""
    kind = getattr(node, "value_type", None)
    if isinstance(kind, str) and kind in EMPTY_NODES:
        return _Empty(EMPTY_NODES[kind])
    if kind not in _KINDS or node.skip_deserialize:
        raise TensorMismatchError(
            f"{directory}: {name!r}: is a leaf of kind {kind!r}, which only what has written it can read; known are "
            f"{', '.join(_KINDS)} and empty nodes"
        )
    if name in leaves:
        raise TensorMismatchError(f"{directory}: two leaves of the tree have the name {name!r}")
    leaves[name] = RecordedLeaf(kind, None if node.write_shape is None else tuple(node.write_shape))
    return None
