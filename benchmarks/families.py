"""Restoring the trees of MaxText's models: this package, beside the same files as they are stored, and beside NumPy.

    python benchmarks/families.py [--quick] [--rounds 5] [--directory DIR] [--json FILE] [--only SCENARIO ...]

Measured as in `restore.py`: fresh processes in turn, and every result compared bit by bit, here with what NumPy makes
of the stored tensors. `README.md` says what the columns mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
from restore import (
    LIMIT,
    PACKAGE,
    READ_LIMIT,
    Runs,
    Scenario,
    at_least,
    at_most,
    faster_than,
    measure_all,
    over_read,
    peak,
    seconds,
)

STORED, NUMPY = "as stored", "NumPy, then shards"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
    "rope_scaling": {"rope_type": "llama3"},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# Llama 3.1 8B with tied embeddings, half of its layers and heads of 64: MaxText's factor for queries, 1 / 8, then
# rounds nothing. The package rounds decoded values after it, `models.Decoded` before it.
LLAMA_8 = LLAMA | {"hidden_size": 4096, "intermediate_size": 14_336}
LLAMA_8 |= {"num_attention_heads": 64, "num_key_value_heads": 16}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
LLAMA_8_INT4 = LLAMA_8 | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
        "ignore": ["lm_head"],
    }
}
# Qwen3-30B-A3B at half its width, with a few of its layers and a part of its vocabulary.
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "hidden_size": 1024,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32_768,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
# Moonlight-16B-A3B, which is a small DeepSeek-V3, with a few of its layers and a part of its vocabulary.
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11_264,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 16_384,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [checkpoints.BLOCK, checkpoints.BLOCK]},
}


QUICK_LLAMA = {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 16_384}
QUICK_LLAMA |= {"num_attention_heads": 16, "num_key_value_heads": 4}
# For each checkpoint its configuration, what is smaller with `--quick`, its tensors, and the number of its files.
CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[dict[str, Any]], checkpoints.Tensors], int]] = {
    "llama": (LLAMA, QUICK_LLAMA, checkpoints.llama_of, 4),
    "llama-8": (LLAMA_8, QUICK_LLAMA, checkpoints.llama_of, 8),
    "llama-8-int4": (LLAMA_8_INT4, QUICK_LLAMA, checkpoints.llama_int4, 4),
    "qwen3-moe": (QWEN3_MOE, {"num_hidden_layers": 2, "num_experts": 16, "vocab_size": 4096}, checkpoints.qwen3_moe, 4),
    "deepseek-fp8": (
        DEEPSEEK,
        {"num_hidden_layers": 2, "n_routed_experts": 8, "vocab_size": 1024},
        checkpoints.deepseek_fp8,
        4,
    ),
}


def make_checkpoint(directory: Path, name: str, quick: bool) -> None:
    """Writes one of `CHECKPOINTS` to `directory / name`, unless it is there."""
    config, smaller, tensors, files = CHECKPOINTS[name]
    config = config | (smaller if quick else {})
    checkpoints.write(directory / name, tensors(config), files=files)
    (directory / name / "config.json").write_text(json.dumps(config, indent=1))


def make_checkpoints(directory: Path, quick: bool) -> None:
    for name in ("llama", "qwen3-moe", "deepseek-fp8"):
        make_checkpoint(directory, name, quick)


def of_stored(runs: Runs) -> float:
    """The time of a restore of the tree over that of the tensors as they are stored."""
    return seconds(runs, PACKAGE) / seconds(runs, STORED)


def read_of_stored(runs: Runs) -> float:
    """The same of the bytes that are read."""
    return over_read(runs) / over_read({PACKAGE: runs[STORED]})


AS_STORED = at_most("time / that of the tensors as stored", of_stored, 3)
SAME_READS = at_most("bytes read / those of the tensors as stored", read_of_stored, 1)
TIMES_NUMPY = at_least("times NumPy", faster_than(NUMPY), 5)
PEAK = at_most("peak memory / tensor bytes", peak, 1.1)


def scenario(title: str, checkpoint: str, family: str, layout: str, devices: int = 8, **more: Any) -> Scenario:
    job = {"family": family, "layout": layout, "devices": devices, **more.pop("job", {})}
    common = {
        "loaders": (LIMIT, READ_LIMIT, PACKAGE, STORED, NUMPY),
        "rounds": {NUMPY: 3},
        "memory": 3.0,
        "targets": (AS_STORED, TIMES_NUMPY, PEAK),
        "instead": {STORED: {"loader": PACKAGE, "family": ""}},  # the same shards of the stored tensors
        "slow_check": True,
    }
    return Scenario(title, checkpoint, job, **{**common, **more})


# One of eight processes restores its part, and nothing else runs meanwhile: the others stand for other machines.
ALONE: dict[str, Any] = {
    "job": {"processes": 8, "alone": True},
    "loaders": (PACKAGE, STORED, NUMPY),
    "targets": (AS_STORED, SAME_READS, TIMES_NUMPY, PEAK),
}
SCENARIOS = {
    "whole": scenario("Llama, whole, 1 device", "llama", "maxtext.llama3", "width", 1),
    "width": scenario("Llama, width over 8 devices", "llama", "maxtext.llama3", "width"),
    "heads": scenario("Llama, heads and hidden units over 8 devices", "llama", "maxtext.llama3", "heads"),
    "experts": scenario("Qwen3-MoE, experts over 8 devices", "qwen3-moe", "maxtext.qwen3_moe", "experts"),
    "fp8": scenario(
        "DeepSeek-V3, fp8 to bf16, experts over 8 devices",
        "deepseek-fp8",
        "maxtext.deepseek3",
        "experts",
        memory=6.0,
        targets=(TIMES_NUMPY, PEAK),
    ),
    "process-width": scenario(
        "Llama, width over 8 processes, one of them", "llama", "maxtext.llama3", "width", **ALONE
    ),
    "process-heads": scenario(
        "Llama, heads and hidden units over 8 processes, one of them", "llama", "maxtext.llama3", "heads", **ALONE
    ),
}


def main() -> int:
    return measure_all(SCENARIOS, make_checkpoints, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
