"""MaxText's Qwen2.5, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from orbax_safetensors.mapping.families.maxtext.common import (
    attention,
    attention_biases,
    experts,
    family,
    head_norms,
    layer_norms,
    mlp,
    refuse,
    require,
    under,
    uniform,
)
from orbax_safetensors.mapping.families.stored import Config, Leaves


def _qwen2_5(h: str, c: Config) -> Leaves:
    return {
        **layer_norms(h, c),
        **under("self_attention", {**attention(h, c), **attention_biases(h, c)}),
        **under("mlp", mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])),
    }


def qwen3_layer(h: str, c: Config) -> Leaves:
    """Return a layer of Qwen3."""
    return {
        **layer_norms(h, c),
        **under("self_attention", {**attention(h, c), **head_norms(h, c)}),
        **under("mlp", mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])),
    }


def sparse_layer(h: str, c: Config, block: Leaves) -> Leaves:
    """Return a layer of Qwen3 that has the `block` of experts instead of an MLP."""
    return {
        **layer_norms(h, c),
        **under("self_attention", {**attention(h, c), **head_norms(h, c)}),
        **under("moe_block", block),
    }


def expert_sizes(c: Config) -> tuple[int, int, int]:
    """Return the number of experts, their width and inner width; `MappingError` if some layers have none."""
    require(c, decoder_sparse_step=1)
    refuse(c, "mlp_only_layers")
    # The key in configs from transformers 5, and the key in published configs.
    count = c["num_local_experts"] if "num_local_experts" in c else c["num_experts"]
    return count, c["hidden_size"], c["moe_intermediate_size"]


def qwen3_moe_layer(h: str, c: Config) -> Leaves:
    """Return a layer of Qwen3-MoE, whose experts are stored one by one."""
    return sparse_layer(h, c, experts(h + "mlp", *expert_sizes(c)))


QWEN2_5 = family("maxtext.qwen2_5", ("Qwen2ForCausalLM",), uniform(_qwen2_5, num_key_value_heads=32))
QWEN3 = family(
    "maxtext.qwen3",
    ("Qwen3ForCausalLM",),
    uniform(qwen3_layer, refused=("attention_bias",), num_key_value_heads=32, head_dim=128),
)
QWEN3_MOE = family(
    "maxtext.qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    uniform(qwen3_moe_layer, refused=("attention_bias",), num_key_value_heads=4),
)
