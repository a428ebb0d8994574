"""MaxText's Qwen3-Next: layers in cycles, the last with full attention and the others with linear attention.

All layers have routed experts and a shared expert. Layers of multi-token prediction are left out.
"""

from __future__ import annotations

from orbax_safetensors.mapping import Tree, tensor
from orbax_safetensors.mapping.families.maxtext.common import (
    Config,
    Leaves,
    attention,
    completed,
    experts,
    family,
    head_norms,
    in_cycles,
    kernel,
    mlp,
    model,
    norm,
    num_experts,
    refuse,
    require,
    require_cycles,
    under,
)

_PREDICTION = r"mtp\..+"


def _cycle(c: Config) -> int:
    """Return the length of a cycle, whose last layer has full attention."""
    if c.get("layer_types"):
        return 1 + list(c["layer_types"]).index("full_attention")
    length: int = c["full_attention_interval"]
    return length


def _full_attention(h: str, c: Config) -> Leaves:
    """Return attention whose queries have an output gate beside them in each head."""
    width, heads, size = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    return {
        "query.kernel": kernel(h + "self_attn.q_proj", (width, heads, 2 * size)),
        **attention(h, c, ("key", "value")),
        "out.kernel": kernel(h + "self_attn.o_proj", (heads * size, width)),
        **head_norms(h, c),
    }


def _linear_attention(h: str, c: Config) -> Leaves:
    width, heads, groups = c["hidden_size"], c["linear_num_value_heads"], c["linear_num_key_heads"]
    keys, values = groups * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    conv = tensor(h + "linear_attn.conv1d.weight", (2 * keys + values, 1, c["linear_conv_kernel_dim"]))
    return {
        "in_proj_qkvz.kernel": kernel(h + "linear_attn.in_proj_qkvz", (width, 2 * keys + 2 * values)),
        "in_proj_ba.kernel": kernel(h + "linear_attn.in_proj_ba", (width, 2 * heads)),
        "conv1d.kernel": conv.T,
        "A_log": tensor(h + "linear_attn.A_log", (heads,)),
        "dt_bias": tensor(h + "linear_attn.dt_bias", (heads,)),
        "norm.rms_norm.scale": norm(h + "linear_attn.norm", c["linear_value_head_dim"]),
        "out_proj.kernel": kernel(h + "linear_attn.out_proj", (values, width)),
    }


def _mlp(h: str, c: Config) -> Leaves:
    width = c["hidden_size"]
    return {
        **under("routed_experts", experts(h + "mlp", num_experts(c), width, c["moe_intermediate_size"])),
        **under("shared_expert", mlp(h + "mlp.shared_expert", width, c["shared_expert_intermediate_size"])),
        "shared_expert_gate.kernel": kernel(h + "mlp.shared_expert_gate", (width, 1)),
    }


def _layer(h: str, c: Config, *, full: bool) -> Leaves:
    heads = under("attention", _full_attention(h, c)) if full else _linear_attention(h, c)
    return {
        "input_layernorm.scale": norm(h + "input_layernorm", c["hidden_size"]),
        "post_attention_layernorm.scale": norm(h + "post_attention_layernorm", c["hidden_size"]),
        **under("attention", heads),
        **under("mlp", _mlp(h, c)),
    }


def qwen3_next(
    config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1, vocab_size: int | None = None
) -> Tree:
    """Return the tree of Qwen3-Next. If scanned, layers at the same place of a cycle are stacked."""
    c = completed(config, num_key_value_heads=2, head_dim=256, full_attention_interval=4)
    refuse(c, "attention_bias", "mlp_only_layers")
    require(c, decoder_sparse_step=1)
    cycle = _cycle(c)
    if scan_layers:
        require_cycles(c, cycle)
    layers = [_layer(f"model.layers.{i}.", c, full=i % cycle == cycle - 1) for i in range(c["num_hidden_layers"])]
    decoder = in_cycles(cycle, layers, scan_layers, param_scan_axis, name="layer")
    return model(c, decoder, vocab_size, unused=[_PREDICTION])


QWEN3_NEXT = family("maxtext.qwen3_next", ("Qwen3NextForCausalLM",), qwen3_next)
