"""How a tree is stored as a checkpoint of Orbax: checked, and in the chunks that Orbax makes. Nothing is touched."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from orbax_safetensors import trees
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.orbax_store.draft import Draft
from orbax_safetensors.orbax_store.handlers import streamed, write_spec
from orbax_safetensors.orbax_store.leaves import ARRAYS, OrbaxLeaf
from orbax_safetensors.orbax_store.places import absolute

# What Orbax adds to the name of a directory that is not finished.
_UNFINISHED = ocp.path.atomicity.TMP_DIR_SUFFIX


class OrbaxLayout:
    """What `OrbaxSink` writes.

    Attributes:
      path: the directory of the step, or its URL.
      draft: it while it is unfinished.
      leaves: the arrays by name, with the chunks that are written.
      tree: what Orbax itself is given to save, with something for each array that stands for it.
      specs, context: what TensorStore makes each array with.
    """

    def __init__(
        self,
        destination: str | os.PathLike[str],
        tree: Any,
        *,
        step: int,
        item: str,
        custom_metadata: Mapping[str, Any] | None,
        tree_custom_metadata: Any,
        ocdbt: bool,
        zarr3: bool,
        compression: bool,
        fsync: bool = True,
    ) -> None:
        """Arguments and errors are those of `OrbaxSink`."""
        destination = absolute(destination)
        self.path = os.path.join(destination, str(step))
        self.custom_metadata = dict(custom_metadata) if isinstance(custom_metadata, Mapping) else custom_metadata
        self.tree_custom_metadata = tree_custom_metadata
        self.compression = compression
        self._settings = {"ocdbt": ocdbt, "zarr3": zarr3, "compression": compression}
        self._check_options(step, item)
        self.draft = Draft(destination, step, item, ocdbt=ocdbt, zarr3=zarr3, compression=compression)
        structure, named = trees.flatten(tree)
        leaves, self._values = self._parted(named)
        self.context = _context(ocdbt, fsync)
        specs = {
            name: write_spec(self._info(name, ocdbt, zarr3), leaf, jax.process_index()) for name, leaf in leaves.items()
        }
        self.specs: Mapping[str, Any] = {name: spec.json for name, spec in specs.items()}
        # Orbax itself may store an array in smaller chunks than it is asked for.
        self.leaves: Mapping[str, OrbaxLeaf] = {
            name: replace(leaf, chunk_shape=tuple(specs[name].metadata.chunk_shape)) for name, leaf in leaves.items()
        }
        self.tree = jax.tree.unflatten(
            structure, [streamed(leaves[name]) if name in leaves else self._values[name] for name in named]
        )

    def record(self, source: str) -> dict[str, Any]:
        """What tells it apart from all else that may have been begun in its place; JSON."""
        leaves = {
            name: [leaf.kind, leaf.dtype.name, list(leaf.shape), list(leaf.chunk_shape)]
            for name, leaf in self.leaves.items()
        }
        # A scalar may have been written already, with the dtype that it had.
        scalars = {
            name: ["string", value] if isinstance(value, str) else ["scalar", np.asarray(value).dtype.name]
            for name, value in self._values.items()
        }
        return {**self._settings, "source": source, "leaves": {**leaves, **scalars}}

    def _check_options(self, step: int, item: str) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise TensorMismatchError(f"{self.path}: expected the number of a step, found {step!r}")
        if not isinstance(item, str) or item in ("", ".", "..") or "/" in item or _UNFINISHED in item:
            raise TensorMismatchError(f"{self.path}: expected the name of an item, found {item!r}")
        if self.custom_metadata is not None and not isinstance(self.custom_metadata, dict):
            raise TensorMismatchError(
                f"{self.path}: expected a dict of custom metadata, found {self.custom_metadata!r}"
            )
        for metadata in (self.custom_metadata, self.tree_custom_metadata):
            try:
                json.dumps(metadata)
            except (TypeError, ValueError) as error:
                raise TensorMismatchError(f"{self.path}: custom metadata must be JSON: {error}") from error

    def _info(self, name: str, ocdbt: bool, zarr3: bool) -> ocp.type_handlers.ParamInfo:
        return ocp.type_handlers.ParamInfo(
            name=name,
            parent_dir=self.draft.item_directory,
            is_ocdbt_checkpoint=ocdbt,
            use_zarr3=zarr3,
            use_compression=self.compression,
            ts_context=self.context,
        )

    def _parted(self, named: Mapping[str, Any]) -> tuple[dict[str, OrbaxLeaf], dict[str, Any]]:
        """The leaves that are streamed, and those that are given by value."""
        leaves, values = {}, {}
        for name, leaf in named.items():
            where = f"{self.path}: {name!r}"
            if not name:
                raise TensorMismatchError(f"{self.path}: expected a tree, found one leaf")
            if isinstance(leaf, OrbaxLeaf):
                leaves[name] = _checked(leaf, where)
            elif isinstance(leaf, int | float | np.number | str):
                values[name] = leaf
            else:
                raise TensorMismatchError(
                    f"{where}: expected an OrbaxLeaf, a scalar or a string, found {type(leaf).__name__}"
                )
        if not leaves and not values:
            raise TensorMismatchError(f"{self.path}: the tree has no leaf")
        return leaves, values


def _checked(leaf: OrbaxLeaf, where: str) -> OrbaxLeaf:
    """A leaf that Orbax can store."""
    if leaf.kind not in ARRAYS:
        raise TensorMismatchError(f"{where}: a leaf of kind {leaf.kind!r} is given by its value")
    if not all(leaf.shape):
        raise TensorMismatchError(f"{where}: Orbax stores no array without elements, and its shape is {leaf.shape}")
    if len(leaf.chunk_shape) != len(leaf.shape) or not all(
        1 <= chunk <= size for chunk, size in zip(leaf.chunk_shape, leaf.shape, strict=True)
    ):
        raise TensorMismatchError(f"{where}: {leaf.chunk_shape} is no shape of chunks of an array of {leaf.shape}")
    try:
        ts.dtype(leaf.dtype.name)
    except ValueError as error:
        raise TensorMismatchError(f"{where}: arrays of {leaf.dtype} cannot be stored") from error
    return replace(leaf, shape=tuple(map(int, leaf.shape)), chunk_shape=tuple(map(int, leaf.chunk_shape)))


def _context(ocdbt: bool, fsync: bool) -> ts.Context:
    """Orbax's own context, which keeps nothing that was written in memory."""
    spec = ocp.type_handlers.get_ts_context(use_ocdbt=ocdbt).spec.to_json()
    if not fsync:
        spec["file_io_sync"] = False
    return ts.Context(spec)
