"""An item of Orbax whose arrays lie in files that are there already: what is written besides these files.

Orbax finds the tree of an item in `_METADATA`, shardings in `_sharding`, how arrays are stored in `array_metadatas`,
and the arrays themselves, in Zarr's format 3, in an OCDBT database.
"""

from __future__ import annotations

import json
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.geometry.addresses import Chunks, chunks_in_place
from orbax_safetensors.geometry.view import View
from orbax_safetensors.orbax_store.discovery import FINISHED_FILE, STEP_FILE, TREE_FILE, step_record
from orbax_safetensors.orbax_store.index_note import NOTE_FILE
from orbax_safetensors.orbax_store.leaf import EMPTY_NODES, JAX_ARRAY, RANDOM_KEY, SCALAR, OrbaxLeaf
from orbax_safetensors.orbax_store.ocdbt import MANIFEST, Entry, Range
from orbax_safetensors.orbax_store.shardings import SHARDING_FILE, sharding_file

ARRAYS_FILE = "array_metadatas/process_0"
STEP_FILES = (STEP_FILE, FINISHED_FILE)
# What an index consists of in a directory, besides the data of the database and `STEP_FILES`.
INDEX_NAMES = (TREE_FILE, SHARDING_FILE, MANIFEST, NOTE_FILE, posixpath.dirname(ARRAYS_FILE))

# A key, of 65,535 bytes at most, is the name of an array and the position of a chunk.
_MAX_NAME_BYTES = 60_000
# Orbax's numbers of the kinds of nodes that a key may be of.
_SEQUENCE, _DICT = 1, 2


class AddressedArray(NamedTuple):
    """An array whose chunks lie in files that are there."""

    leaf: OrbaxLeaf
    chunks: Chunks

    @property
    def is_whole(self) -> bool:
        """Whether all chunks are stored. Those of padding are not, and are zeros."""
        return self.chunks.count == prod(self.chunks.grid)


def misread(name: str) -> str | None:
    """Why an array of this name would not be found in an index by its name; None if it would."""
    if name.endswith("/"):
        return "its name ends in a slash, which TensorStore leaves out"
    if len(name.encode("utf-8", "surrogateescape")) > _MAX_NAME_BYTES:
        return f"its name is longer than {_MAX_NAME_BYTES} bytes, more than an index can hold"
    return None


def addressed_array(view: View, leaf: OrbaxLeaf, max_chunk_bytes: int, *, zarr3: bool = True) -> AddressedArray | str:
    """Describe a view as an array of which nothing has to be moved; if that cannot be, a sentence says why.

    `leaf` describes the array. Its chunks are the shards, and those of the result do not cross their edges if possible.
    """
    found = chunks_in_place(view, leaf.chunk_shape, max_chunk_bytes)
    if isinstance(found, str):
        return found
    if not zarr3 and list(found.order) != sorted(found.order):
        return "its dimensions are stored in another order, which Zarr 2 does not know"
    return AddressedArray(replace(leaf, chunk_shape=found.shape), found)


# Finds the file of a stored tensor, by its path below the index, and the offset at which the tensor begins there.
Locate = Callable[[str], tuple[str, int]]


def array_entries(name: str, array: AddressedArray, locate: Locate, *, zarr3: bool = True) -> Iterator[Entry]:
    """What the database has of an array: its description, and its chunks by their position in the grid."""
    leaf, chunks = array
    yield _described(name, leaf, chunks.order, zarr3=zarr3)
    nbytes = chunks.nbytes
    for place in chunks.places():
        file, begin = locate(place.tensor)
        at = begin + place.offsets * leaf.dtype.itemsize
        grid = product(*(range(first, first + size) for first, size in zip(place.first, at.shape, strict=True)))
        for index, offset in zip(grid, at.reshape(-1).tolist(), strict=True):
            yield _chunk_key(name, index, zarr3=zarr3), Range(file, offset, nbytes)


def scalar_entries(name: str, value: np.ndarray) -> Iterator[Entry]:
    """What the database has of a scalar that is nowhere else."""
    yield _described(name, OrbaxLeaf((), value.dtype, (), SCALAR), (), zarr3=True)
    yield _chunk_key(name, (), zarr3=True), value.tobytes()


def _chunk_key(name: str, index: tuple[int, ...], *, zarr3: bool) -> bytes:
    key = "/".join(("c", *map(str, index))) if zarr3 else ".".join(map(str, index)) or "0"
    return _below(name, key)


def _below(name: str, key: str) -> bytes:
    """A key of an array; the tree may be an array itself, and has no name then."""
    return (f"{name}/{key}" if name else key).encode()


def _described(name: str, leaf: OrbaxLeaf, order: Sequence[int], *, zarr3: bool) -> Entry:
    """The description of an array. `order` are the dimensions, slowest in a chunk first."""
    if not zarr3:
        native = np.dtype(leaf.dtype.type)
        dtype = native.str if native.isbuiltin == 1 else native.name  # Zarr 2 knows NumPy's, TensorStore the others
        metadata = {
            "zarr_format": 2,
            "shape": leaf.shape,
            "chunks": leaf.chunk_shape,
            "dtype": dtype,
            "fill_value": None,
            "order": "C",
            "filters": None,
            "compressor": None,
            "dimension_separator": ".",
        }
        return _below(name, ".zarray"), json.dumps(metadata).encode()
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if list(order) != sorted(order):
        codecs.insert(0, {"name": "transpose", "configuration": {"order": list(order)}})
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": leaf.shape,
        "data_type": leaf.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": leaf.chunk_shape}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": _zero(leaf.dtype),
        "codecs": codecs,
    }
    return _below(name, "zarr.json"), json.dumps(metadata).encode()


def _zero(dtype: np.dtype) -> Any:
    zero = np.zeros((), dtype)
    if dtype.kind == "c":
        return [0.0, 0.0]
    return zero.item() if dtype.kind in "bui" else 0.0


def item_files(tree: Any, *, whole: bool) -> dict[str, bytes]:
    """The small files of an item by their names; `_METADATA`, which makes it one, is the last.

    `tree` has an `OrbaxLeaf` for every array and scalar. Empty nodes of it are noted, too. Unless all arrays are
    `whole`, Orbax takes chunks that are missing for zeros; otherwise for an error.
    """
    named = [
        (path, jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty)
    ]
    leaves = {name: leaf for _, name, leaf in named if isinstance(leaf, OrbaxLeaf)}
    arrays = [
        {
            "array_metadata": {
                "param_name": name,
                "write_shape": leaf.chunk_shape,
                "chunk_shape": leaf.chunk_shape,
                "ext_metadata": {RANDOM_KEY: leaf.random_key} if leaf.random_key else None,
            }
        }
        for name, leaf in leaves.items()
        if leaf.kind == JAX_ARRAY
    ]
    metadata = {
        "tree_metadata": {str(tuple(_key(part) for part in path)): _entry(path, leaf) for path, _, leaf in named},
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": whole,
        "custom_metadata": None,
    }
    return {
        SHARDING_FILE: sharding_file(leaves),
        ARRAYS_FILE: json.dumps({"array_metadatas": arrays}).encode(),
        TREE_FILE: json.dumps(metadata).encode(),
    }


def step_files(custom_metadata: Mapping[str, Any] | None) -> dict[str, bytes]:
    """The small files by which Orbax knows a checkpoint that is finished, by their names."""
    record = step_record(ocp.PyTreeCheckpointHandler().typestr(), custom_metadata, time.time_ns())
    return {STEP_FILE: record.encode(), FINISHED_FILE: b"Checkpoint commit was successful"}


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, Mapping | list | tuple) and not node)


def _empty_kind(node: Any) -> str:
    """Return Orbax's name of an empty node; it has none for a named tuple."""
    node = {} if isinstance(node, Mapping) else node
    return next((kind for kind, empty in EMPTY_NODES.items() if type(node) is type(empty)), "None")


def _entry(path: Sequence[Any], leaf: Any) -> dict[str, Any]:
    """What `_METADATA` says of a leaf or an empty node."""
    kind = leaf.kind if isinstance(leaf, OrbaxLeaf) else _empty_kind(leaf)
    value: dict[str, Any] = {"value_type": kind, "skip_deserialize": not isinstance(leaf, OrbaxLeaf)}
    if kind == JAX_ARRAY:
        value["write_shape"] = leaf.chunk_shape
    keys = [
        {"key": _key(part), "key_type": _SEQUENCE if isinstance(part, jax.tree_util.SequenceKey) else _DICT}
        for part in path
    ]
    return {"key_metadata": keys, "value_metadata": value}


def _key(part: Any) -> str:
    return jax.tree_util.keystr((part,), simple=True)
