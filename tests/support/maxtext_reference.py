"""What MaxText makes of stored tensors, in plain NumPy: its converter's tables, one row for each parameter of a layer.

It is the model that the families are compared with, and itself compared with what MaxText's converter made. A row is
`target stored operation sizes...`, with MaxText's spelling of targets. Operations: I, the tensor as it is; R, its
transpose reshaped to the sizes, which is T where there are two; B, reshaped; `+1`, `query` and `rope` are what happens
to its values or the order of its heads; `even` and `odd` are columns; `low` and `high` are halves of the dimension
before the last; `swap` exchanges the last two dimensions, and `first` the first two; `patches` puts the outputs and
channels of a convolution last; `q`, `k` and `v` are thirds of the first dimension; EXPERTS stacks the tensors of all
experts; QKVZ and BA join tensors by heads of keys.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]
# A prefix in the tree, stored layers, their rows, and how many of them are stacked before these stacks are: none if 0.
Group = tuple[str, list[int], str, int]

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
SCALED = ATTENTION.replace("R D H hd", "R,query D H hd")
ROPE = SCALED.replace("R,query D H hd", "R,rope,query D H hd").replace(
    "k_proj.weight   R D K hd", "k_proj.weight   R,rope D K hd"
)
QK_NORMS = """
self_attention-query_norm-scale   self_attn.q_norm.weight   I
self_attention-key_norm-scale     self_attn.k_norm.weight   I
"""
BIASES = """
self_attention-query-bias   self_attn.q_proj.bias   B H hd
self_attention-key-bias     self_attn.k_proj.bias   B K hd
self_attention-value-bias   self_attn.v_proj.bias   B K hd
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
MIXTRAL_EXPERTS = """
MoeBlock_0-gate-kernel   block_sparse_moe.gate.weight            R D E
MoeBlock_0-wi_0          block_sparse_moe.experts.{E}.w1.weight  EXPERTS D F
MoeBlock_0-wi_1          block_sparse_moe.experts.{E}.w3.weight  EXPERTS D F
MoeBlock_0-wo            block_sparse_moe.experts.{E}.w2.weight  EXPERTS F D
"""
LATENT = """
self_attention-wkv_a-kernel    self_attn.kv_a_proj_with_mqa.weight   R D kvr+rope
self_attention-kv_norm-scale   self_attn.kv_a_layernorm.weight       I
self_attention-wkv_b-kernel    self_attn.kv_b_proj.weight            R kvr H nope+v
self_attention-out-kernel      self_attn.o_proj.weight               R H v D
"""
FULL_QUERIES = """
self_attention-query-kernel   self_attn.q_proj.weight   R D H nope+rope
"""
LOW_RANK_QUERIES = """
self_attention-wq_a-kernel    self_attn.q_a_proj.weight       R D qr
self_attention-q_norm-scale   self_attn.q_a_layernorm.weight  I
self_attention-wq_b-kernel    self_attn.q_b_proj.weight       R qr H nope+rope
"""
INDEXER = """
self_attention-indexer-wq_b-kernel           self_attn.indexer.wq_b.weight          R qr ih ihd
self_attention-indexer-wk-kernel             self_attn.indexer.wk.weight            R D ihd
self_attention-indexer-weights_proj-kernel   self_attn.indexer.weights_proj.weight  R D ih
self_attention-indexer-k_norm-scale          self_attn.indexer.k_norm.weight        I
self_attention-indexer-k_norm-bias           self_attn.indexer.k_norm.bias          I
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
PREDICTOR = """
mtp_1_embedding_norm-scale      enorm.weight    I
mtp_1_hidden_state_norm-scale   hnorm.weight    I
mtp_1_projection-kernel         eh_proj.weight  R 2D D
"""
GPT_OSS = """
GptOssAttention-query-kernel   self_attn.q_proj.weight        R D H hd
GptOssAttention-query-bias     self_attn.q_proj.bias          B H hd
GptOssAttention-key-kernel     self_attn.k_proj.weight        R D K hd
GptOssAttention-key-bias       self_attn.k_proj.bias          B K hd
GptOssAttention-value-kernel   self_attn.v_proj.weight        R D K hd
GptOssAttention-value-bias     self_attn.v_proj.bias          B K hd
GptOssAttention-out-kernel     self_attn.o_proj.weight        R H hd D
GptOssAttention-out-bias       self_attn.o_proj.bias          I
GptOssAttention-sinks          self_attn.sinks                I
GptOssMlp-gate-kernel          mlp.router.weight              R D E
GptOssMlp-gate-bias            mlp.router.bias                I
GptOssMlp-wi_0                 mlp.experts.gate_up_proj       even
GptOssMlp-wi_1                 mlp.experts.gate_up_proj       odd
GptOssMlp-wo                   mlp.experts.down_proj          I
GptOssMlp-wi_0_bias            mlp.experts.gate_up_proj_bias  even
GptOssMlp-wi_1_bias            mlp.experts.gate_up_proj_bias  odd
GptOssMlp-wo_bias              mlp.experts.down_proj_bias     I
"""
GEMMA_NORMS = """
pre_self_attention_norm-scale    input_layernorm.weight             +1
post_self_attention_norm-scale   post_attention_layernorm.weight    +1
pre_ffw_norm-scale               pre_feedforward_layernorm.weight   +1
post_ffw_norm-scale              post_feedforward_layernorm.weight  +1
"""
OLMO3 = (
    MLP
    + """
attention-query-kernel                 self_attn.q_proj.weight            R D H hd
attention-key-kernel                   self_attn.k_proj.weight            R D K hd
attention-value-kernel                 self_attn.v_proj.weight            R D K hd
attention-out-kernel                   self_attn.o_proj.weight            R H hd D
attention-query_norm-scale             self_attn.q_norm.weight            I
attention-key_norm-scale               self_attn.k_norm.weight            I
post_self_attention_layer_norm-scale   post_attention_layernorm.weight    I
post_mlp_layer_norm-scale              post_feedforward_layernorm.weight  I
"""
)
NEXT_COMMON = """
input_layernorm-scale                input_layernorm.weight                      I
post_attention_layernorm-scale       post_attention_layernorm.weight             I
mlp-routed_experts-gate-kernel       mlp.gate.weight                             R D E
mlp-shared_expert_gate-kernel        mlp.shared_expert_gate.weight               R D 1
mlp-shared_expert-wi_0-kernel        mlp.shared_expert.gate_proj.weight          R D S
mlp-shared_expert-wi_1-kernel        mlp.shared_expert.up_proj.weight            R D S
mlp-shared_expert-wo-kernel          mlp.shared_expert.down_proj.weight          R S D
"""
NEXT_EXPERTS = QWEN_EXPERTS[QWEN_EXPERTS.index("moe_block-wi_0") :].replace("moe_block-", "mlp-routed_experts-")
NEXT_FULL = """
attention-attention-query-kernel       self_attn.q_proj.weight  R D H 2hd
attention-attention-key-kernel         self_attn.k_proj.weight  R D K hd
attention-attention-value-kernel       self_attn.v_proj.weight  R D K hd
attention-attention-out-kernel         self_attn.o_proj.weight  R H*hd D
attention-attention-query_norm-scale   self_attn.q_norm.weight  I
attention-attention-key_norm-scale     self_attn.k_norm.weight  I
"""
NEXT_LINEAR = """
attention-in_proj_qkvz-kernel   linear_attn.in_proj_qkvz.weight  R D keys+keys+values+values
attention-in_proj_ba-kernel     linear_attn.in_proj_ba.weight    R D hv+hv
attention-conv1d-kernel         linear_attn.conv1d.weight        R conv 1 keys+keys+values
attention-A_log                 linear_attn.A_log                I
attention-dt_bias               linear_attn.dt_bias              I
attention-norm-rms_norm-scale   linear_attn.norm.weight          I
attention-out_proj-kernel       linear_attn.out_proj.weight      R values D
"""
QWEN3_5_LINEAR = "\n".join(
    [
        "attention-in_proj_qkvz-kernel  linear_attn.in_proj_{}.weight  QKVZ",
        "attention-in_proj_ba-kernel    linear_attn.in_proj_{}.weight  BA",
        *(row for row in NEXT_LINEAR.split("\n") if "in_proj" not in row),
    ]
)
QWEN3_5_EXPERTS = """
mlp-routed_experts-wi_0   mlp.experts.gate_up_proj  low,swap
mlp-routed_experts-wi_1   mlp.experts.gate_up_proj  high,swap
mlp-routed_experts-wo     mlp.experts.down_proj     swap
"""
QWEN_TOWER = """
VisionEncoder_0-patch_embed-proj-kernel           patch_embed.proj.weight    patches
VisionEncoder_0-patch_embed-proj-bias             patch_embed.proj.bias      I
VisionEncoder_0-pos_embed_interpolate-pos_embed   pos_embed.weight           I
VisionProjector_0-merger-ln_q-scale               merger.norm.weight         I
VisionProjector_0-merger-ln_q-bias                merger.norm.bias           I
VisionProjector_0-merger-mlp_0-kernel             merger.linear_fc1.weight   R joined joined
VisionProjector_0-merger-mlp_0-bias               merger.linear_fc1.bias     I
VisionProjector_0-merger-mlp_2-kernel             merger.linear_fc2.weight   R joined out
VisionProjector_0-merger-mlp_2-bias               merger.linear_fc2.bias     I
"""
QWEN_TOWER_LAYER = """
ln1-scale                norm1.weight            I
ln1-bias                 norm1.bias              I
ln2-scale                norm2.weight            I
ln2-bias                 norm2.bias              I
attn-attn-query-kernel   attn.qkv.weight         q,R D H hd
attn-attn-key-kernel     attn.qkv.weight         k,R D H hd
attn-attn-value-kernel   attn.qkv.weight         v,R D H hd
attn-attn-query-bias     attn.qkv.bias           q,B H hd
attn-attn-key-bias       attn.qkv.bias           k,B H hd
attn-attn-value-bias     attn.qkv.bias           v,B H hd
attn-attn-out-kernel     attn.proj.weight        R H hd D
attn-attn-out-bias       attn.proj.bias          I
mlp-kernel               mlp.linear_fc1.weight   R D F
mlp-bias                 mlp.linear_fc1.bias     I
mlp_out-kernel           mlp.linear_fc2.weight   R F D
mlp_out-bias             mlp.linear_fc2.bias     I
"""
GEMMA2 = GEMMA_NORMS + SCALED + MLP
GEMMA3 = GEMMA_NORMS + ATTENTION + QK_NORMS.replace(" I", " +1") + MLP
GEMMA4 = (
    GEMMA_NORMS.replace("+1", "I")
    + """
layer_scalar  layer_scalar  I
"""
)
GEMMA4_LOCAL = GEMMA4 + ATTENTION + QK_NORMS
GEMMA4_GLOBAL = GEMMA4_LOCAL.replace(" K ", " gK ").replace(" hd", " ghd")
SHARED_EXPERTS = MLP.replace("mlp-wi", "mlp-moe_block-shared_experts-wi").replace(
    "mlp-wo", "mlp-moe_block-shared_experts-wo"
)
GEMMA4_EXPERTS = (
    SHARED_EXPERTS
    + """
mlp-moe_block-MoeBlock_0-gate-kernel        router.proj.weight                     R D E
mlp-moe_block-MoeBlock_0-wi_0               experts.gate_up_proj                   low,swap
mlp-moe_block-MoeBlock_0-wi_1               experts.gate_up_proj                   high,swap
mlp-moe_block-MoeBlock_0-wo                 experts.down_proj                      swap
mlp-moe_block-MoeBlock_0-per_expert_scale   router.per_expert_scale                I
mlp-pre_forward_scale_2                     router.scale                           I
mlp-pre_feedforward_layernorm_2-scale       pre_feedforward_layernorm_2.weight     I
mlp-post_feedforward_layernorm_1-scale      post_feedforward_layernorm_1.weight    I
mlp-post_feedforward_layernorm_2-scale      post_feedforward_layernorm_2.weight    I
"""
)
PER_LAYER_INPUT = """
per_layer_input_gate-kernel       per_layer_input_gate.weight       R D P
per_layer_projection-kernel       per_layer_projection.weight       R P D
post_per_layer_input_norm-scale   post_per_layer_input_norm.weight  I
"""
PER_LAYER_EMBEDDER = """
per_layer_embedder-embed_tokens_per_layer             embed_tokens_per_layer.weight      I
per_layer_embedder-per_layer_model_projection-kernel  per_layer_model_projection.weight  R D LP
per_layer_embedder-per_layer_projection_norm-scale    per_layer_projection_norm.weight   I
"""
GEMMA4_TOWER = """
vision_entry-input_projection-kernel  patch_embedder.input_proj.weight        R patch D
vision_entry-pos_emb_param            patch_embedder.position_embedding_table first
std_scale                             std_scale                               I
std_bias                              std_bias                                I
"""
GEMMA4_TOWER_LAYER = (
    GEMMA_NORMS.replace("+1", "I").replace("self_attention_norm", "attention_norm")
    + (ATTENTION + MLP).replace("self_attention-", "attention-").replace("_proj.", "_proj.linear.")
    + QK_NORMS.replace("self_attention-", "attention-")
)
UNIFORM = {
    "qwen3": NORMS + ATTENTION + QK_NORMS + MLP,
    "qwen3_moe": NORMS + ATTENTION + QK_NORMS + QWEN_EXPERTS,
    "qwen2_5": NORMS + ATTENTION + BIASES + MLP,
    "llama3": NORMS + ROPE + MLP,
    "mistral": NORMS + SCALED + MLP,
    "mixtral": NORMS + SCALED + MIXTRAL_EXPERTS,
}

MODELS = [
    *UNIFORM, "deepseek2", "deepseek3", "deepseek3_2", "gemma2", "gemma3", "gemma4", "gemma4_small", "gpt_oss", "olmo3",
    "qwen3_5", "qwen3_next",
]  # fmt: skip


def converted(
    model: str,
    config: Mapping[str, Any],
    stored: Mapping[str, np.ndarray],
    *,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
    mtp: bool = False,
    separate_experts: bool = False,
) -> Arrays:
    """MaxText's parameters, `params-decoder-...`, of the stored tensors of `model`, which is the family's last name.

    The config has everything that its class in `transformers` has.
    """
    part = "language_model.model." if model == "gemma3" else "model.language_model."
    prefix = part if "text_config" in config else "model."
    c = config.get("text_config", config)
    sizes = _sizes(c)
    out: Arrays = {}
    for path, layers, rows, stacked in _groups(model, c, scan_layers, separate_experts):
        for target, arrays in _layers(stored, [f"{prefix}layers.{i}." for i in layers], rows, sizes):
            out[f"params-{path}-{target}"] = _stacked(arrays, stacked, param_scan_axis) if stacked else arrays[0]
    if model == "gemma4_small" and c["hidden_size_per_layer_input"]:
        for target, (array,) in _layers(stored, [prefix], PER_LAYER_EMBEDDER, sizes):
            out[f"params-decoder-{target}"] = array
    if model == "gemma4" and "vision_config" in config:
        out |= _gemma4_tower(config["vision_config"], c, stored)
    if model == "qwen3_5" and "vision_config" in config:
        out |= _qwen_tower(config["vision_config"], stored)
    if mtp:
        layer = [f"{prefix}layers.{c['num_hidden_layers']}."]
        top = "params-mtp_block-mtp_layer_1-"
        inner = NORMS + LATENT + LOW_RANK_QUERIES + DEEPSEEK_EXPERTS + GATE_BIAS
        inner += INDEXER if model == "deepseek3_2" else ""
        out |= {top + target: arrays[0] for target, arrays in _layers(stored, layer, PREDICTOR, sizes)}
        for target, arrays in _layers(stored, layer, inner, sizes):
            out[f"{top}mtp_1_transformer_layer-{target}"] = arrays[0]
    return out | _ends(model, c, stored, prefix, vocab_size)


def _stacked(arrays: list[np.ndarray], size: int, axis: int) -> np.ndarray:
    """The arrays stacked by `size`, and these stacks stacked."""
    if size > 1:
        arrays = [np.stack(arrays[at : at + size], axis) for at in range(0, len(arrays), size)]
    return np.stack(arrays, axis)


def _ends(
    model: str, c: Mapping[str, Any], stored: Mapping[str, np.ndarray], prefix: str, vocab_size: int | None
) -> Arrays:
    """The embedding, the last norm and the kernel of the logits."""
    embedding = stored[prefix + "embed_tokens.weight"]
    more = (vocab_size or c["vocab_size"]) - c["vocab_size"]
    embedding = np.concatenate([embedding, np.zeros((more, embedding.shape[1]), embedding.dtype)])
    if model in ("gemma2", "gemma4", "gemma4_small"):
        embedding = (embedding * np.float32(c["hidden_size"] ** 0.5)).astype(embedding.dtype)
    if model == "gemma3":
        embedding = (embedding * ml_dtypes.bfloat16(c["hidden_size"] ** 0.5)).astype(embedding.dtype)
    last = stored[prefix + "norm.weight"]
    out = {
        "params-token_embedder-embedding": embedding,
        "params-decoder-decoder_norm-scale": (last + 1.0).astype(last.dtype) if model in ("gemma2", "gemma3") else last,
    }
    if not c["tie_word_embeddings"]:
        above = "language_model." if prefix == "language_model.model." else ""
        logits = stored[above + "lm_head.weight"].T
        columns = np.zeros((logits.shape[0], more), logits.dtype)
        out["params-decoder-logits_dense-kernel"] = np.concatenate([logits, columns], 1)
    return out


def _groups(model: str, c: Mapping[str, Any], scan_layers: bool, separate_experts: bool) -> list[Group]:
    every = list(range(c["num_hidden_layers"]))
    if model in UNIFORM:
        rows = UNIFORM[model]
        if scan_layers:
            return [("decoder-layers", every, rows, True)]
        return [(f"decoder-layers_{i}", [i], rows, False) for i in every]
    if model == "gpt_oss":
        return _cycles("layers", every, [NORMS + GPT_OSS] * 2, scan_layers)
    if model == "olmo3":
        return _cycles("layers", every, [OLMO3] * 4, scan_layers)
    if model in ("qwen3_next", "qwen3_5"):
        block = NEXT_COMMON + (NEXT_EXPERTS if model == "qwen3_next" or separate_experts else QWEN3_5_EXPERTS)
        linear = block + (NEXT_LINEAR if model == "qwen3_next" else QWEN3_5_LINEAR)
        interval = c.get("full_attention_interval") or c["layer_types"].index("full_attention") + 1
        return _cycles("layer", every, [linear] * (interval - 1) + [block + NEXT_FULL], scan_layers)
    if model == "gemma4":
        after = GEMMA4_EXPERTS if c["enable_moe_block"] else MLP
        local, last = GEMMA4_LOCAL + after, _without(GEMMA4_GLOBAL, "value") + after
        if scan_layers:
            locals_ = [i for i in every if i % 6 < 5]
            scanned = "decoder-scanned_blocks"
            return [(f"{scanned}-local_layers", locals_, local, 5), (f"{scanned}-global_layer", every[5::6], last, 1)]
        return [(f"decoder-layers_{i}", [i], last if i % 6 == 5 else local, False) for i in every]
    if model == "gemma4_small":
        assert not scan_layers
        return [(f"decoder-layers_{i}", [i], _gemma4_small(c, i), False) for i in every]
    if model == "gemma3":
        scanned = len(every) // 6 * 6
        if not scan_layers:
            return [(f"decoder-layers_{i}", [i], GEMMA3, False) for i in every]
        cycles = [(f"decoder-layers-layers_{b}", every[b:scanned:6], GEMMA3, True) for b in range(6) if scanned]
        rest = every[scanned:]
        return cycles + [(f"decoder-layers_remainder-layers_{r}", [i], GEMMA3, False) for r, i in enumerate(rest)]
    if model == "gemma2":
        halves = [(half, _suffixed(GEMMA2, half)) for half in ("local", "global")]
        if scan_layers:
            return [("decoder-layers", every[b::2], rows, True) for b, (_, rows) in enumerate(halves)]
        return [(f"decoder-layers_{i // 2}", [i], halves[i % 2][1], False) for i in every]
    assert model.startswith("deepseek")
    attention = NORMS + LATENT + (FULL_QUERIES if c["q_lora_rank"] is None else LOW_RANK_QUERIES)
    attention += INDEXER if model == "deepseek3_2" else ""
    dense, sparse = attention + MLP, attention + DEEPSEEK_EXPERTS + ("" if model == "deepseek2" else GATE_BIAS)
    first = c["first_k_dense_replace"]
    groups = []
    for name, layers, rows in (("dense_layers", every[:first], dense), ("moe_layers", every[first:], sparse)):
        if scan_layers and layers:
            groups.append((f"decoder-{name}", layers, rows, True))
        elif layers:
            groups += [(f"decoder-{name}_{at}", [i], rows, False) for at, i in enumerate(layers)]
    return groups


def _gemma4_small(c: Mapping[str, Any], i: int) -> str:
    """The rows of layer `i`, which may have the keys and values of an earlier one."""
    rows = GEMMA4_GLOBAL if c["layer_types"][i] == "full_attention" else GEMMA4_LOCAL
    shares = i >= c["num_hidden_layers"] - c["num_kv_shared_layers"]
    rows = _without(rows, "key", "value", "key_norm") if shares else rows
    rows += MLP.replace(" F", " 2F") if shares and c["use_double_wide_mlp"] else MLP
    return rows + (PER_LAYER_INPUT if c["hidden_size_per_layer_input"] else "")


def _without(rows: str, *parts: str) -> str:
    """Rows without those of these parts of attention."""
    return "\n".join(row for row in rows.split("\n") if not any(f"self_attention-{part}-" in row for part in parts))


def _gemma4_tower(c: Mapping[str, Any], text: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Arrays:
    """Gemma 4's tower for images, and what makes its output as wide as the language model's input."""
    sizes = _sizes(c) | {"patch": 3 * c["patch_size"] ** 2}
    above, tower = "params-vision_encoder-Gemma4VisionEncoderLayer_0-", "model.vision_tower."
    out = {above + target: array for target, (array,) in _layers(stored, [tower], GEMMA4_TOWER, sizes)}
    for i in range(c["num_hidden_layers"]):
        for target, (array,) in _layers(stored, [f"{tower}encoder.layers.{i}."], GEMMA4_TOWER_LAYER, sizes):
            out[f"{above}layer_{i}-{target}"] = array
    projection = stored["model.embed_vision.embedding_projection.weight"].T
    assert projection.shape == (c["hidden_size"], text["hidden_size"])
    return out | {"params-vision_encoder-Gemma4VisionProjector_0-projection-kernel": projection}


def _qwen_tower(c: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Arrays:
    """Qwen3.5's tower for images, and what makes its output as wide as the language model's input."""
    more = {"num_attention_heads": c["num_heads"], "num_key_value_heads": c["num_heads"]}
    sizes = _sizes({**c, **more})
    sizes |= {"joined": c["spatial_merge_size"] ** 2 * c["hidden_size"], "out": c["out_hidden_size"]}
    above, tower = "params-vision_encoder-Qwen3_5Moe", "model.visual."
    out = {above + target: array for target, (array,) in _layers(stored, [tower], QWEN_TOWER, sizes)}
    for i in range(c["depth"]):
        for target, (array,) in _layers(stored, [f"{tower}blocks.{i}."], QWEN_TOWER_LAYER, sizes):
            out[f"{above}VisionEncoder_0-blocks_{i}-{target}"] = array
    return out


def _cycles(name: str, every: list[int], cycle: list[str], scan_layers: bool) -> list[Group]:
    """Layers whose rows repeat: those at each place of a cycle are stacked as `name_0` and so on."""
    size = len(cycle)
    if scan_layers:
        return [(f"decoder-layers-{name}_{b}", every[b::size], rows, True) for b, rows in enumerate(cycle)]
    return [(f"decoder-layers_{i}", [i], cycle[i % size], False) for i in every]


def _suffixed(rows: str, half: str) -> str:
    """Rows of Gemma 2, whose blocks are called `self_attention_local` and so on."""
    lines = []
    for line in rows.split("\n"):
        if line:
            block, rest = line.split("-", 1)
            lines.append(f"{block}_{half}-{rest}")
    return "\n".join(lines)


def _sizes(c: Mapping[str, Any]) -> dict[str, int]:
    names = {
        "D": "hidden_size", "F": "intermediate_size", "M": "moe_intermediate_size", "H": "num_attention_heads",
        "K": "num_key_value_heads", "hd": "head_dim", "kvr": "kv_lora_rank", "qr": "q_lora_rank",
        "nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "v": "v_head_dim", "ih": "index_n_heads",
        "ihd": "index_head_dim", "S": "shared_expert_intermediate_size", "hv": "linear_num_value_heads",
        "conv": "linear_conv_kernel_dim", "ghd": "global_head_dim", "gK": "num_global_key_value_heads",
        "P": "hidden_size_per_layer_input",
    }  # fmt: skip
    sizes = {short: c[name] for short, name in names.items() if c.get(name) is not None}
    sizes.setdefault("hd", sizes["D"] // sizes["H"])
    sizes |= {"1": 1, "2D": 2 * sizes["D"], "2hd": 2 * sizes["hd"], "H*hd": sizes["H"] * sizes["hd"]}
    for of_layer in (c.get("per_layer_config") or {}).values():  # as `transformers` writes them
        sizes |= {"ghd": of_layer["head_dim"], "gK": of_layer.get("num_key_value_heads", sizes["K"])}
    sizes.setdefault("gK", sizes["K"])
    if "P" in sizes:
        sizes |= {"LP": c["num_hidden_layers"] * sizes["P"], "2F": 2 * sizes["F"]}
    if "hv" in sizes:
        sizes["hk"] = c["linear_num_key_heads"]
        sizes["keys"] = sizes["hk"] * c["linear_key_head_dim"]
        sizes["values"] = sizes["hv"] * c["linear_value_head_dim"]
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if c.get(name) is not None:
            sizes["E"] = c[name]
    if c.get("n_shared_experts") is not None:
        sizes["S"] = c["n_shared_experts"] * c["moe_intermediate_size"]
    return sizes


def _layers(
    stored: Mapping[str, np.ndarray], prefixes: list[str], rows: str, sizes: Mapping[str, int]
) -> Iterator[tuple[str, list[np.ndarray]]]:
    for row in rows.split("\n"):
        if row:
            target, name, operation, *shape = row.split()
            dims = [sum(sizes[size] for size in part.split("+")) for part in shape]
            yield target, [_one(stored, prefix + name, operation.split(","), dims, sizes) for prefix in prefixes]


def _one(
    stored: Mapping[str, np.ndarray], name: str, operations: list[str], dims: list[int], sizes: Mapping[str, int]
) -> np.ndarray:
    if operations == ["EXPERTS"]:
        experts = [stored[name.replace("{E}", str(e))].T for e in range(sizes["E"])]
        assert all(expert.shape == tuple(dims) for expert in experts)
        return np.stack(experts)
    if operations == ["QKVZ"]:
        qkv, z = stored[name.format("qkv")], stored[name.format("z")]
        keys, values = sizes["keys"] // sizes["hk"], sizes["values"] // sizes["hk"]
        rows = []
        for head in range(sizes["hk"]):
            rows += [qkv[head * keys :][:keys], qkv[sizes["keys"] + head * keys :][:keys]]
            rows += [qkv[2 * sizes["keys"] + head * values :][:values], z[head * values :][:values]]
        return np.concatenate(rows).T
    if operations == ["BA"]:
        b, a = stored[name.format("b")], stored[name.format("a")]
        heads = sizes["hv"] // sizes["hk"]
        rows = [part[head * heads :][:heads] for head in range(sizes["hk"]) for part in (b, a)]
        return np.concatenate(rows).T
    x = stored[name]
    for operation in operations:
        if operation == "R":
            x = x.T.reshape(dims)
        elif operation == "B":
            x = x.reshape(dims)
        elif operation == "+1":
            x = (x + 1.0).astype(x.dtype)
        elif operation == "query":
            x = (x * np.float32(1 / math.sqrt(sizes["hd"]))).astype(x.dtype)
        elif operation == "rope":
            out = np.empty_like(x)
            out[..., 0::2], out[..., 1::2] = np.split(x, 2, axis=-1)
            x = out
        elif operation in ("low", "high"):
            x = np.split(x, 2, axis=-2)[operation == "high"]
        elif operation in ("q", "k", "v"):
            x = np.split(x, 3)["qkv".index(operation)]
        elif operation == "patches":
            x = x.transpose(2, 3, 4, 1, 0)
        elif operation == "swap":
            x = np.swapaxes(x, -1, -2)
        elif operation == "first":
            x = np.swapaxes(x, 0, 1)
        elif operation in ("even", "odd"):
            x = x[..., operation == "odd" :: 2]
        else:
            assert operation == "I", operation
    return x
