"""`SafetensorsCheckpointableHandler`: a named checkpointable of Orbax's v1 API as safetensors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import jax
import numpy as np

from orbax_safetensors.checkpoint.open import open_checkpoint
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.request import RestoreRequest
from orbax_safetensors.restore.run import restore
from orbax_safetensors.save.job import prepare
from orbax_safetensors.save.request import SaveRequest
from orbax_safetensors.storage.paths import as_text


class SafetensorsCheckpointableHandler:
    """Save and load a tree of arrays as safetensors under `orbax.checkpoint.experimental.v1`.

    ```python
    from orbax.checkpoint.experimental import v1

    registry = v1.handlers.local_registry()
    registry.add(ost.SafetensorsCheckpointableHandler, checkpointable_name="params")
    with v1.Context(checkpointables_options=v1.options.CheckpointablesOptions(registry=registry)):
        v1.save_checkpointables("/models/v1", {"params": {"w": jnp.ones((64, 512))}})
    ```

    Register it for the name of a checkpointable: `registry.add(SafetensorsCheckpointableHandler,
    checkpointable_name="params")`. An abstract tree passed to load is the `item` of `SafetensorsRestore`; without
    one, a single process gets a flat dict of NumPy arrays.
    """

    def __init__(self) -> None:
        """Take no arguments: v1 makes its handlers itself."""
        self._options = SafetensorsOptions()

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Start a save into a directory that is being created; return once the shards stay as they are."""
        job = prepare(SaveRequest(directory.path, checkpointable, options=self._options)).kept()

        async def written() -> None:
            await directory.await_creation()
            await asyncio.to_thread(job.run)

        return written()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Start to load a tree."""
        request = RestoreRequest(path=as_text(directory), item=abstract_checkpointable, options=self._options)
        return asyncio.to_thread(restore, request)

    async def metadata(self, directory: Any) -> dict[str, Any]:
        """Return shape and dtype of every leaf of what `load` returns."""

        def tree() -> dict[str, Any]:
            checkpoint = open_checkpoint(directory)
            return checkpoint.tree(lambda _, view: jax.ShapeDtypeStruct(view.shape, view.dtype))

        return await asyncio.to_thread(tree)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return whether an object is a tree of arrays and numbers."""
        leaves = jax.tree.leaves(checkpointable)
        return bool(leaves) and all(
            isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex) for leaf in leaves
        )

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Return whether an object is a tree whose leaves have a shape and a dtype."""
        leaves = jax.tree.leaves(abstract_checkpointable)
        return bool(leaves) and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves)
