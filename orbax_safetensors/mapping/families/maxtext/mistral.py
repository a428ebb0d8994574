"""MaxText's Mistral and Mixtral. The factor 1 / sqrt(head_dim) is part of the query's kernel."""

from __future__ import annotations

from orbax_safetensors.mapping.families.maxtext.common import (
    attention,
    experts,
    family,
    layer_norms,
    mlp,
    scaled_query,
    under,
    uniform,
)
from orbax_safetensors.mapping.families.stored import Config, Leaves


def _mistral(h: str, c: Config) -> Leaves:
    return {
        **layer_norms(h, c),
        **under("self_attention", scaled_query(attention(h, c), c)),
        **under("mlp", mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])),
    }


def _mixtral(h: str, c: Config) -> Leaves:
    sizes = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    return {
        **layer_norms(h, c),
        **under("self_attention", scaled_query(attention(h, c), c)),
        **under("MoeBlock_0", experts(h + "block_sparse_moe", *sizes, parts=("w1", "w3", "w2"))),
    }


MISTRAL = family("maxtext.mistral", ("MistralForCausalLM",), uniform(_mistral, num_key_value_heads=8))
MIXTRAL = family("maxtext.mixtral", ("MixtralForCausalLM",), uniform(_mixtral, num_key_value_heads=8))
