"""MaxText's Qwen2.5, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from orbax_safetensors.mapping.families.maxtext.common import (
    Config,
    Leaves,
    attention,
    attention_biases,
    experts,
    family,
    head_norms,
    layer_norms,
    mlp,
    num_experts,
    require,
    under,
    uniform,
)


def _qwen2_5(h: str, c: Config) -> Leaves:
    return {
        **layer_norms(h, c),
        **under("self_attention", {**attention(h, c), **attention_biases(h, c)}),
        **under("mlp", mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])),
    }


def _qwen3(h: str, c: Config) -> Leaves:
    return {
        **layer_norms(h, c),
        **under("self_attention", {**attention(h, c), **head_norms(h, c)}),
        **under("mlp", mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])),
    }


def _qwen3_moe(h: str, c: Config) -> Leaves:
    require(c, decoder_sparse_step=1)
    return {
        **layer_norms(h, c),
        **under("self_attention", {**attention(h, c), **head_norms(h, c)}),
        **under("moe_block", experts(h + "mlp", num_experts(c), c["hidden_size"], c["moe_intermediate_size"])),
    }


QWEN2_5 = family("maxtext.qwen2_5", ("Qwen2ForCausalLM",), uniform(_qwen2_5, num_key_value_heads=32))
QWEN3 = family(
    "maxtext.qwen3",
    ("Qwen3ForCausalLM",),
    uniform(_qwen3, refused=("attention_bias",), num_key_value_heads=32, head_dim=128),
)
QWEN3_MOE = family(
    "maxtext.qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    uniform(_qwen3_moe, refused=("attention_bias", "mlp_only_layers"), num_key_value_heads=4),
)
