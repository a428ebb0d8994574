"""Orbax checkpoints, in OCDBT or plain files and either version of Zarr, as a source and as a sink.

Nothing else in the package imports TensorStore. What is moved are boxes of arrays, between a checkpoint and NumPy
memory of the caller; which boxes, and from or to what, is not decided here.
"""

from orbax_safetensors.orbax_store.item import OrbaxItem, array_name
from orbax_safetensors.orbax_store.layout import OrbaxLayout
from orbax_safetensors.orbax_store.leaves import OrbaxLeaf, named_sharding
from orbax_safetensors.orbax_store.sink import OrbaxSink
from orbax_safetensors.orbax_store.source import OrbaxCheckpoint, OrbaxStep, find_step_faults, open_orbax, open_step

__all__ = [
    "OrbaxCheckpoint",
    "OrbaxItem",
    "OrbaxLayout",
    "OrbaxLeaf",
    "OrbaxSink",
    "OrbaxStep",
    "array_name",
    "find_step_faults",
    "named_sharding",
    "open_orbax",
    "open_step",
]
