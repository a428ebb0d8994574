"""What MaxText makes of the stored tensors of three models, in plain NumPy: one row for each parameter of a layer.

A row is `target stored operation sizes...`, with MaxText's spelling of targets. Operations: I, the tensor as it is; R,
its transpose reshaped to the sizes, which is T where there are two; `query` and `rope` are what happens to its values
or the order of its heads; EXPERTS stacks the tensors of all experts.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]

NORMS = """
pre_self_attention_layer_norm-scale    input_layernorm.weight           I
post_self_attention_layer_norm-scale   post_attention_layernorm.weight  I
"""
ATTENTION = """
self_attention-query-kernel   self_attn.q_proj.weight   R D H hd
self_attention-key-kernel     self_attn.k_proj.weight   R D K hd
self_attention-value-kernel   self_attn.v_proj.weight   R D K hd
self_attention-out-kernel     self_attn.o_proj.weight   R H hd D
"""
ROPE = ATTENTION.replace("R D H hd", "R,rope,query D H hd").replace(
    "k_proj.weight   R D K", "k_proj.weight   R,rope D K"
)
QK_NORMS = """
self_attention-query_norm-scale   self_attn.q_norm.weight   I
self_attention-key_norm-scale     self_attn.k_norm.weight   I
"""
MLP = """
mlp-wi_0-kernel   mlp.gate_proj.weight   R D F
mlp-wi_1-kernel   mlp.up_proj.weight     R D F
mlp-wo-kernel     mlp.down_proj.weight   R F D
"""
QWEN_EXPERTS = """
moe_block-gate-kernel   mlp.gate.weight                   R D E
moe_block-wi_0          mlp.experts.{E}.gate_proj.weight  EXPERTS D M
moe_block-wi_1          mlp.experts.{E}.up_proj.weight    EXPERTS D M
moe_block-wo            mlp.experts.{E}.down_proj.weight  EXPERTS M D
"""
LATENT = """
self_attention-wkv_a-kernel    self_attn.kv_a_proj_with_mqa.weight   R D kvr+rope
self_attention-kv_norm-scale   self_attn.kv_a_layernorm.weight       I
self_attention-wkv_b-kernel    self_attn.kv_b_proj.weight            R kvr H nope+v
self_attention-out-kernel      self_attn.o_proj.weight               R H v D
"""
QUERIES = """
self_attention-query-kernel   self_attn.q_proj.weight   R D H nope+rope
"""
LOW_RANK_QUERIES = """
self_attention-wq_a-kernel    self_attn.q_a_proj.weight       R D qr
self_attention-q_norm-scale   self_attn.q_a_layernorm.weight  I
self_attention-wq_b-kernel    self_attn.q_b_proj.weight       R qr H nope+rope
"""
DEEPSEEK_EXPERTS = """
DeepSeekMoeBlock_0-shared_experts-wi_0-kernel  mlp.shared_experts.gate_proj.weight  R D S
DeepSeekMoeBlock_0-shared_experts-wi_1-kernel  mlp.shared_experts.up_proj.weight    R D S
DeepSeekMoeBlock_0-shared_experts-wo-kernel    mlp.shared_experts.down_proj.weight  R S D
DeepSeekMoeBlock_0-MoeBlock_0-gate-kernel      mlp.gate.weight                      R D E
DeepSeekMoeBlock_0-MoeBlock_0-wi_0             mlp.experts.{E}.gate_proj.weight     EXPERTS D M
DeepSeekMoeBlock_0-MoeBlock_0-wi_1             mlp.experts.{E}.up_proj.weight       EXPERTS D M
DeepSeekMoeBlock_0-MoeBlock_0-wo               mlp.experts.{E}.down_proj.weight     EXPERTS M D
"""
GATE_BIAS = """
DeepSeekMoeBlock_0-MoeBlock_0-gate-bias   mlp.gate.e_score_correction_bias   I
"""


class Parameter(NamedTuple):
    """What makes an array of MaxText's: the layers that are stacked in its dimension 1, or the one array that it is."""

    path: str
    parts: list[Callable[[], np.ndarray]]
    stacked: bool

    def made(self) -> np.ndarray:
        """The array."""
        return np.stack([part() for part in self.parts], 1) if self.stacked else self.parts[0]()


def converted(model: str, config: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Arrays:
    """MaxText's scanned parameters, `params-decoder-...`, of `llama3`, `qwen3_moe` or `deepseek3`."""
    return {parameter.path: parameter.made() for parameter in parameters(model, config, stored)}


def parameters(model: str, config: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Iterator[Parameter]:
    """The same, before anything is made."""
    sizes = _sizes(config)
    for path, layers, rows in _groups(model, config):
        for target, parts in _layers(stored, [f"model.layers.{i}." for i in layers], rows, sizes):
            yield Parameter(f"params-decoder-{path}-{target}", parts, True)
    yield Parameter("params-token_embedder-embedding", [lambda: stored["model.embed_tokens.weight"]], False)
    yield Parameter("params-decoder-decoder_norm-scale", [lambda: stored["model.norm.weight"]], False)
    if not config["tie_word_embeddings"]:
        yield Parameter("params-decoder-logits_dense-kernel", [lambda: stored["lm_head.weight"].T], False)


def _groups(model: str, config: Mapping[str, Any]) -> list[tuple[str, range, str]]:
    """For each stack of layers its place in the tree, the numbers of its layers and their rows."""
    every = range(config["num_hidden_layers"])
    if model == "llama3":
        return [("layers", every, NORMS + ROPE + MLP)]
    if model == "qwen3_moe":
        return [("layers", every, NORMS + ATTENTION + QK_NORMS + QWEN_EXPERTS)]
    first = config["first_k_dense_replace"]
    common = NORMS + LATENT + (QUERIES if config["q_lora_rank"] is None else LOW_RANK_QUERIES)
    groups = [("dense_layers", every[:first], common + MLP)]
    groups.append(("moe_layers", every[first:], common + DEEPSEEK_EXPERTS + GATE_BIAS))
    return [group for group in groups if group[1]]


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    names = {
        "D": "hidden_size", "F": "intermediate_size", "M": "moe_intermediate_size", "H": "num_attention_heads",
        "K": "num_key_value_heads", "hd": "head_dim", "kvr": "kv_lora_rank", "qr": "q_lora_rank",
        "nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "v": "v_head_dim",
    }  # fmt: skip
    sizes = {short: config[name] for short, name in names.items() if config.get(name) is not None}
    sizes.setdefault("hd", sizes["D"] // sizes["H"])
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(name) is not None:
            sizes["E"] = config[name]
    if config.get("n_shared_experts") is not None:
        sizes["S"] = config["n_shared_experts"] * config["moe_intermediate_size"]
    return sizes


def _layers(
    stored: Mapping[str, np.ndarray], prefixes: list[str], rows: str, sizes: Mapping[str, int]
) -> Iterator[tuple[str, list[Callable[[], np.ndarray]]]]:
    for row in rows.split("\n"):
        if row:
            target, name, operation, *shape = row.split()
            dims = [sum(sizes[size] for size in part.split("+")) for part in shape]
            operations = operation.split(",")
            yield target, [partial(_one, stored, prefix + name, operations, dims, sizes) for prefix in prefixes]


def _one(
    stored: Mapping[str, np.ndarray], name: str, operations: list[str], dims: list[int], sizes: Mapping[str, int]
) -> np.ndarray:
    if operations == ["EXPERTS"]:
        experts = [stored[name.replace("{E}", str(e))].T for e in range(sizes["E"])]
        assert all(expert.shape == tuple(dims) for expert in experts)
        return np.stack(experts)
    x = stored[name]
    for operation in operations:
        if operation == "R":
            x = x.T.reshape(dims)
        elif operation == "query":
            x = (x * np.float32(1 / math.sqrt(sizes["hd"]))).astype(x.dtype)
        elif operation == "rope":
            out = np.empty_like(x)
            out[..., 0::2], out[..., 1::2] = np.split(x, 2, axis=-1)
            x = out
        else:
            assert operation == "I", operation
    return x
