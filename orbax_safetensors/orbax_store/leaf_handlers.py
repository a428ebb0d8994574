"""Handlers of leaves by which Orbax saves a tree whose arrays a sink has written before.

Orbax's handler of `jax.Array` writes three things: the values, how each array is stored (`array_metadatas`), and its
sharding (`_sharding`). These handlers write all but the values, as Orbax does. Orbax then records the leaves in
`_METADATA` as the kinds that their handlers name, so that the checkpoint is like one of Orbax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import type_handlers

from orbax_safetensors.orbax_store._compat import (
    ArrayMetadataStore,
    build_array_write_spec,
)
from orbax_safetensors.orbax_store.leaf import JAX_ARRAY, RANDOM_KEY, OrbaxLeaf
from orbax_safetensors.orbax_store.shardings import add_shardings


class Streamed:
    """A leaf of kind `jax.Array` in the tree that Orbax saves."""

    def __init__(self, leaf: OrbaxLeaf) -> None:
        """Take shape and dtype of the leaf, by which Orbax counts bytes."""
        self.leaf, self.shape, self.dtype = leaf, leaf.shape, leaf.dtype


class StreamedNumpy(Streamed):
    """A leaf of kind `np.ndarray`. Orbax looks handlers up by type."""


def write_spec(info: type_handlers.ParamInfo, leaf: OrbaxLeaf, process: int | None) -> Any:
    """Return Orbax's choice of how an array is stored, and its record of it."""
    return build_array_write_spec(
        info,
        global_shape=leaf.shape,
        local_shape=leaf.chunk_shape,
        dtype=leaf.dtype,
        use_ocdbt=info.is_ocdbt_checkpoint,
        process_index=process if info.is_ocdbt_checkpoint else None,
        ext_metadata={RANDOM_KEY: leaf.random_key} if leaf.random_key else None,
    )


class ArrayHandler(type_handlers.ArrayHandler):
    """Write what belongs to arrays of kind `jax.Array`, except their values."""

    def __init__(self) -> None:
        """Make the store of records, for which Orbax's handler of trees looks in this one."""
        self._metadata_store = ArrayMetadataStore()
        super().__init__(array_metadata_store=self._metadata_store)

    async def serialize(
        self, values: Sequence[Streamed], infos: Sequence[type_handlers.ParamInfo], args: Any = None
    ) -> Sequence[Any]:
        """Write the records of all arrays. Every process calls this once; all is written when it returns."""
        process = jax.process_index()
        if process == 0:  # Orbax's own function takes shardings over devices, and a target's devices are not here
            leaves = {info.name: value.leaf for value, info in zip(values, infos, strict=True)}
            add_shardings(infos[0].parent_dir.as_posix(), leaves)
        await self._metadata_store.write(
            checkpoint_dir=infos[0].parent_dir,
            array_metadatas=[
                write_spec(info, value.leaf, process).metadata for value, info in zip(values, infos, strict=True)
            ],
            process_index=process,
        )
        return []

    def memory_size(self, values: Sequence[Streamed]) -> Sequence[tuple[int, int]]:
        """Count no bytes: Orbax writes none of these arrays. Orbax 0.11 asks before it saves."""
        return [(0, 0)] * len(values)


class NumpyHandler(type_handlers.NumpyHandler):
    """Write nothing for arrays of kind `np.ndarray`: Orbax writes their values only."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Sequence[Any]:
        """Do nothing."""
        return []

    def memory_size(self, values: Sequence[Streamed]) -> Sequence[tuple[int, int]]:
        """Count no bytes, as `ArrayHandler` does."""
        return [(0, 0)] * len(values)


def registry() -> type_handlers.TypeHandlerRegistry:
    """Return handlers of streamed arrays, and Orbax's of values, whatever the global registry has."""
    arrays = ArrayHandler()
    scalars = type_handlers.ScalarHandler()
    return type_handlers.create_type_handler_registry(
        (int, scalars),
        (float, scalars),
        (np.number, scalars),
        (str, type_handlers.StringHandler()),
        (StreamedNumpy, NumpyHandler()),
        (Streamed, arrays),
        (jax.Array, arrays),
    )


def streamed(leaf: OrbaxLeaf) -> Streamed:
    """Return what stands for a leaf in the tree that Orbax saves."""
    return Streamed(leaf) if leaf.kind == JAX_ARRAY else StreamedNumpy(leaf)
