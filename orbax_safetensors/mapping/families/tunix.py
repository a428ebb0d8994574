"""Tunix's trees of Qwen 2 and 3, Llama 3 and Gemma 3, whose parts for images are left out.

The facts are from google-tunix 0.1.7: tests compare these descriptions bit for bit with the models that its own loaders
make. Linear layers are stored as [outputs, inputs] and kept as [inputs, outputs], with heads as separate dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from orbax_safetensors.mapping import Family, Tree, View, stack, tensor
from orbax_safetensors.mapping.families.stored import (
    GEMMA3_TEXT,
    GEMMA3_VISION,
    LANGUAGE_MODEL,
    Config,
    Leaves,
    completed,
    head_beside,
    kernel,
    language_model_spellings,
    norm,
    text_config,
)

_QKV = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}


def _heads(h: str, c: Config) -> Leaves:
    """Return the kernels of queries, keys and values as [inputs, heads, head_dim]."""
    return {
        part: kernel(f"{h}self_attn.{part}_proj", (c["hidden_size"], c[heads], c["head_dim"]))
        for part, heads in _QKV.items()
    }


def _out(h: str, c: Config) -> View:
    return kernel(h + "self_attn.o_proj", (c["num_attention_heads"], c["head_dim"], c["hidden_size"]), inputs=2)


def _mlp(block: str, width: int, inner: int) -> Leaves:
    return {
        "gate_proj": kernel(block + ".gate_proj", (width, inner)),
        "up_proj": kernel(block + ".up_proj", (width, inner)),
        "down_proj": kernel(block + ".down_proj", (inner, width)),
    }


def _dense(h: str, c: Config) -> Leaves:
    leaves = _mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])
    return {f"mlp.{part}.kernel": view for part, view in leaves.items()}


def _experts(h: str, c: Config, count: int) -> Leaves:
    """Return the router, and each part of all experts in one array."""
    width = c["hidden_size"]
    experts = [_mlp(f"{h}mlp.experts.{e}", width, c["moe_intermediate_size"]) for e in range(count)]
    return {
        "mlp.router.kernel": kernel(h + "mlp.gate", (width, count)),
        **{f"mlp.{part}": stack([expert[part] for expert in experts]) for part in experts[0]},
    }


def _decoder_layer(h: str, c: Config) -> Leaves:
    """Return what the layers of Qwen and Llama have in common, except their MLP."""
    width = c["hidden_size"]
    return {
        "input_layernorm.w": norm(h + "input_layernorm", width),
        "post_attention_layernorm.w": norm(h + "post_attention_layernorm", width),
        **{f"attn.{part}_proj.w": view for part, view in _heads(h, c).items()},
        "attn.o_proj.w": _out(h, c),
    }


def _qwen2_layer(h: str, c: Config) -> Leaves:
    biases = {
        f"attn.{part}_bias": tensor(f"{h}self_attn.{part}_proj.bias", (c[heads] * c["head_dim"],))
        for part, heads in _QKV.items()
    }
    return {**_decoder_layer(h, c), **biases, **_dense(h, c)}


def _qwen3_layer(h: str, c: Config) -> Leaves:
    norms = {f"attn.{part}_norm.w": norm(f"{h}self_attn.{part}_norm", c["head_dim"]) for part in "qk"}
    count = c.get("num_local_experts", c.get("num_experts"))
    return {**_decoder_layer(h, c), **norms, **(_experts(h, c, count) if count else _dense(h, c))}


def _llama3_layer(h: str, c: Config) -> Leaves:
    return {**_decoder_layer(h, c), **_dense(h, c)}


def _gemma3_layer(h: str, c: Config) -> Leaves:
    """Return a layer, in which queries, keys and values are one array if they have as many heads."""
    width = c["hidden_size"]
    q, k, v = (view.transpose((1, 0, 2)) for view in _heads(h, c).values())
    apart = {"attn.q_einsum.w": q, "attn.kv_einsum.w": stack([k, v])} if q.shape != k.shape else {}
    return {
        **(apart or {"attn.qkv_einsum.w": stack([q, k, v])}),
        "attn.attn_vec_einsum.w": _out(h, c),
        "attn._query_norm.scale": norm(h + "self_attn.q_norm", c["head_dim"]),
        "attn._key_norm.scale": norm(h + "self_attn.k_norm", c["head_dim"]),
        "pre_attention_norm.scale": norm(h + "input_layernorm", width),
        "post_attention_norm.scale": norm(h + "post_attention_layernorm", width),
        "pre_ffw_norm.scale": norm(h + "pre_feedforward_layernorm", width),
        "post_ffw_norm.scale": norm(h + "post_feedforward_layernorm", width),
        **_dense(h, c),
    }


def _model(
    c: Config, layer: Callable[[str, Config], Leaves], scale: str, prefix: str = "model.", unused: Sequence[str] = ()
) -> Tree:
    """Return the whole tree; `scale` is the last key of the last norm."""
    width, vocabulary, head = c["hidden_size"], c["vocab_size"], head_beside(prefix)
    leaves = {
        "embedder.input_embedding": tensor(f"{prefix}embed_tokens.weight", (vocabulary, width)),
        f"final_norm.{scale}": norm(f"{prefix}norm", width),
    }
    for i in range(c["num_hidden_layers"]):
        leaves |= {f"layers.{i}.{path}": view for path, view in layer(f"{prefix}layers.{i}.", c).items()}
    unused = [r".+\.rotary_emb\.inv_freq", *unused]
    if c["tie_word_embeddings"]:
        unused.append(rf"{re.escape(head)}\.weight")
    else:
        leaves["lm_head.w"] = kernel(head, (width, vocabulary))
    return Tree(leaves, unused=unused)


def _qwen2(config: Config) -> Tree:
    return _model(completed(config), _qwen2_layer, "w")


def _qwen3(config: Config) -> Tree:
    return _model(completed(config), _qwen3_layer, "w")


def _llama3(config: Config) -> Tree:
    return _model(completed(config), _llama3_layer, "w")


def _gemma3(config: Config) -> Tree:
    text, prefix = text_config(config, LANGUAGE_MODEL, tied=True)
    return _model(completed(text, **GEMMA3_TEXT), _gemma3_layer, "scale", prefix, [GEMMA3_VISION])


FAMILIES = (
    Family("tunix.qwen2", ("Qwen2ForCausalLM",), _qwen2),
    Family("tunix.qwen3", ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"), _qwen3),
    Family("tunix.llama3", ("LlamaForCausalLM",), _llama3),
    Family(
        "tunix.gemma3",
        ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
        _gemma3,
        renames=language_model_spellings,
    ),
)
