"""The files in which Orbax keeps what it has to know of arrays. This module writes them, and no other; it parses trees.

Orbax finds the tree of an item in `_METADATA`, shardings in `_sharding`, how arrays are stored in `array_metadatas`,
and strings in `_strings.json`. A step, or an item on its own, has a record in `_CHECKPOINT_METADATA`.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from orbax_safetensors.devices.trees import Path, is_empty, key_name
from orbax_safetensors.errors import StorageError, TensorMismatchError, storage_errors
from orbax_safetensors.orbax_store._compat import InternalTreeMetadata, serialize_step_metadata
from orbax_safetensors.orbax_store.directories import is_on_gcs, names, parse_json, read_json
from orbax_safetensors.orbax_store.discovery import (
    ARRAYS_DIRECTORY,
    FINISHED_FILE,
    STEP_FILE,
    STRINGS_FILE,
    TREE_FILE,
    is_item,
    step_metadata,
)
from orbax_safetensors.orbax_store.index_note import NOTE_FILE
from orbax_safetensors.orbax_store.leaf import ARRAYS, EMPTY_NODES, JAX_ARRAY, RANDOM_KEY, SCALAR, STRING, OrbaxLeaf
from orbax_safetensors.orbax_store.ocdbt import MANIFEST
from orbax_safetensors.orbax_store.shardings import SHARDING_FILE, sharding_file
from orbax_safetensors.storage.local import write_whole

# The handler that restores an item.
HANDLER = ocp.PyTreeCheckpointHandler.typestr()
STEP_FILES = (STEP_FILE, FINISHED_FILE)
# The files and directories of an index, besides the data of the database and `STEP_FILES`.
INDEX_NAMES = (TREE_FILE, SHARDING_FILE, MANIFEST, NOTE_FILE, ARRAYS_DIRECTORY)

# Orbax's numbers of the kinds of nodes: a key is of one of them.
_SEQUENCE, _DICT = 1, 2
# JAX numbers the children of a class that is registered without key paths.
_SEQUENCE_KEYS = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)
_KINDS = (*ARRAYS, SCALAR, STRING)


def item_files(
    nodes: Sequence[tuple[Path, str, Any]],
    *,
    whole: bool = True,
    custom_metadata: Any = None,
    ocdbt: bool = True,
    zarr3: bool = True,
    process_count: int = 1,
) -> dict[str, bytes]:
    """Return the small files of an item by their names, last `_METADATA`, which makes it an item.

    Args:
      nodes: of the tree, as `devices.trees.nodes` returns them, with an `OrbaxLeaf` for every array, and scalars and
        strings, or an `OrbaxLeaf` for a scalar.
      whole: whether all chunks of all arrays are stored. If not, a missing chunk is zeros to Orbax, otherwise an error.
      custom_metadata: JSON of the item.
      ocdbt, zarr3: how arrays are stored.
      process_count: how many processes have written the arrays.
    """
    leaves = {name: leaf for _, name, leaf in nodes if isinstance(leaf, OrbaxLeaf)}
    arrays = {name: leaf for name, leaf in leaves.items() if leaf.kind == JAX_ARRAY}
    strings = {name: leaf for _, name, leaf in nodes if isinstance(leaf, str)}
    files: dict[str, bytes] = {}
    if leaves:
        shardings = {name: leaf.sharding for name, leaf in arrays.items() if leaf.sharding is not None}
        files[SHARDING_FILE] = sharding_file(shardings)
        records = [
            {
                "array_metadata": {
                    "param_name": name,
                    "write_shape": leaf.write_shape or leaf.chunk_shape,
                    "chunk_shape": leaf.chunk_shape,
                    "ext_metadata": {RANDOM_KEY: leaf.random_key} if leaf.random_key else None,
                }
            }
            for name, leaf in arrays.items()
        ]
        for process in range(process_count):
            files[f"{ARRAYS_DIRECTORY}/process_{process}"] = json.dumps({"array_metadatas": records}).encode()
    if strings:
        files[STRINGS_FILE] = _strings_file(strings)
    metadata = {
        "tree_metadata": {str(tuple(map(key_name, path))): _entry(path, leaf) for path, _, leaf in nodes},
        "use_ocdbt": ocdbt,
        "use_zarr3": zarr3,
        "store_array_data_equal_to_fill_value": whole,
        "custom_metadata": custom_metadata,
    }
    return {**files, TREE_FILE: json.dumps(metadata).encode()}


def step_files(custom_metadata: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the small files by which Orbax knows a finished checkpoint, by their names."""
    record = step_record(HANDLER, custom_metadata, time.time_ns())
    return {STEP_FILE: record.encode(), FINISHED_FILE: b"Checkpoint commit was successful"}


def finished_text(path: str | os.PathLike[str]) -> str:
    """Return the content of `FINISHED_FILE` of a checkpoint at `path`, as Orbax writes it."""
    return f"Checkpoint commit was successful to {path}"


def step_record(handlers: str | Mapping[str, str], custom_metadata: Mapping[str, Any] | None, began: int) -> str:
    """Return the content of `STEP_FILE` for a checkpoint that is finished now.

    `handlers` has the `typestr` of the handler of each item by name, or that of an item alone; `began` is a time in
    nanoseconds. Raises `TypeError` or `ValueError` if Orbax cannot record `custom_metadata`.
    """
    metadata = ocp.metadata.StepMetadata(
        item_handlers=handlers if isinstance(handlers, str) else dict(handlers),
        init_timestamp_nsecs=began,
        commit_timestamp_nsecs=time.time_ns(),
        custom_metadata=dict(custom_metadata or {}),
    )
    return json.dumps(serialize_step_metadata(metadata))


def record_in_step(path: str, handler: str, custom_metadata: Mapping[str, Any] | None, *, new: bool) -> None:
    """Record an item, which is finished, in the step that its parent directory is, if it is one.

    A step has a record; with `new`, a number as its name and no directories other than items are enough: without a
    record, it gets one of all its items, with `custom_metadata`, and is finished.
    """
    item = epath.Path(path)
    step = item.parent
    if is_on_gcs(path) and path.count("/") == 2:  # a whole bucket
        return
    with storage_errors(os.fspath(step)):
        record = read_json(step / STEP_FILE)
        if isinstance(record, dict) and isinstance(record.get("item_handlers"), dict):
            record["item_handlers"][item.name] = handler
            _write_in_step(step / STEP_FILE, json.dumps(record))
            return
        items = names(step, directories=True) if new and record is None and step.name.isdecimal() else []
        if not items or not all(is_item(step / name) for name in items):
            return
        handlers = {name: step_metadata(step / name).get("item_handlers", handler) for name in items}
        _write_in_step(step / STEP_FILE, step_record(handlers, custom_metadata, time.time_ns()))
        _write_in_step(step / FINISHED_FILE, finished_text(step))


def _write_in_step(path: epath.Path, text: str) -> None:
    if is_on_gcs(path):
        path.write_text(text)
    else:
        write_whole(os.fspath(path), text)


def begun_record() -> str:
    """Return the content of `STEP_FILE` for a checkpoint that begins now."""
    return json.dumps(serialize_step_metadata(ocp.metadata.StepMetadata(init_timestamp_nsecs=time.time_ns())))


def finished_record(begun: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """Return the content of `STEP_FILE` for a checkpoint that has `begun` with this record and is finished now."""
    return json.dumps({**begun, **metadata, "commit_timestamp_nsecs": time.time_ns()})


def _kind(node: Any) -> str:
    """Return Orbax's name of the kind of a leaf or an empty node; it calls named tuples and other classes None."""
    if isinstance(node, OrbaxLeaf):
        return node.kind
    if isinstance(node, str):
        return STRING
    if not is_empty(node):
        return SCALAR
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return "None"
    kinds = {"List": list, "Tuple": tuple, "Dict": Mapping}
    return next((kind for kind, container in kinds.items() if isinstance(node, container) and not node), "None")


def _entry(path: Sequence[Any], leaf: Any) -> dict[str, Any]:
    """Return what `_METADATA` says of a leaf or an empty node."""
    kind = _kind(leaf)
    value: dict[str, Any] = {"value_type": kind, "skip_deserialize": is_empty(leaf)}
    if kind == JAX_ARRAY:
        value["write_shape"] = leaf.write_shape or leaf.chunk_shape
    keys = [
        {"key": key_name(part), "key_type": _SEQUENCE if isinstance(part, _SEQUENCE_KEYS) else _DICT} for part in path
    ]
    return {"key_metadata": keys, "value_metadata": value}


def _strings_file(strings: Mapping[str, str]) -> bytes:
    """Return the content of `STRINGS_FILE`, in which Orbax finds a string by its name as a JSON pointer."""
    context = ts.Context()
    for name, text in strings.items():
        spec = {"driver": "json", "kvstore": f"memory://{STRINGS_FILE}", "json_pointer": f"/{name}"}
        ts.open(spec, open=True, context=context).result().write(np.asarray(text, object)).result()
    return bytes(ts.KvStore.open("memory://", context=context).result().read(STRINGS_FILE).result().value)


class _Empty(NamedTuple):
    """An empty node of the tree."""

    node: Any


@dataclass(frozen=True)
class RecordedTree:
    """The tree of an item without its arrays.

    Attributes:
      leaves: the kind of each, `jax.Array`, `np.ndarray`, `scalar` or `string`, by key path joined by dots.
      custom_metadata: what the user has saved with the item.
      ocdbt: whether arrays are in Orbax's database; None if a checkpoint of an old Orbax does not say.
      zarr3: whether arrays are in version 3 of Zarr.
      zeros_stored: whether chunks of zeros are stored, so that a chunk that is missing is an error.
    """

    leaves: Mapping[str, str]
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
            leaves: dict[str, str] = {}
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


def _structure(node: Any, name: str | None, leaves: dict[str, str], directory: str) -> Any:
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
    leaves[name] = kind
    return None
