"""The families that come with the package: one folder for each convention, one file for each line of models."""

from orbax_safetensors.mapping.families.maxtext import FAMILIES

__all__ = ["FAMILIES"]
