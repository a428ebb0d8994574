"""The private names of Orbax that handlers need, each with its reason and the public name that it waits for.

Nothing else in this room imports a private module of Orbax: what a new version of Orbax may break stands here.
"""

# The metadata that a save left, with that of the item. The public `ocp.metadata.get_step_metadata` reads paths of file
# systems and cannot add the item's.
# Waits for: `ocp.metadata.StepMetadata.deserialize`.
from orbax.checkpoint._src.metadata.step_metadata_serialization import deserialize as deserialize_step_metadata

# What `PyTreeCheckpointHandler.metadata` returns is a class without a public constructor.
# Waits for: `ocp.metadata.tree.build_default_tree_metadata`.
from orbax.checkpoint._src.metadata.tree import build_default_tree_metadata

# `ocp.type_handlers.register_type_handler` is the `add` of this registry, and logs a warning for each handler that it
# replaces.
# Waits for: its `ignore_warnings`.
from orbax.checkpoint._src.serialization.type_handler_registry import GLOBAL_TYPE_HANDLER_REGISTRY

__all__ = ["GLOBAL_TYPE_HANDLER_REGISTRY", "build_default_tree_metadata", "deserialize_step_metadata"]
