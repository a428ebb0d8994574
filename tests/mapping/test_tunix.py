"""Tunix's trees of small models that `transformers` saved, against the same steps in NumPy.

`tests/interop/test_tunix.py` compares them with what Tunix's own loaders make, if `google-tunix` is installed.
"""

import re

import numpy as np
import pytest

from orbax_safetensors.mapping.families.tunix import FAMILIES
from tests.support.compare import assert_same_arrays
from tests.support.evaluate import binder, bound, evaluate, given_back
from tests.support.family_samples import Sample

FAMILY = {family.name: family for family in FAMILIES}
SAMPLES = {"qwen2.5": "qwen2", "qwen3": "qwen3", "qwen3-moe": "qwen3", "llama3.1": "llama3", "gemma3": "gemma3"}
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
GEMMA3 = {
    "input_layernorm.weight": "pre_attention_norm.scale",
    "post_attention_layernorm.weight": "post_attention_norm.scale",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm.scale",
    "post_feedforward_layernorm.weight": "post_ffw_norm.scale",
    "self_attn.q_norm.weight": "attn._query_norm.scale",
    "self_attn.k_norm.weight": "attn._key_norm.scale",
    "self_attn.o_proj.weight": "attn.attn_vec_einsum.w",
}
TOP = {"embed_tokens.weight": "embedder.input_embedding", "norm.weight": "final_norm.w", "lm_head.weight": "lm_head.w"}


def in_numpy(stored, config, is_gemma):
    """The leaves by path: linear layers transposed, with heads apart, and then what belongs together stacked."""
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    keys = KEYS | (GEMMA3 if is_gemma else {})
    top = TOP | ({"norm.weight": "final_norm.scale"} if is_gemma else {})
    leaves = {}
    for name, array in stored.items():
        name = re.sub(r"^(language_model\.)?model\.", "", name)
        value = array.T if array.ndim == 2 and "embed" not in name else array
        if re.match(r".*self_attn\.[qkv]_proj\.weight", name):
            value = value.reshape(config["hidden_size"], -1, size)
        elif re.match(r".*self_attn\.o_proj\.weight", name):
            value = value.reshape(-1, size, config["hidden_size"])
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
        q, k, v = (leaves.pop(f"layers.{i}.attn.{part}_proj.w").transpose(1, 0, 2) for part in "qkv")
        leaves |= {f"layers.{i}.attn.q_einsum.w": q, f"layers.{i}.attn.kv_einsum.w": np.stack([k, v])}
    return leaves


@pytest.mark.parametrize("name", SAMPLES)
def test_the_steps_in_numpy_and_back(name):
    sample = Sample(name)
    tree = FAMILY[f"tunix.{SAMPLES[name]}"].describe(sample.config, {}, binder(sample.stored))
    expected = in_numpy(sample.stored, sample.config.get("text_config", sample.config), name == "gemma3")
    assert_same_arrays({path: evaluate(view, sample.stored) for path, view in tree.items()}, expected)
    assert_same_arrays(given_back(tree, expected, sample.stored), sample.stored)


def test_keys_and_values_with_as_many_heads_as_queries():
    sample = Sample("gemma3")
    config = sample.config["text_config"] | {"num_key_value_heads": 4}
    tree = FAMILY["tunix.gemma3"].describe({"text_config": config}, {}, bound)
    assert tree["layers.0.attn.qkv_einsum.w"].shape == (3, 4, 32, 12)
    assert tree["layers.0.attn.qkv_einsum.w"].tensors == tuple(
        f"language_model.model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"
    )
    assert not {"layers.0.attn.q_einsum.w", "layers.0.attn.kv_einsum.w"} & tree.keys()
