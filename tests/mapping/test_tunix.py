"""Tunix's trees of small models that `transformers` saved, against the same steps in NumPy.

`tests/interop/test_tunix.py` compares them with what Tunix's own loaders make, if `google-tunix` is installed.
"""

import re

import numpy as np
import pytest

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping.families.tunix import FAMILIES
from tests.support.compare import assert_same_arrays
from tests.support.evaluate import binder, bound, evaluate, given_back, unused
from tests.support.family_samples import Sample

FAMILY = {family.name: family for family in FAMILIES}
SAMPLES = {
    "qwen2.5": "qwen2",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3",
    "llama3.1": "llama3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4_moe": "gemma4",
}
# Keys of a layer, by those of the stored name.
KEYS = {
    "input_layernorm.weight": "input_layernorm.w",
    "post_attention_layernorm.weight": "post_attention_layernorm.w",
    "mlp.gate.weight": "mlp.router.kernel",
    **{f"self_attn.{part}_norm.weight": f"attn.{part}_norm.w" for part in "qk"},
    **{f"self_attn.{part}_proj.weight": f"attn.{part}_proj.w" for part in "qkvo"},
    **{f"self_attn.{part}_proj.bias": f"attn.{part}_bias" for part in "qkv"},
    **{f"mlp.{part}_proj.weight": f"mlp.{part}_proj.kernel" for part in ("gate", "up", "down")},
}
GEMMA = {
    "input_layernorm.weight": "pre_attention_norm.scale",
    "post_attention_layernorm.weight": "post_attention_norm.scale",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm.scale",
    "post_feedforward_layernorm.weight": "post_ffw_norm.scale",
    "self_attn.q_norm.weight": "attn._query_norm.scale",
    "self_attn.k_norm.weight": "attn._key_norm.scale",
    "self_attn.o_proj.weight": "attn.attn_vec_einsum.w",
    "layer_scalar": "skip_scale",
    "pre_feedforward_layernorm_2.weight": "moe_pre_ffw_norm.scale",
    "post_feedforward_layernorm_1.weight": "dense_post_ffw_norm.scale",
    "post_feedforward_layernorm_2.weight": "moe_post_ffw_norm.scale",
    "router.proj.weight": "moe.router_logits",
    "router.scale": "moe.router_scale",
    "router.per_expert_scale": "moe.per_expert_scale",
    "experts.gate_up_proj": "moe.gating_einsum",
    "experts.down_proj": "moe.linear",
}
TOP = {"embed_tokens.weight": "embedder.input_embedding", "norm.weight": "final_norm.w", "lm_head.weight": "lm_head.w"}


def in_numpy(stored, config, model):
    """The leaves by path: linear layers transposed, with heads apart, and then what belongs together stacked."""
    is_gemma = model.startswith("gemma")
    keys = KEYS | (GEMMA if is_gemma else {})
    if model == "gemma":
        keys |= {"post_attention_layernorm.weight": "pre_ffw_norm.scale"}
    if model == "gemma2":
        keys |= {"post_attention_layernorm.weight": "post_attn_norm.scale"}
    top = TOP | ({"norm.weight": "final_norm.scale"} if is_gemma else {})
    leaves = {}
    for name, array in stored.items():
        name = re.sub(r"^(language_model\.)?model\.(language_model\.)?", "", name)
        size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        if model == "gemma4" and re.match(r"layers\.(5|11)\.", name):
            size = config["global_head_dim"]
        value = array.T if array.ndim == 2 and "embed" not in name else array
        if re.match(r".*self_attn\.[qkv]_proj\.weight", name):
            value = value.reshape(config["hidden_size"], -1, size)
        elif re.match(r".*self_attn\.o_proj\.weight", name):
            value = value.reshape(-1, size, config["hidden_size"])
        elif name.endswith("gate_up_proj"):
            value = value.reshape(len(value), 2, -1, config["hidden_size"])
        elif name.endswith("experts.down_proj"):
            value = value.transpose(0, 2, 1)
        match = re.match(r"layers\.(\d+)\.(.*)", name)
        if match is None:
            leaves[top[name]] = value
        elif expert := re.match(r"mlp\.experts\.(\d+)\.(\w+)\.weight", match[2]):
            leaves.setdefault(f"layers.{match[1]}.mlp.{expert[2]}", {})[int(expert[1])] = value
        else:
            leaves[f"layers.{match[1]}.{keys[match[2]]}"] = value
    for path, value in leaves.items():
        if isinstance(value, dict):
            leaves[path] = np.stack([value[number] for number in sorted(value)])
    for i in range(config["num_hidden_layers"] if is_gemma else 0):
        parts = (leaves.pop(f"layers.{i}.attn.{part}_proj.w", None) for part in "qkv")
        q, *kv = (part.transpose(1, 0, 2) for part in parts if part is not None)
        leaves[f"layers.{i}.attn.q_einsum.w"] = q
        leaves |= {f"layers.{i}.attn.kv_einsum.w": np.stack(kv)} if kv[1:] else {f"layers.{i}.attn.k_einsum.w": kv[0]}
    return leaves


@pytest.mark.parametrize("name", SAMPLES)
def test_the_steps_in_numpy_and_back(name):
    sample = Sample(name)
    config = sample.config
    if name == "gemma2":
        config["query_pre_attn_scalar"] = config["head_dim"]
    tree = FAMILY[f"tunix.{SAMPLES[name]}"].describe(config, {}, binder(sample.stored))
    stored = {name: array for name, array in sample.stored.items() if not unused(tree, name)}
    expected = in_numpy(stored, config.get("text_config", config), SAMPLES[name])
    assert_same_arrays({path: evaluate(view, stored) for path, view in tree.items()}, expected)
    assert_same_arrays(given_back(tree, expected, stored), stored)
    left_out = sample.stored.keys() - stored.keys()
    assert all(name.startswith(("model.vision_tower.", "model.embed_vision.")) for name in left_out)


def test_keys_and_values_with_as_many_heads_as_queries():
    sample = Sample("gemma3")
    config = sample.config["text_config"] | {"num_key_value_heads": 4}
    tree = FAMILY["tunix.gemma3"].describe({"text_config": config}, {}, bound)
    assert tree["layers.0.attn.qkv_einsum.w"].shape == (3, 4, 32, 12)
    assert tree["layers.0.attn.qkv_einsum.w"].tensors == tuple(
        f"language_model.model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"
    )
    assert not {"layers.0.attn.q_einsum.w", "layers.0.attn.kv_einsum.w"} & tree.keys()


GEMMA4_SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 5,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}


def test_a_small_gemma4_has_embeddings_for_each_layer_and_keys_that_it_does_not_read():
    tree = FAMILY["tunix.gemma4"].describe(GEMMA4_SMALL, {}, bound)
    shapes = {path: view.shape for path, view in tree.items()}
    assert shapes["embedder.per_layer_input_embedding"] == (64, 4, 5)
    assert shapes["embedder.per_layer_model_projection.w"] == (16, 4, 5)
    assert [shapes[f"layers.{i}.attn.kv_einsum.w"] for i in range(4)] == [(2, 2, 16, 6), (2, 2, 16, 8)] * 2
    assert [shapes[f"layers.{i}.mlp.up_proj.kernel"] for i in range(4)] == [(16, 20)] * 2 + [(16, 40)] * 2


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings = False, and Tunix's model is for True"),
        ("gemma", {"attention_bias": True}, "attention_bias = True, and Tunix's model is for False"),
        ("gemma4", {"quantization": {"group_size": 64, "bits": 4}}, "config.json is of MLX"),
        ("gemma2", {}, "query_pre_attn_scalar = 256, and Tunix's model is for 6"),
        ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings = False, and Tunix's model is for True"),
        ("gemma2", {"attention_bias": True}, "attention_bias = True, and Tunix's model is for False"),
        ("gemma3", {"tie_word_embeddings": False}, "tie_word_embeddings = False, and Tunix's model is for True"),
        ("gemma4", {"tie_word_embeddings": False}, "tie_word_embeddings = False, and Tunix's model is for True"),
        ("gemma4_small", {"vocab_size_per_layer_input": 40}, "input = 40, and Tunix's model is for 64"),
        (
            "gemma4_small",
            {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
            r"config.json has \['full_attention', 'sliding_attention'\] before the last 2$",
        ),
        ("gemma4_small", {"num_kv_shared_layers": 4}, r"config.json has \[\] before the last 4$"),
    ],
)
def test_models_that_tunix_has_no_place_for(name, changed, message):
    config = GEMMA4_SMALL if name == "gemma4_small" else Sample(name).config
    with pytest.raises(MappingError, match=message):
        FAMILY[f"tunix.{name.removesuffix('_small')}"].describe({**config, **changed}, {}, bound)
