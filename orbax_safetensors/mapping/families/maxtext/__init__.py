"""MaxText's parameter trees, scanned and unscanned, for checkpoints of many kinds of model.

The facts are from MaxText 0.2.4, 0.2.5 and its repository: tests compare these descriptions bit for bit with the output
of MaxText's converter, of the converter's tables and of its scripts, for small models (`testdata/maxtext`).

All families have these switches: `scan_layers`, whether layers are stacked in one array; `param_scan_axis`, where that
dimension is inserted; `vocab_size`, MaxText's size, to which the vocabulary is padded with zeros.
"""

from orbax_safetensors.mapping.families.maxtext.deepseek import DEEPSEEK2, DEEPSEEK3, DEEPSEEK3_2
from orbax_safetensors.mapping.families.maxtext.deepseek4 import DEEPSEEK4
from orbax_safetensors.mapping.families.maxtext.gemma import GEMMA, GEMMA2, GEMMA3
from orbax_safetensors.mapping.families.maxtext.gemma4 import GEMMA4, GEMMA4_SMALL
from orbax_safetensors.mapping.families.maxtext.gpt_oss import GPT_OSS
from orbax_safetensors.mapping.families.maxtext.llama import LLAMA3
from orbax_safetensors.mapping.families.maxtext.llama4 import LLAMA4
from orbax_safetensors.mapping.families.maxtext.lora import lora_of
from orbax_safetensors.mapping.families.maxtext.mistral import MISTRAL, MIXTRAL
from orbax_safetensors.mapping.families.maxtext.olmo import OLMO3
from orbax_safetensors.mapping.families.maxtext.qwen import QWEN2_5, QWEN3, QWEN3_MOE
from orbax_safetensors.mapping.families.maxtext.qwen3_next import QWEN3_5, QWEN3_NEXT
from orbax_safetensors.mapping.families.maxtext.qwen3_vl import QWEN3_OMNI, QWEN3_VL, QWEN3_VL_MOE
from orbax_safetensors.mapping.families.stored import changed_by_mlx

# mlx-lm leaves the tensors of the first as they are, except for names.
FAMILIES = (
    QWEN3,
    QWEN3_MOE,
    QWEN2_5,
    LLAMA3,
    MISTRAL,
    MIXTRAL,
    GEMMA,
    GEMMA2,
    GEMMA3,
    *map(
        changed_by_mlx,
        (
            QWEN3_VL,
            QWEN3_VL_MOE,
            QWEN3_OMNI,
            QWEN3_NEXT,
            QWEN3_5,
            LLAMA4,
            DEEPSEEK2,
            DEEPSEEK3,
            DEEPSEEK3_2,
            DEEPSEEK4,
            GPT_OSS,
            GEMMA4,
            GEMMA4_SMALL,
            OLMO3,
        ),
    ),
)

LORA = lora_of(FAMILIES)

__all__ = ["FAMILIES", "LORA"]
