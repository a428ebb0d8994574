"""Any model under its stored names, which are the paths of the tree.

A save takes the names from a checkpoint, with `like`. Names with dots need no family, unless quantised tensors are to
be plain values.
"""

from __future__ import annotations

from orbax_safetensors.mapping import Family, Tree, stored_shapes, tensor
from orbax_safetensors.mapping.families.stored import Config


def _names(config: Config) -> Tree:
    return Tree({name: tensor(name, shape) for name, shape in stored_shapes().items()})


def _paths(config: Config) -> Tree:
    return Tree({name.replace("/", "."): tensor(name, shape) for name, shape in stored_shapes().items()})


# The tree has a level for each part of a name between dots.
DEQUANTIZED = Family("dequantized", (), _names)
# Names have slashes between the keys of the tree, as Flax's `flatten_dict(sep="/")` joins them.
FLAX = Family("flax.paths", (), _paths)
