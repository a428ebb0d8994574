"""Stored names <-> a model's own tree: what a family is, and how one more is described.

A description is plain Python over `tensor(name, shape)`, whose result has NumPy's words (`transpose` and `T`,
`reshape`, `slice`, `pad`) and `scale`, `offset` and `cast`; `stack`, `concatenate` and `full` put several together.
"""

from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.envelope import Envelope
from orbax_safetensors.mapping.family import Family, Tree, tensor

stack = View.stack
concatenate = View.concatenate
full = View.full

__all__ = ["Envelope", "Family", "Tree", "View", "concatenate", "full", "stack", "tensor"]
