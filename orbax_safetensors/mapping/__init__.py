"""Stored names <-> a model's tree: families, and how to describe a new one.

A description is plain Python over `tensor(name, shape)`, whose result has methods named as in NumPy (`transpose` and
`T`, `reshape`, `slice`, `pad`) and `scale`, `offset` and `cast`; `stack`, `concatenate` and `full` combine several.
`stored_shapes` is for descriptions that follow from the checkpoint instead of its config. `from_table` makes a family
of the table of a loader.
"""

from typing import Final

from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.family import Family, StateWrapper, Tree, stored_shapes, tensor
from orbax_safetensors.mapping.lora import lora
from orbax_safetensors.mapping.tables import from_table

stack: Final = View.stack
concatenate: Final = View.concatenate
full: Final = View.full

__all__ = [
    "Family",
    "StateWrapper",
    "Tree",
    "View",
    "concatenate",
    "from_table",
    "full",
    "lora",
    "stack",
    "stored_shapes",
    "tensor",
]
