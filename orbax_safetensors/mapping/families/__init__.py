"""The families of the package: a folder or a file for each convention."""

from orbax_safetensors.mapping.families import flax, maxtext, tunix
from orbax_safetensors.mapping.families.dequantized import DEQUANTIZED

FAMILIES = (*maxtext.FAMILIES, *tunix.FAMILIES, *flax.FAMILIES, DEQUANTIZED)

__all__ = ["DEQUANTIZED", "FAMILIES"]
