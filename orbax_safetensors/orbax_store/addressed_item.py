"""An item of Orbax whose arrays lie in files that exist already: the addresses of its chunks, and its small files.

Orbax finds the tree of an item in `_METADATA`, shardings in `_sharding`, how arrays are stored in `array_metadatas`,
and the arrays, in Zarr's format 3, in an OCDBT database.
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
# The files and directories of an index, besides the data of the database and `STEP_FILES`.
INDEX_NAMES = (TREE_FILE, SHARDING_FILE, MANIFEST, NOTE_FILE, posixpath.dirname(ARRAYS_FILE))

# A key is the name of an array and the position of a chunk, and has 65,535 bytes at most.
_MAX_NAME_BYTES = 60_000
# The most dimensions of an array of TensorStore.
_MAX_RANK = 32
# Orbax's numbers of the kinds of nodes: a key is of one of them.
_SEQUENCE, _DICT = 1, 2


class AddressedArray(NamedTuple):
    """An array whose chunks lie in files that exist."""

    leaf: OrbaxLeaf
    chunks: Chunks

    @property
    def is_whole(self) -> bool:
        """Return whether all chunks are stored. Chunks of padding are not: they are zeros."""
        return self.chunks.count == prod(self.chunks.grid)


def misread(name: str, shape: tuple[int, ...]) -> str | None:
    """Return why Orbax would not read an array of this name and shape from an index; None if it would."""
    if len(shape) > _MAX_RANK:
        return f"it has {len(shape)} dimensions, and TensorStore, by which Orbax reads, at most {_MAX_RANK}"
    if name.endswith("/"):
        return "its name ends in a slash, which TensorStore leaves out"
    if len(name.encode("utf-8", "surrogateescape")) > _MAX_NAME_BYTES:
        return f"its name is longer than {_MAX_NAME_BYTES} bytes, more than an index can hold"
    return None


def addressed_array(view: View, leaf: OrbaxLeaf, max_chunk_bytes: int, *, zarr3: bool = True) -> AddressedArray | str:
    """Return a view as an array of which no byte has to be moved, or a sentence that says why that cannot be.

    `leaf` describes the array, with its shards as chunks. If possible, no chunk of the result crosses a shard's edge.
    """
    chunks = chunks_in_place(view, leaf.chunk_shape, max_chunk_bytes)
    if isinstance(chunks, str):
        return chunks
    if not zarr3 and list(chunks.order) != sorted(chunks.order):
        return "its dimensions are stored in another order, which Zarr 2 does not know"
    return AddressedArray(replace(leaf, chunk_shape=chunks.shape), chunks)


# Returns the file of a stored tensor, as a path below the index, and the offset at which the tensor begins.
Locate = Callable[[str], tuple[str, int]]


def array_entries(name: str, array: AddressedArray, locate: Locate, *, zarr3: bool = True) -> Iterator[Entry]:
    """Yield the entries of an array in the database: its description, and its chunks by their position in the grid."""
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
    """Yield the entries of a scalar whose value is in the database itself."""
    yield _described(name, OrbaxLeaf((), value.dtype, (), SCALAR), (), zarr3=True)
    yield _chunk_key(name, (), zarr3=True), value.tobytes()


def _chunk_key(name: str, index: tuple[int, ...], *, zarr3: bool) -> bytes:
    key = "/".join(("c", *map(str, index))) if zarr3 else ".".join(map(str, index)) or "0"
    return _below(name, key)


def _below(name: str, key: str) -> bytes:
    """Return a key of an array; an array that is the whole tree has no name."""
    return (f"{name}/{key}" if name else key).encode()


def _described(name: str, leaf: OrbaxLeaf, order: Sequence[int], *, zarr3: bool) -> Entry:
    """Return the description of an array. `order` are the dimensions, slowest in a chunk first."""
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
    """Return the small files of an item by their names, last `_METADATA`, which makes it an item.

    `tree` has an `OrbaxLeaf` for every array and scalar, and may have empty nodes. If all arrays are `whole`, a missing
    chunk is an error to Orbax, otherwise it is zeros.
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
    """Return the small files by which Orbax knows a finished checkpoint, by their names."""
    record = step_record(ocp.PyTreeCheckpointHandler().typestr(), custom_metadata, time.time_ns())
    return {STEP_FILE: record.encode(), FINISHED_FILE: b"Checkpoint commit was successful"}


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, Mapping | list | tuple) and not node)


def _empty_kind(node: Any) -> str:
    """Return Orbax's name of an empty node; it has none for a named tuple."""
    node = {} if isinstance(node, Mapping) else node
    return next((kind for kind, empty in EMPTY_NODES.items() if type(node) is type(empty)), "None")


def _entry(path: Sequence[Any], leaf: Any) -> dict[str, Any]:
    """Return what `_METADATA` says of a leaf or an empty node."""
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
