"""Arrays of Orbax that lie in files that exist already: their entries in an OCDBT database, which address chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors.geometry.addresses import Chunks, chunks_in_place
from orbax_safetensors.geometry.view import View
from orbax_safetensors.orbax_store.leaf import SCALAR, OrbaxLeaf
from orbax_safetensors.orbax_store.ocdbt import DataReference, Entry
from orbax_safetensors.transfer.plan import Location

# A key is the name of an array and the position of a chunk, and has 65,535 bytes at most.
_MAX_NAME_BYTES = 60_000
# The most dimensions of an array of TensorStore.
_MAX_RANK = 32


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


def array_entries(
    arrays: Mapping[str, AddressedArray],
    location: Callable[[str], Location],
    files: Sequence[str],
    *,
    zarr3: bool = True,
) -> Iterator[Entry]:
    """Yield the entries of arrays in the database: descriptions, and chunks by their positions in the grids.

    `location` says where a stored tensor lies in `files`, which are paths below the index.
    """
    for name, (leaf, chunks) in arrays.items():
        yield _array_metadata(name, leaf, chunks.order, zarr3=zarr3)
        nbytes = chunks.nbytes
        for box in chunks.addresses():
            stored = location(box.tensor)
            at = stored.begin + box.offsets * leaf.dtype.itemsize
            grid = product(*(range(first, first + size) for first, size in zip(box.first, at.shape, strict=True)))
            for index, offset in zip(grid, at.reshape(-1).tolist(), strict=True):
                yield _chunk_key(name, index, zarr3=zarr3), DataReference(files[stored.file], offset, nbytes)


def scalar_entries(name: str, value: np.ndarray) -> Iterator[Entry]:
    """Yield the entries of a scalar whose value is in the database itself."""
    yield _array_metadata(name, OrbaxLeaf((), value.dtype, (), SCALAR), (), zarr3=True)
    yield _chunk_key(name, (), zarr3=True), value.tobytes()


def _chunk_key(name: str, index: tuple[int, ...], *, zarr3: bool) -> bytes:
    key = "/".join(("c", *map(str, index))) if zarr3 else ".".join(map(str, index)) or "0"
    return _below(name, key)


def _below(name: str, key: str) -> bytes:
    """Return a key of an array; an array that is the whole tree has no name."""
    return (f"{name}/{key}" if name else key).encode()


def _array_metadata(name: str, leaf: OrbaxLeaf, order: Sequence[int], *, zarr3: bool) -> Entry:
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
