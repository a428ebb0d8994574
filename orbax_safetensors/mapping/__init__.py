"""Stored names <-> a model's tree: families, and how to describe a new one.

A description is plain Python over `tensor(name, shape)`, whose result has methods named as in NumPy (`transpose` and
`T`, `reshape`, `slice`, `pad`) and `scale`, `offset` and `cast`; `stack`, `concatenate` and `full` combine several.
"""

from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.envelope import Envelope
from orbax_safetensors.mapping.family import Family, Tree, tensor
from orbax_safetensors.mapping.lora import lora

stack = View.stack
concatenate = View.concatenate
full = View.full

__all__ = ["Envelope", "Family", "Tree", "View", "concatenate", "full", "lora", "stack", "tensor"]
