"""Trees whose paths are the stored names, with slashes between the keys as Flax's `flatten_dict(sep="/")` joins them.

Stored names with dots need no family.
"""

from __future__ import annotations

from orbax_safetensors.mapping import Family, Tree, stored_shapes, tensor
from orbax_safetensors.mapping.families.stored import Config


def _paths(config: Config) -> Tree:
    return Tree({name.replace("/", "."): tensor(name, shape) for name, shape in stored_shapes().items()})


FAMILIES = (Family("flax.paths", (), _paths),)
