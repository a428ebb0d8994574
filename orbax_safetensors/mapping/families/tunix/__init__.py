"""Tunix's trees: a file for each group of similar models, and `common` for what they share.

The facts are from google-tunix 0.1.7: tests compare these descriptions bit for bit with the models that its own loaders
make.
"""

from orbax_safetensors.mapping.families.stored import changed_by_mlx
from orbax_safetensors.mapping.families.tunix.gemma import GEMMA, GEMMA2, GEMMA3
from orbax_safetensors.mapping.families.tunix.gemma4 import GEMMA4
from orbax_safetensors.mapping.families.tunix.llama import LLAMA3, QWEN2, QWEN3

FAMILIES = (QWEN2, QWEN3, LLAMA3, GEMMA, GEMMA2, GEMMA3, changed_by_mlx(GEMMA4))

__all__ = ["FAMILIES"]
