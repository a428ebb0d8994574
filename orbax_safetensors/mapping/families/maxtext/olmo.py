"""MaxText's OLMo 3: layers in cycles of four, with norms after attention and MLP only."""

from __future__ import annotations

from orbax_safetensors.mapping import Tree
from orbax_safetensors.mapping.families.maxtext.common import (
    attention,
    family,
    in_cycles,
    mlp,
    model,
    refuse,
    require_cycles,
    under,
)
from orbax_safetensors.mapping.families.stored import Config, Leaves, completed, norm

_CYCLE = 4


def _layer(h: str, c: Config) -> Leaves:
    width, size = c["hidden_size"], c["head_dim"]
    heads = {
        **attention(h, c),
        # These norms are over all heads together.
        "query_norm.scale": norm(h + "self_attn.q_norm", c["num_attention_heads"] * size),
        "key_norm.scale": norm(h + "self_attn.k_norm", c["num_key_value_heads"] * size),
    }
    return {
        **under("attention", heads),
        **under("mlp", mlp(h + "mlp", width, c["intermediate_size"])),
        "post_self_attention_layer_norm.scale": norm(h + "post_attention_layernorm", width),
        "post_mlp_layer_norm.scale": norm(h + "post_feedforward_layernorm", width),
    }


def olmo3(config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1, vocab_size: int | None = None) -> Tree:
    """Return the tree of OLMo 3. If scanned, layers at the same place of a cycle are stacked."""
    c = completed(config)
    refuse(c, "attention_bias")
    if scan_layers:
        require_cycles(c, _CYCLE)
    layers = [_layer(f"model.layers.{i}.", c) for i in range(c["num_hidden_layers"])]
    return model(c, in_cycles(_CYCLE, layers, scan_layers, param_scan_axis), vocab_size)


OLMO3 = family("maxtext.olmo3", ("Olmo3ForCausalLM",), olmo3)
