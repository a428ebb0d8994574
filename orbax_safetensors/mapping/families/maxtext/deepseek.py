"""MaxText's DeepSeek-V2, V3 and V3.2: dense layers, then layers of experts, all with multi-head latent attention.

From V3 on, layers after the last are those of multi-token prediction. `transformers` drops them, so that checkpoints
have them or not.
"""

from __future__ import annotations

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import Family, Tree, tensor
from orbax_safetensors.mapping.families.maxtext.common import (
    Config,
    Leaves,
    alike,
    completed,
    experts,
    kernel,
    layer_norms,
    mlp,
    model,
    norm,
    refuse,
    under,
)


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


def _indexer(a: str, c: Config) -> Leaves:
    """What chooses the tokens of sparse attention."""
    width, heads, size = c["hidden_size"], c["index_n_heads"], c["index_head_dim"]
    return {
        "wq_b.kernel": kernel(a + "indexer.wq_b", (c["q_lora_rank"], heads, size)),
        "wk.kernel": kernel(a + "indexer.wk", (width, size)),
        "weights_proj.kernel": kernel(a + "indexer.weights_proj", (width, heads)),
        "k_norm.scale": norm(a + "indexer.k_norm", size),
        "k_norm.bias": tensor(a + "indexer.k_norm.bias", (size,)),
    }


def _tree(
    config: Config,
    scan_layers: bool,
    param_scan_axis: int,
    vocab_size: int | None,
    *,
    mtp: bool | None,
    gate_bias: bool,
    indexed: bool,
) -> Tree:
    c = completed(config)
    refuse(c, "attention_bias", "mlp_bias")
    count, width, inner = c["n_routed_experts"], c["hidden_size"], c["moe_intermediate_size"]

    def attention(h: str) -> Leaves:
        a = h + "self_attn."
        return {
            **layer_norms(h, c),
            **under("self_attention", _attention(a, c)),
            **(under("self_attention.indexer", _indexer(a, c)) if indexed else {}),
        }

    def dense(h: str) -> Leaves:
        return {**attention(h), **under("mlp", mlp(h + "mlp", width, c["intermediate_size"]))}

    def sparse(h: str) -> Leaves:
        bias = {"gate.bias": tensor(h + "mlp.gate.e_score_correction_bias", (count,))} if gate_bias else {}
        block = {
            **under("MoeBlock_0", {**experts(h + "mlp", count, width, inner), **bias}),
            **under("shared_experts", mlp(h + "mlp.shared_experts", width, c["n_shared_experts"] * inner)),
        }
        return {**attention(h), **under("DeepSeekMoeBlock_0", block)}

    def predictor(k: int, h: str) -> Leaves:
        parts = {
            "embedding_norm.scale": norm(h + "enorm", width),
            "hidden_state_norm.scale": norm(h + "hnorm", width),
            "projection.kernel": kernel(h + "eh_proj", (2 * width, width)),
            **under("transformer_layer", sparse(h)),
        }
        return {f"mtp_block.mtp_layer_{k}.mtp_{k}_{path}": view for path, view in parts.items()}

    first, last = c["first_k_dense_replace"], c["num_hidden_layers"]
    predictors = range(last, last + (c.get("num_nextn_predict_layers") or 0))
    if mtp and not predictors:
        raise MappingError("mtp=True, and config.json has no num_nextn_predict_layers")
    names = [f"model.layers.{i}." for i in range(last)]
    decoder = {
        **alike("dense_layers", [dense(h) for h in names[:first]], scan_layers, param_scan_axis),
        **alike("moe_layers", [sparse(h) for h in names[first:]], scan_layers, param_scan_axis),
    }
    beside: Leaves = {}
    for k, i in enumerate(predictors, 1):
        beside |= predictor(k, f"model.layers.{i}.") if mtp is not False else {}
    # What a layer of multi-token prediction shares with the model is stored twice.
    left_out = ".+" if mtp is False else r"(embed_tokens|shared_head)\..+"
    return model(
        c,
        decoder,
        vocab_size,
        beside=beside,
        unused=[rf"model\.layers\.{i}\.{left_out}" for i in predictors],
        optional=[r"params\.mtp_block\..+"] if mtp is None else [],
    )


def deepseek2(
    config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1, vocab_size: int | None = None
) -> Tree:
    """Queries are of low rank or, in the small one, not."""
    return _tree(config, scan_layers, param_scan_axis, vocab_size, mtp=False, gate_bias=False, indexed=False)


def deepseek3(
    config: Config,
    *,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    mtp: bool | None = None,
) -> Tree:
    """`mtp`: whether layers of multi-token prediction are in the tree; None where they are stored."""
    return _tree(config, scan_layers, param_scan_axis, vocab_size, mtp=mtp, gate_bias=True, indexed=False)


def deepseek3_2(
    config: Config,
    *,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    mtp: bool | None = None,
) -> Tree:
    """V3 with an indexer in its attention."""
    return _tree(config, scan_layers, param_scan_axis, vocab_size, mtp=mtp, gate_bias=True, indexed=True)


DEEPSEEK2 = Family("maxtext.deepseek2", ("DeepseekV2ForCausalLM",), deepseek2)
DEEPSEEK3 = Family("maxtext.deepseek3", ("DeepseekV3ForCausalLM",), deepseek3)
DEEPSEEK3_2 = Family("maxtext.deepseek3_2", ("DeepseekV32ForCausalLM",), deepseek3_2)
