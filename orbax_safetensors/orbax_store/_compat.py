"""The private names of Orbax that this room needs, each with its reason and the public name that it waits for.

Nothing else in this room imports a private module of Orbax: what a new version of Orbax may break stands here.
"""

# The reader of `array_metadatas` is a coroutine.
# Waits for: a public `run_sync`.
from orbax.checkpoint._src.asyncio_utils import run_sync

# The reader of `array_metadatas`: what it cannot read, Orbax does not restore.
# Waits for: a public reader of how arrays are stored.
from orbax.checkpoint._src.metadata.array_metadata_store import Store as ArrayMetadataStore

# The content of `_CHECKPOINT_METADATA`, as a dict.
# Waits for: `ocp.metadata.StepMetadata.serialize`.
from orbax.checkpoint._src.metadata.step_metadata_serialization import serialize as serialize_step_metadata

# The parser of `_METADATA`. The public way to the tree of a checkpoint, `PyTreeCheckpointHandler.metadata`, also asks
# the global registry of type handlers about each leaf, where other packages, and this one, have put their own handlers.
# Waits for: a public reader of `_METADATA` that looks up no handlers.
from orbax.checkpoint._src.metadata.tree import InternalTreeMetadata
from orbax.checkpoint._src.serialization.tensorstore_utils import (
    # The directories in which processes leave their parts of an OCDBT database begin with this.
    # Waits for: the same constant in `ocp.type_handlers`.
    PROCESS_SUBDIR_PREFIX,
    # Orbax's choice of how an array is stored. `ocp.type_handlers.get_json_tspec_write` returns the spec without the
    # record of chunk shapes that belongs to it.
    # Waits for: `ocp.type_handlers.build_array_write_spec`.
    build_array_write_spec,
    # Orbax's choice of a store for a path. `ocp.type_handlers.get_json_tspec_read` returns it with an array in it only.
    # Waits for: `ocp.type_handlers.build_kvstore_tspec`.
    build_kvstore_tspec,
    # Where `_sharding` has the sharding of an array.
    # Waits for: `ocp.type_handlers.get_sharding_tensorstore_spec`.
    get_sharding_tensorstore_spec,
)

__all__ = [
    "PROCESS_SUBDIR_PREFIX",
    "ArrayMetadataStore",
    "InternalTreeMetadata",
    "build_array_write_spec",
    "build_kvstore_tspec",
    "get_sharding_tensorstore_spec",
    "run_sync",
    "serialize_step_metadata",
]
