"""MaxText's DeepSeek-V4: attention over compressed keys, and hyper-connections around attention and experts.

If layers are stacked, the first three stay alone, and the others come in pairs. Two kinds of tensors have no place in
MaxText's parameters: the routers' biases, and the tables that choose experts by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import Tree, full, tensor
from orbax_safetensors.mapping.families.maxtext.common import (
    experts,
    family,
    mlp,
    model,
    numbered,
    refuse,
    require,
    stacked,
    under,
)
from orbax_safetensors.mapping.families.stored import Config, Leaves, completed, kernel, norm

_ALONE = 3  # layers at the start, which choose experts by token
_PAIR = [128, 4]  # the ratios of all others
_STREAMS = 4  # of hidden states, which hyper-connections mix

# How many keys are compressed to one, by kind of attention; 0 if none are.
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}

# The tree uses the names that `transformers` saves. Published files lack `model.`, and MaxText's converter wants the
# names that `transformers` has inside.
_OTHER_SPELLINGS = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^(norm\.|layers\.)", r"model.\1"),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"^lm_head\.", "head."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.mlp\.", ".ffn."),
    (r"\.self_attn\.", ".attn."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.compressor\.indexer\.(scorer\.|q_b_proj\.)", r".indexer.\1"),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.scorer\.", "."),
    (r"\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.kv_norm\.", ".norm."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.(q|o)_([ab])_proj\.", r".w\1_\2."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
)
# The stored names of gate, up and down.
_PARTS = ("w1", "w3", "w2")


def _ratios(c: Config) -> list[int]:
    """Return the ratio of every layer. Configs of `transformers` name the kinds, published ones list ratios."""
    count = c["num_hidden_layers"]
    ratios = (
        [_RATIOS.get(kind, kind) for kind in c["layer_types"]] if c.get("layer_types") else list(c["compress_ratios"])
    )
    if len(ratios) < count or not set(ratios) <= set(_RATIOS.values()):
        raise MappingError(f"expected one of the ratios {list(_RATIOS.values())} for {count} layers, found {ratios}")
    return ratios[:count]


def _compressed(name: str, width: int, size: int, ratio: int) -> Leaves:
    """Return what compresses `ratio` keys of a `size` to one. If it is 4, neighbouring keys overlap."""
    columns = 2 * size if ratio == 4 else size
    return {
        "kv_proj.kernel": kernel(f"{name}.wkv", (width, columns)),
        "gate_proj.kernel": kernel(f"{name}.wgate", (width, columns)),
        "position_bias": tensor(f"{name}.ape", (ratio, columns)),
        "kv_norm.scale": norm(f"{name}.norm", size),
    }


def _compressor(a: str, c: Config, ratio: int) -> Leaves:
    width, indexer = c["hidden_size"], a + "indexer"
    parts = _compressed(a + "compressor", width, c["head_dim"], ratio)
    if ratio != 4:
        return under("hca_compressor", parts)
    heads, size = c["index_n_heads"], c["index_head_dim"]
    chosen = {
        **_compressed(f"{indexer}.compressor", width, size, ratio),
        "q_proj.kernel": kernel(f"{indexer}.wq_b", (c["q_lora_rank"], heads * size)),
        "weights_proj.kernel": kernel(f"{indexer}.weights_proj", (width, heads)),
    }
    return under("csa_compressor", {**parts, **under("indexer", chosen)})


def _attention(a: str, c: Config, ratio: int) -> Leaves:
    width, heads, size, rank = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["q_lora_rank"]
    groups, out_rank = c["o_groups"], c["o_lora_rank"]
    out = tensor(a + "wo_a.weight", (groups * out_rank, heads * size // groups))
    return {
        "wq_a.kernel": kernel(a + "wq_a", (width, rank)),
        "q_norm.scale": norm(a + "q_norm", rank),
        "wq_b.kernel": kernel(a + "wq_b", (rank, heads, size)),
        "wkv.kernel": kernel(a + "wkv", (width, 1, size)),
        "kv_norm.scale": norm(a + "norm", size),
        "sinks": tensor(a + "attn_sink", (heads,)),
        "o_a_proj.kernel": out.reshape((groups, out_rank, heads * size // groups)).transpose((0, 2, 1)),
        "o_b_proj.kernel": kernel(a + "wo_b", (groups * out_rank, width)),
        **(_compressor(a, c, ratio) if ratio else {}),
    }


def _hyper_connection(name: str, width: int) -> Leaves:
    """Return the weights of streams into a block, out of it and past it, which are stored together.

    The norm before them has no stored scale; MaxText's is always float32.
    """
    total = 2 * _STREAMS + _STREAMS**2
    alphas = tensor(f"{name}_fn", (total, _STREAMS * width))
    betas = tensor(f"{name}_base", (total,))
    scales = tensor(f"{name}_scale", (3,))
    leaves = {"mhc_norm.scale": full((_STREAMS * width,), 1, np.dtype("f4"))}
    starts = (0, _STREAMS, 2 * _STREAMS, total)
    for at, part in enumerate(("pre", "post", "res")):
        rows = slice(starts[at], starts[at + 1])
        beta = betas.slice(rows)
        leaves[f"{part}_alpha"] = alphas.slice(rows).T
        leaves[f"{part}_beta"] = beta.reshape((_STREAMS, _STREAMS)) if part == "res" else beta
        leaves[f"{part}_alpha_scale"] = scales.slice(slice(at, at + 1))
    return leaves


def _layer(h: str, c: Config, ratio: int) -> Leaves:
    width, inner = c["hidden_size"], c["moe_intermediate_size"]
    routed = experts(h + "ffn", c["n_routed_experts"], width, inner, _PARTS)
    return {
        "pre_self_attention_layer_norm.scale": norm(h + "attn_norm", width),
        "post_self_attention_layer_norm.scale": norm(h + "ffn_norm", width),
        **under("self_attention", _attention(h + "attn.", c, ratio)),
        **under("mhc_attention", _hyper_connection(h + "hc_attn", width)),
        **under("mhc_mlp", _hyper_connection(h + "hc_ffn", width)),
        **under("mlp.MoeBlock_0", routed),
        **under("mlp.shared_experts", mlp(h + "ffn.shared_experts", width, c["n_shared_experts"] * inner, _PARTS)),
    }


def _in_pairs(layers: Sequence[Leaves], ratios: Sequence[int], axis: int) -> Leaves:
    """Return the first layers alone, and a stack of the layers at each of two positions."""
    if ratios[_ALONE:] != _PAIR * (len(ratios[_ALONE:]) // 2):
        raise MappingError(
            f"MaxText stacks the layers after the first {_ALONE} in pairs of the ratios {_PAIR}; "
            f"config.json has the ratios {ratios}"
        )
    cycle = [stacked(layers[_ALONE + position :: 2], axis) for position in range(2)]
    return {**numbered("layers", layers[:_ALONE]), **under("scanned_blocks", numbered("layers", cycle))}


def deepseek4(
    config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1, vocab_size: int | None = None
) -> Tree:
    """Return the tree of V4, without the routers' biases, which a save therefore leaves out."""
    c = completed(config, n_shared_experts=1)
    refuse(c, "attention_bias", "mlp_bias")
    require(c, hc_mult=_STREAMS, num_hash_layers=_ALONE)
    ratios = _ratios(c)
    layers = [_layer(f"model.layers.{i}.", c, ratio) for i, ratio in enumerate(ratios)]
    decoder = _in_pairs(layers, ratios, param_scan_axis) if scan_layers else numbered("layers", layers)
    width = c["hidden_size"]
    mixing = {
        "hc_fn": tensor("model.hc_head.hc_fn", (_STREAMS, _STREAMS * width)).T,
        "hc_base": tensor("model.hc_head.hc_base", (_STREAMS,)),
        "hc_scale": tensor("model.hc_head.hc_scale", (1,)),
    }
    return model(
        c,
        {**decoder, **under("hc_head", mixing)},
        vocab_size,
        head="head",
        unused=[r"model\.layers\.\d+\.ffn\.gate\.(tid2eid|bias)", r"(model\.)?mtp\..+"],
    )


DEEPSEEK4 = family("maxtext.deepseek4", ("DeepseekV4ForCausalLM",), deepseek4, renames=_OTHER_SPELLINGS)
