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
import tensorstore as ts
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata import array_metadata_store

# The public names of these return specs only, and not the record of how an array is stored that belongs to them.
from orbax.checkpoint._src.serialization import tensorstore_utils

from orbax_safetensors.orbax_store.leaf import JAX_ARRAY, RANDOM_KEY, OrbaxLeaf


class Streamed:
    """A leaf of kind `jax.Array` in the tree that Orbax saves."""

    def __init__(self, leaf: OrbaxLeaf) -> None:
        """Orbax counts bytes by the attributes `shape` and `dtype`."""
        self.leaf, self.shape, self.dtype = leaf, leaf.shape, leaf.dtype


class StreamedNumpy(Streamed):
    """A leaf of kind `np.ndarray`. Orbax looks handlers up by type."""


def write_spec(info: type_handlers.ParamInfo, leaf: OrbaxLeaf, process: int | None) -> Any:
    """Orbax's own choice of how an array is stored, and its record of it."""
    return tensorstore_utils.build_array_write_spec(
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
        super().__init__(array_metadata_store=array_metadata_store.Store())

    async def serialize(
        self, values: Sequence[Streamed], infos: Sequence[type_handlers.ParamInfo], args: Any = None
    ) -> Sequence[Any]:
        """Called by every process, once for all arrays; all is written when it returns."""
        process = jax.process_index()
        if process == self._primary_host:
            await self._serialize_shardings(values, infos)
        await self._array_metadata_store.write(
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

    async def _serialize_shardings(self, values: Sequence[Streamed], infos: Sequence[type_handlers.ParamInfo]) -> None:
        # Orbax's own function takes shardings over devices, and those of the mesh of a target are not here.
        transaction = ts.Transaction()
        for value, info in zip(values, infos, strict=True):
            if value.leaf.sharding is None:
                continue
            spec = tensorstore_utils.get_sharding_tensorstore_spec(info.parent_dir.as_posix(), info.name)
            store = await ts.open(spec, open=True, context=info.ts_context)
            await store.with_transaction(transaction).write(value.leaf.sharding.to_serialized_string())
        await transaction.commit_async()


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
