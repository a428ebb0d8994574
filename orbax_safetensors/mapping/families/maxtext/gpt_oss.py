"""MaxText's gpt-oss: layers in cycles of two, and experts that are stored together, with alternating gates and ups."""

from __future__ import annotations

from orbax_safetensors.mapping import Tree, tensor
from orbax_safetensors.mapping.families.maxtext.common import (
    attention,
    attention_biases,
    family,
    in_cycles,
    layer_norms,
    model,
    require_cycles,
    under,
)
from orbax_safetensors.mapping.families.stored import Config, Leaves, biased, completed


def _attention(h: str, c: Config) -> Leaves:
    return {
        **attention(h, c),
        **attention_biases(h, c),
        "out.bias": tensor(h + "self_attn.o_proj.bias", (c["hidden_size"],)),
        "sinks": tensor(h + "self_attn.sinks", (c["num_attention_heads"],)),
    }


def _mlp(h: str, c: Config) -> Leaves:
    count, width, inner = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    gate_up = tensor(h + "mlp.experts.gate_up_proj", (count, width, 2 * inner))
    gate_up_bias = tensor(h + "mlp.experts.gate_up_proj_bias", (count, 2 * inner))
    every, even, odd = slice(None), slice(0, None, 2), slice(1, None, 2)
    return {
        **under("gate", biased(h + "mlp.router", (width, count))),
        "wi_0": gate_up.slice(every, every, even),
        "wi_1": gate_up.slice(every, every, odd),
        "wo": tensor(h + "mlp.experts.down_proj", (count, inner, width)),
        "wi_0_bias": gate_up_bias.slice(every, even),
        "wi_1_bias": gate_up_bias.slice(every, odd),
        "wo_bias": tensor(h + "mlp.experts.down_proj_bias", (count, width)),
    }


def _layer(h: str, c: Config) -> Leaves:
    return {
        **layer_norms(h, c),
        **under("GptOssAttention", _attention(h, c)),
        **under("GptOssMlp", _mlp(h, c)),
    }


def gpt_oss(
    config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1, vocab_size: int | None = None
) -> Tree:
    """Return the tree of gpt-oss. If scanned, layers at the same place of a cycle are stacked."""
    c = completed(config, head_dim=64, num_key_value_heads=8)
    require_cycles(c, 2)
    layers = [_layer(f"model.layers.{i}.", c) for i in range(c["num_hidden_layers"])]
    return model(c, in_cycles(2, layers, scan_layers, param_scan_axis), vocab_size)


GPT_OSS = family("maxtext.gpt_oss", ("GptOssForCausalLM",), gpt_oss)
