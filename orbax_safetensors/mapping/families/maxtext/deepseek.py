"""MaxText's DeepSeek-V2, V3 and V3.2: dense layers, then layers of experts, all with multi-head latent attention.

Kimi K2 is a V3, and so is the language model of Kimi K2.5 and K2.6, which also read images.

From V3 on, the layers after the last decoder layer are for multi-token prediction. `transformers` drops them, so that
only some checkpoints have them.
"""

from __future__ import annotations

import re

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import Tree, tensor
from orbax_safetensors.mapping.families.maxtext.common import (
    Layer,
    experts,
    family,
    layer_norms,
    mlp,
    model,
    refuse,
    require,
    stacked_or_numbered,
    under,
    variants_with,
)
from orbax_safetensors.mapping.families.stored import (
    LANGUAGE_MODEL,
    Config,
    Leaves,
    biased_norm,
    completed,
    kernel,
    language_model_spellings,
    norm,
    text_config,
)

_KIMI_VISION = r"(model\.)?(vision_tower|mm_projector)\..+"


def _queries(a: str, c: Config) -> Leaves:
    width, heads, size = c["hidden_size"], c["num_attention_heads"], c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    rank = c["q_lora_rank"]
    if rank is None:
        return {"query.kernel": kernel(a + "q_proj", (width, heads, size))}
    return {
        "wq_a.kernel": kernel(a + "q_a_proj", (width, rank)),
        "q_norm.scale": norm(a + "q_a_layernorm", rank),
        "wq_b.kernel": kernel(a + "q_b_proj", (rank, heads, size)),
    }


def _attention(a: str, c: Config) -> Leaves:
    width, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    return {
        **_queries(a, c),
        "wkv_a.kernel": kernel(a + "kv_a_proj_with_mqa", (width, rank + c["qk_rope_head_dim"])),
        "kv_norm.scale": norm(a + "kv_a_layernorm", rank),
        "wkv_b.kernel": kernel(a + "kv_b_proj", (rank, heads, c["qk_nope_head_dim"] + c["v_head_dim"])),
        "out.kernel": kernel(a + "o_proj", (heads, c["v_head_dim"], width), inputs=2),
    }


def _dense(h: str, c: Config) -> Leaves:
    return {
        **layer_norms(h, c),
        **under("self_attention", _attention(h + "self_attn.", c)),
        **under("mlp", mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])),
    }


def _sparse(h: str, c: Config) -> Leaves:
    width, inner = c["hidden_size"], c["moe_intermediate_size"]
    block = {
        **under("MoeBlock_0", experts(h + "mlp", c["n_routed_experts"], width, inner)),
        **under("shared_experts", mlp(h + "mlp.shared_experts", width, c["n_shared_experts"] * inner)),
    }
    return {
        **layer_norms(h, c),
        **under("self_attention", _attention(h + "self_attn.", c)),
        **under("DeepSeekMoeBlock_0", block),
    }


def _sparse_v3(h: str, c: Config) -> Leaves:
    bias = tensor(h + "mlp.gate.e_score_correction_bias", (c["n_routed_experts"],))
    return {**_sparse(h, c), "DeepSeekMoeBlock_0.MoeBlock_0.gate.bias": bias}


def _indexer(h: str, c: Config) -> Leaves:
    """Return the indexer, which chooses the tokens of sparse attention."""
    i = h + "self_attn.indexer."
    width, heads, size = c["hidden_size"], c["index_n_heads"], c["index_head_dim"]
    parts = {
        "wq_b.kernel": kernel(i + "wq_b", (c["q_lora_rank"], heads, size)),
        "wk.kernel": kernel(i + "wk", (width, size)),
        "weights_proj.kernel": kernel(i + "weights_proj", (width, heads)),
        **under("k_norm", biased_norm(i + "k_norm", size)),
    }
    return under("self_attention.indexer", parts)


def _dense_v3_2(h: str, c: Config) -> Leaves:
    return {**_dense(h, c), **_indexer(h, c)}


def _sparse_v3_2(h: str, c: Config) -> Leaves:
    return {**_sparse_v3(h, c), **_indexer(h, c)}


def _predictor(k: int, h: str, c: Config, sparse: Layer) -> Leaves:
    """Return layer `k`, from 1, of multi-token prediction."""
    width = c["hidden_size"]
    parts = {
        "embedding_norm.scale": norm(h + "enorm", width),
        "hidden_state_norm.scale": norm(h + "hnorm", width),
        "projection.kernel": kernel(h + "eh_proj", (2 * width, width)),
        **under("transformer_layer", sparse(h, c)),
    }
    return {f"mtp_block.mtp_layer_{k}.mtp_{k}_{path}": view for path, view in parts.items()}


def _tree(
    config: Config,
    scan_layers: bool,
    param_scan_axis: int,
    vocab_size: int | None,
    *,
    dense: Layer,
    sparse: Layer,
    mtp: bool | None,
) -> Tree:
    text, prefix = text_config(config, LANGUAGE_MODEL)
    c = completed(text)
    refuse(c, "attention_bias", "mlp_bias")
    require(c, moe_layer_freq=1)
    first, last = c["first_k_dense_replace"], c["num_hidden_layers"]
    layers = range(last)  # not their names: a config may have any number
    decoder = {
        **stacked_or_numbered(
            "dense_layers", [dense(f"{prefix}layers.{i}.", c) for i in layers[:first]], scan_layers, param_scan_axis
        ),
        **stacked_or_numbered(
            "moe_layers", [sparse(f"{prefix}layers.{i}.", c) for i in layers[first:]], scan_layers, param_scan_axis
        ),
    }
    predictors = range(last, last + (c.get("num_nextn_predict_layers") or 0))
    if len(predictors) > last:
        raise MappingError(
            f"config.json has num_nextn_predict_layers = {len(predictors)}, more than the {last} of num_hidden_layers"
        )
    if mtp and not predictors:
        raise MappingError("mtp is True, and config.json has no num_nextn_predict_layers")
    beside: Leaves = {}
    if mtp is not False:
        for k, i in enumerate(predictors, 1):
            beside |= _predictor(k, f"{prefix}layers.{i}.", c, sparse)
    # Embedding and head are copies of the model's. MaxText 0.2.4 does not have the norm of the head.
    unused = ".+" if mtp is False else r"(embed_tokens|shared_head)\..+"
    return model(
        c,
        decoder,
        vocab_size,
        prefix=prefix,
        beside=beside,
        unused=[_KIMI_VISION, *(rf"{re.escape(prefix)}layers\.{i}\.{unused}" for i in predictors)],
        optional=[r"params\.mtp_block\..+"] if mtp is None else [],
    )


def deepseek2(
    config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1, vocab_size: int | None = None
) -> Tree:
    """Return the tree of V2, or of V2-Lite, whose queries are not of low rank."""
    return _tree(config, scan_layers, param_scan_axis, vocab_size, dense=_dense, sparse=_sparse, mtp=False)


def deepseek3(
    config: Config,
    *,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    mtp: bool | None = None,
) -> Tree:
    """Return the tree of V3, or of Kimi's language model.

    `mtp` says whether it has the layers of multi-token prediction; if None, if stored.
    """
    return _tree(config, scan_layers, param_scan_axis, vocab_size, dense=_dense, sparse=_sparse_v3, mtp=mtp)


def deepseek3_2(
    config: Config,
    *,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    mtp: bool | None = None,
) -> Tree:
    """Return the tree of V3.2: V3 with an indexer in its attention. `mtp` is as for V3."""
    return _tree(config, scan_layers, param_scan_axis, vocab_size, dense=_dense_v3_2, sparse=_sparse_v3_2, mtp=mtp)


_variants = variants_with(mtp="mtp_block.")
DEEPSEEK2 = family("maxtext.deepseek2", ("DeepseekV2ForCausalLM",), deepseek2)
DEEPSEEK3 = family(
    "maxtext.deepseek3",
    ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    deepseek3,
    renames=language_model_spellings,
    variants=_variants,
)
DEEPSEEK3_2 = family("maxtext.deepseek3_2", ("DeepseekV32ForCausalLM",), deepseek3_2, variants=_variants)
