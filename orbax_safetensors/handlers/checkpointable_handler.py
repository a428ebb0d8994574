"""`SafetensorsCheckpointableHandler`: a named checkpointable of Orbax's v1 API as safetensors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.leaf import leaves_of
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.leaf_request import leaf_request
from orbax_safetensors.restore.request import RestoreRequest
from orbax_safetensors.restore.run import restore
from orbax_safetensors.restore.saved_tree import SavedLeaf, saved_tree
from orbax_safetensors.save.job import prepare
from orbax_safetensors.save.request import SaveRequest
from orbax_safetensors.storage.paths import as_text


class SafetensorsCheckpointableHandler:
    """Save and load a tree of arrays as safetensors under `orbax.checkpoint.experimental.v1`.

    ```python
    from orbax.checkpoint.experimental import v1

    registry = v1.handlers.local_registry()
    registry.add(ost.SafetensorsCheckpointableHandler, checkpointable_name="params")
    context = v1.Context()
    context.checkpointables.registry = registry
    with context:
        v1.save_checkpointables("/models/v1", {"params": {"w": jnp.ones((64, 512))}})
    ```

    Register it for the name of a checkpointable: `registry.add(SafetensorsCheckpointableHandler,
    checkpointable_name="params")`. An abstract tree passed to load is the `item` of `SafetensorsRestore`; without
    one, the tree comes back as it was saved.
    """

    def __init__(self) -> None:
        """Take no arguments: v1 makes its handlers itself."""
        self._options = SafetensorsOptions()

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Start a save into a directory that is being created; return once the shards stay as they are."""
        job = prepare(SaveRequest(directory.path, checkpointable, index=None, options=self._options)).kept()

        async def written() -> None:
            await directory.await_creation()
            await asyncio.to_thread(job.run)

        return written()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Start to load a tree."""
        request = RestoreRequest(path=as_text(directory), item=abstract_checkpointable, options=self._options)
        return asyncio.to_thread(restore, request)

    async def metadata(self, directory: Any) -> Any:
        """Return the tree that `load` returns, with shape, dtype and sharding of each array, and scalars of its types.

        Arrays whose devices are not here have no sharding, and are loaded as NumPy arrays.
        """

        def described(leaf: SavedLeaf) -> Any:
            if leaf.kind not in (jax.Array, np.ndarray):
                return leaf.kind()
            sharding = None
            if leaf.sharding is not None:
                with contextlib.suppress(ValueError, KeyError, RuntimeError):
                    sharding = leaf.sharding.to_jax_sharding()
            return jax.ShapeDtypeStruct(leaf.view.shape, leaf.view.dtype, sharding=sharding)

        def tree() -> Any:
            stored = read_checkpoint(directory)
            return saved_tree(stored, None, None, complete=True, dequantize=False).map(described)

        return await asyncio.to_thread(tree)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return whether an object is a tree of arrays and numbers."""
        try:
            leaves_of(checkpointable, None)
        except SafetensorsError:
            return False
        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Return whether an object is a tree whose leaves describe arrays and numbers, or are `v1.PLACEHOLDER`."""
        leaves = jax.tree.leaves(abstract_checkpointable)
        try:
            for leaf in leaves:
                if leaf is not ocp.PLACEHOLDER:
                    leaf_request(leaf, ocp.RestoreArgs())
        except SafetensorsError:
            return False
        return bool(leaves or abstract_checkpointable)
