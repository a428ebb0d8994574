"""Tunix's Gemma 1 to 3, without the parts for images. All have tied embeddings."""

from __future__ import annotations

from orbax_safetensors.mapping import Family, Tree, stack
from orbax_safetensors.mapping.families.stored import (
    GEMMA3_TEXT,
    GEMMA3_VISION,
    LANGUAGE_MODEL,
    Config,
    Leaves,
    completed,
    language_model_spellings,
    norm,
    text_config,
)
from orbax_safetensors.mapping.families.tunix.common import dense, heads, model, out, require


def _layer(h: str, c: Config, norms: dict[str, str]) -> Leaves:
    """Return a layer, in which queries, keys and values are one array if they have as many heads.

    `norms` are the stored names of its norms, by Tunix's.
    """
    q, k, v = (view.transpose((1, 0, 2)) for view in heads(h, c).values())
    apart = {"attn.q_einsum.w": q, "attn.kv_einsum.w": stack([k, v])} if q.shape != k.shape else {}
    return {
        **(apart or {"attn.qkv_einsum.w": stack([q, k, v])}),
        "attn.attn_vec_einsum.w": out(h, c),
        **{f"{name}.scale": norm(h + stored, c["hidden_size"]) for name, stored in norms.items()},
        **dense(h, c),
    }


def _gemma_layer(h: str, c: Config) -> Leaves:
    """Return a layer of Gemma 1. Its norm before the MLP is stored as the one after attention."""
    return _layer(h, c, {"pre_attention_norm": "input_layernorm", "pre_ffw_norm": "post_attention_layernorm"})


def _sandwich(h: str, c: Config, after_attention: str) -> Leaves:
    """Return a layer with norms before and after attention and MLP."""
    norms = {
        "pre_attention_norm": "input_layernorm",
        after_attention: "post_attention_layernorm",
        "pre_ffw_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    return _layer(h, c, norms)


def _gemma3_layer(h: str, c: Config) -> Leaves:
    return {
        **_sandwich(h, c, "post_attention_norm"),
        "attn._query_norm.scale": norm(h + "self_attn.q_norm", c["head_dim"]),
        "attn._key_norm.scale": norm(h + "self_attn.k_norm", c["head_dim"]),
    }


def _gemma(config: Config) -> Tree:
    c = completed(config, head_dim=256, num_key_value_heads=16, tie_word_embeddings=True)
    require(c, attention_bias=False, tie_word_embeddings=True)
    layers = [_gemma_layer(f"model.layers.{i}.", c) for i in range(c["num_hidden_layers"])]
    return model(c, layers, "scale")


def _gemma2(config: Config) -> Tree:
    """Return the tree of Gemma 2. Tunix divides its queries by the root of head_dim, whatever the config has."""
    c = completed(config, head_dim=256, num_key_value_heads=4, query_pre_attn_scalar=256, tie_word_embeddings=True)
    require(c, attention_bias=False, tie_word_embeddings=True, query_pre_attn_scalar=c["head_dim"])
    layers = [_sandwich(f"model.layers.{i}.", c, "post_attn_norm") for i in range(c["num_hidden_layers"])]
    return model(c, layers, "scale")


def _gemma3(config: Config) -> Tree:
    text, prefix = text_config(config, LANGUAGE_MODEL, tied=True)
    c = completed(text, **GEMMA3_TEXT)
    require(c, attention_bias=False, tie_word_embeddings=True)
    layers = [_gemma3_layer(f"{prefix}layers.{i}.", c) for i in range(c["num_hidden_layers"])]
    return model(c, layers, "scale", prefix=prefix, unused=[GEMMA3_VISION])


GEMMA = Family("tunix.gemma", ("GemmaForCausalLM",), _gemma)
GEMMA2 = Family("tunix.gemma2", ("Gemma2ForCausalLM",), _gemma2)
GEMMA3 = Family(
    "tunix.gemma3",
    ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    _gemma3,
    renames=language_model_spellings,
)
