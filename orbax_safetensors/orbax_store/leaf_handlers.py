"""What Orbax's save path asks of the handlers of leaves, for arrays whose values are written beside it.

Orbax's own handler of `jax.Array` writes three things: the values, how each array is stored (`array_metadatas`), and
how it was sharded (`_sharding`). Here the values have been written before; the rest is written as Orbax does. Orbax
then records the leaves in `_METADATA` as what their handlers say they are, so that nobody can tell the difference.
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
        """Orbax counts bytes by the attributes `shape` and `dtype`."""
        self.leaf, self.shape, self.dtype = leaf, leaf.shape, leaf.dtype


class StreamedNumpy(Streamed):
    """A leaf of kind `np.ndarray`. Orbax looks handlers up by type."""


def write_spec(info: type_handlers.ParamInfo, leaf: OrbaxLeaf, process: int | None) -> Any:
    """Orbax's own choice of how an array is stored, and its record of it."""
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
    """Writes what belongs to arrays of kind `jax.Array`, but not their values."""

    def __init__(self) -> None:
        """`BasePyTreeCheckpointHandler` looks for the store in the handler."""
        self._metadata_store = ArrayMetadataStore()
        super().__init__(array_metadata_store=self._metadata_store)

    async def serialize(
        self, values: Sequence[Streamed], infos: Sequence[type_handlers.ParamInfo], args: Any = None
    ) -> Sequence[Any]:
        """Called by every process, once for all arrays; all is written when it returns."""
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
    """Leaves arrays of kind `np.ndarray` as they are: Orbax writes nothing besides their values."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Sequence[Any]:
        """Nothing is left to do."""
        return []

    def memory_size(self, values: Sequence[Streamed]) -> Sequence[tuple[int, int]]:
        """Count no bytes, as `ArrayHandler` does."""
        return [(0, 0)] * len(values)


def registry() -> type_handlers.TypeHandlerRegistry:
    """Handlers of streamed arrays, and Orbax's own of what is given by value. It does not ask the global registry."""
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
    """What stands for a leaf in the tree that Orbax saves."""
    return Streamed(leaf) if leaf.kind == JAX_ARRAY else StreamedNumpy(leaf)
