"""An item of Orbax whose arrays lie in files that are there already: what is written besides these files.

Orbax finds the tree of an item in `_METADATA`, shardings in `_sharding`, how arrays are stored in `array_metadatas`,
and the arrays themselves, in Zarr's format 3, in an OCDBT database.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.orbax_store.finding import FINISHED_FILE, STEP_FILE, TREE_FILE
from orbax_safetensors.orbax_store.leaves import JAX_ARRAY, RANDOM_KEY, OrbaxLeaf
from orbax_safetensors.orbax_store.ocdbt import Entry, Range

SHARDING_FILE = "_sharding"
ARRAYS_FILE = "array_metadatas/process_0"
STEP_FILES = (STEP_FILE, FINISHED_FILE)

# Orbax's numbers of the kinds of nodes that a key may be of.
_SEQUENCE, _DICT = 1, 2
# Orbax's names of empty nodes.
_EMPTY = {dict: "Dict", list: "List", tuple: "Tuple", type(None): "None"}


def entries(
    name: str, leaf: OrbaxLeaf, order: Sequence[int], chunks: Iterable[tuple[tuple[int, ...], bytes | Range]]
) -> Iterator[Entry]:
    """What the database has of one array: its description, and its chunks by their position in the grid.

    `order` are the dimensions, slowest in a chunk first. Chunks that are left out are zeros.
    """
    yield f"{name}/zarr.json".encode(), json.dumps(_description(leaf, order)).encode()
    for index, chunk in chunks:
        yield "/".join((name, "c", *map(str, index))).encode(), chunk


def _description(leaf: OrbaxLeaf, order: Sequence[int]) -> dict[str, Any]:
    """The `zarr.json` of an array."""
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if list(order) != sorted(order):
        codecs.insert(0, {"name": "transpose", "configuration": {"order": list(order)}})
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": leaf.shape,
        "data_type": leaf.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": leaf.chunk_shape}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": _zero(leaf.dtype),
        "codecs": codecs,
    }


def _zero(dtype: np.dtype) -> Any:
    zero = np.zeros((), dtype)
    if dtype.kind == "c":
        return [0.0, 0.0]
    return zero.item() if dtype.kind in "bui" else 0.0


def item_files(tree: Any, custom_metadata: Any = None) -> dict[str, bytes]:
    """The small files of an item by their names; `_METADATA`, which makes it one, is the last.

    `tree` has an `OrbaxLeaf` for every array and scalar. Empty nodes of it are noted, too.
    """
    named = [
        (path, jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty)
    ]
    shardings = {
        base64.b64encode(name.encode()).decode(): leaf.sharding.to_serialized_string()
        for _, name, leaf in named
        if isinstance(leaf, OrbaxLeaf) and leaf.sharding is not None
    }
    arrays = [
        {
            "array_metadata": {
                "param_name": name,
                "write_shape": leaf.chunk_shape,
                "chunk_shape": leaf.chunk_shape,
                "ext_metadata": {RANDOM_KEY: leaf.random_key} if leaf.random_key else None,
            }
        }
        for _, name, leaf in named
        if isinstance(leaf, OrbaxLeaf) and leaf.kind == JAX_ARRAY
    ]
    metadata = {
        "tree_metadata": {str(tuple(_key(part) for part in path)): _entry(path, leaf) for path, _, leaf in named},
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": custom_metadata,
    }
    return {
        SHARDING_FILE: json.dumps(shardings).encode(),
        ARRAYS_FILE: json.dumps({"array_metadatas": arrays}).encode(),
        TREE_FILE: json.dumps(metadata).encode(),
    }


def step_files(custom_metadata: Mapping[str, Any] | None) -> dict[str, bytes]:
    """The small files by which Orbax knows a checkpoint that is finished, by their names."""
    now = time.time_ns()
    metadata = {
        "item_handlers": ocp.PyTreeCheckpointHandler().typestr(),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": custom_metadata or {},
    }
    return {STEP_FILE: json.dumps(metadata).encode(), FINISHED_FILE: b"Checkpoint commit was successful"}


def _is_empty(node: Any) -> bool:
    return type(node) in _EMPTY and not node


def _entry(path: Sequence[Any], leaf: Any) -> dict[str, Any]:
    """What `_METADATA` says of a leaf or an empty node."""
    kind = leaf.kind if isinstance(leaf, OrbaxLeaf) else _EMPTY[type(leaf)]
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
