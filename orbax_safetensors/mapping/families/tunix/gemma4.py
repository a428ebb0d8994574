"""Tunix's Gemma 4: large models, dense or with experts, and small models; without the parts for images and sounds."""

from __future__ import annotations

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import Family, Tree, stack, tensor
from orbax_safetensors.mapping.families.stored import Config, Leaves, kernel, norm
from orbax_safetensors.mapping.families.stored_gemma4 import (
    AUDIO,
    VISION,
    has_values,
    head_sizes,
    is_global,
    mlp_size,
    shares,
    whole_text_config,
)
from orbax_safetensors.mapping.families.tunix.common import dense, heads, model, out, require


def _attention(h: str, c: Config, i: int) -> Leaves:
    """Return the attention of layer `i`, with keys and values also if it uses an earlier layer's in their place."""
    sized = {**c, **head_sizes(c, i)}
    q, *kv = (view.transpose((1, 0, 2)) for view in heads(h, sized, "qkv" if has_values(c, i) else "qk").values())
    return {
        "attn.q_einsum.w": q,
        **({"attn.kv_einsum.w": stack(kv)} if len(kv) == 2 else {"attn.k_einsum.w": kv[0]}),
        "attn.attn_vec_einsum.w": out(h, sized),
        "attn._query_norm.scale": norm(h + "self_attn.q_norm", sized["head_dim"]),
        "attn._key_norm.scale": norm(h + "self_attn.k_norm", sized["head_dim"]),
    }


def _experts(h: str, c: Config) -> Leaves:
    """Return router and routed experts, which are beside the MLP. Gate and up projections are one array."""
    width, count, inner = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    norms = {
        "moe_pre_ffw_norm": "pre_feedforward_layernorm_2",
        "moe_post_ffw_norm": "post_feedforward_layernorm_2",
        "dense_post_ffw_norm": "post_feedforward_layernorm_1",
    }
    return {
        **{f"{name}.scale": norm(h + stored, width) for name, stored in norms.items()},
        "moe.router_logits": kernel(h + "router.proj", (width, count)),
        "moe.router_scale": tensor(h + "router.scale", (width,)),
        "moe.per_expert_scale": tensor(h + "router.per_expert_scale", (count,)),
        "moe.gating_einsum": tensor(h + "experts.gate_up_proj", (count, 2 * inner, width)).reshape(
            (count, 2, inner, width)
        ),
        "moe.linear": tensor(h + "experts.down_proj", (count, width, inner)).transpose((0, 2, 1)),
    }


def _layer(h: str, c: Config, i: int) -> Leaves:
    width, per_layer = c["hidden_size"], c["hidden_size_per_layer_input"]
    norms = {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffw_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    leaves = {
        **_attention(h, c, i),
        **{f"{name}.scale": norm(h + stored, width) for name, stored in norms.items()},
        **dense(h, {**c, "intermediate_size": mlp_size(c, i)}),
        "skip_scale": tensor(h + "layer_scalar", (1,)),
    }
    if c["enable_moe_block"]:
        leaves |= _experts(h, c)
    if per_layer:
        leaves |= {
            "per_layer_input_gate.w": kernel(h + "per_layer_input_gate", (width, per_layer)),
            "per_layer_projection.w": kernel(h + "per_layer_projection", (per_layer, width)),
            "post_per_layer_input_norm.scale": norm(h + "post_per_layer_input_norm", width),
        }
    return leaves


def _per_layer_embedder(prefix: str, c: Config) -> Leaves:
    """Return the embedding for each layer; {} if the model has none."""
    count, per_layer = c["num_hidden_layers"], c["hidden_size_per_layer_input"]
    if not per_layer:
        return {}
    require(c, vocab_size_per_layer_input=c["vocab_size"])
    embedding = tensor(f"{prefix}embed_tokens_per_layer.weight", (c["vocab_size"], count * per_layer))
    projection = kernel(f"{prefix}per_layer_model_projection", (c["hidden_size"], count, per_layer))
    return {
        "embedder.per_layer_input_embedding": embedding.reshape((c["vocab_size"], count, per_layer)),
        "embedder.per_layer_model_projection.w": projection,
        "embedder.per_layer_projection_norm.scale": norm(f"{prefix}per_layer_projection_norm", per_layer),
    }


def _require_shared_last(c: Config) -> None:
    """Raise `MappingError` if layers share others' keys and values than those of the two before them, as Tunix does."""
    count = sum(not shares(c, i) for i in range(c["num_hidden_layers"]))
    if c["num_kv_shared_layers"] and [is_global(c, i) for i in range(count)[-2:]] != [False, True]:
        raise MappingError(
            "in Tunix, the layers that share keys and values use those of the two before them, one local, the next "
            f"global; config.json has {c['layer_types'][:count][-2:]} before the last {c['num_kv_shared_layers']}"
        )


def _gemma4(config: Config) -> Tree:
    c, prefix = whole_text_config(config)
    require(c, attention_bias=False, tie_word_embeddings=True)
    _require_shared_last(c)
    layers = [_layer(f"{prefix}layers.{i}.", c, i) for i in range(c["num_hidden_layers"])]
    beside = _per_layer_embedder(prefix, c)
    return model(c, layers, "scale", prefix=prefix, beside=beside, unused=[VISION, AUDIO])


GEMMA4 = Family("tunix.gemma4", ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"), _gemma4)
