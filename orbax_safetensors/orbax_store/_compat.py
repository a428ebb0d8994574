"""The private names of Orbax that this room needs, each with its reason and the public name that it waits for.

Nothing else in this room imports a private module of Orbax: what a new version of Orbax may break stands here.
"""

# `Checkpointer.save` creates directories, saves and finishes in one call, and would leave the other processes waiting
# if one of these steps fails in one of them. So a sink runs the steps of `ocp.path.atomicity_types.TemporaryPath`,
# which are coroutines, one by one.
# Waits for: a public `run_sync`, or methods of `TemporaryPath` that are not coroutines.
from orbax.checkpoint._src.asyncio_utils import run_sync

# Orbax tells its operations apart by a number that `Checkpointer` advances, and a sink saves without one.
# Waits for: a `PyTreeCheckpointHandler.save` that numbers its own operations.
from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

# `ocp.type_handlers.ArrayHandler` takes one of these to record how arrays are stored, and has none by default.
# Waits for: `ocp.type_handlers.ArrayHandler()` with the store that Orbax registers it with.
from orbax.checkpoint._src.metadata.array_metadata_store import Store as ArrayMetadataStore

# The content of `_CHECKPOINT_METADATA`. `ocp.metadata.metadata_store` writes dicts, which this makes of a record.
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
    "OperationIdGenerator",
    "build_array_write_spec",
    "build_kvstore_tspec",
    "get_sharding_tensorstore_spec",
    "run_sync",
    "serialize_step_metadata",
]
