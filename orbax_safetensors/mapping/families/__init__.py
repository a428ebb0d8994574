"""The families of the package: a folder for each convention, a file for each line of models."""

from orbax_safetensors.mapping.families.maxtext import FAMILIES

__all__ = ["FAMILIES"]
