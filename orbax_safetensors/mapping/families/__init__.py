"""The families of the package: a folder or a file for each convention."""

from orbax_safetensors.mapping.families import flax, maxtext, tunix

FAMILIES = (*maxtext.FAMILIES, *tunix.FAMILIES, *flax.FAMILIES)

__all__ = ["FAMILIES"]
