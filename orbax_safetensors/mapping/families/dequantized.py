"""Any model under its stored names, with quantised tensors as plain values.

The paths are the stored names, so the tree has a level for each part of a name. A save takes the names from a
checkpoint, with `like`.
"""

from __future__ import annotations

from orbax_safetensors.mapping import Family, Tree, stored_shapes, tensor
from orbax_safetensors.mapping.families.stored import Config


def _names(config: Config) -> Tree:
    return Tree({name: tensor(name, shape) for name, shape in stored_shapes().items()})


DEQUANTIZED = Family("dequantized", (), _names)
