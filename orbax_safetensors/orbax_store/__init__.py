"""Orbax checkpoints, in OCDBT or plain files and either version of Zarr, as a source and as a sink.

Nothing else in the package imports TensorStore. This room moves boxes of arrays between a checkpoint and NumPy memory
of the caller; other rooms decide which boxes.
"""

from orbax_safetensors.orbax_store.item_writer import OrbaxItem, array_name
from orbax_safetensors.orbax_store.leaf import OrbaxLeaf
from orbax_safetensors.orbax_store.reader import OrbaxCheckpoint, OrbaxStep, open_orbax, open_step
from orbax_safetensors.orbax_store.shardings import named_sharding, sharded_leaf
from orbax_safetensors.orbax_store.sink import OrbaxSink
from orbax_safetensors.orbax_store.unfinished import UnfinishedCheckpoint

__all__ = [
    "OrbaxCheckpoint",
    "OrbaxItem",
    "OrbaxLeaf",
    "OrbaxSink",
    "OrbaxStep",
    "UnfinishedCheckpoint",
    "array_name",
    "named_sharding",
    "open_orbax",
    "open_step",
    "sharded_leaf",
]
