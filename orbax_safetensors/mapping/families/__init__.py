"""The families of the package: a folder or a file for each convention."""

from orbax_safetensors.mapping.families import maxtext, tunix
from orbax_safetensors.mapping.families.stored_names import DEQUANTIZED, FLAX

FAMILIES = (*maxtext.FAMILIES, maxtext.LORA, *tunix.FAMILIES, FLAX, DEQUANTIZED)

__all__ = ["DEQUANTIZED", "FAMILIES"]
