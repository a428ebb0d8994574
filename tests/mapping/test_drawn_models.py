"""The families on configs of any small sizes: each stored element is in the tree once, and comes back."""

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from orbax_safetensors.mapping.families.maxtext import FAMILIES
from tests.support.evaluate import binder, bound, evaluate, given_back, uses
from tests.support.strategies import examples

FAMILY = {family.name.removeprefix("maxtext."): family for family in FAMILIES}
MODELS = [
    "deepseek2", "deepseek3", "deepseek3_2", "gemma2", "gemma3", "gemma4", "gemma4_small", "gpt_oss", "llama3",
    "mistral", "mixtral", "olmo3", "qwen2_5", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_next",
]  # fmt: skip
sizes = st.integers(1, 5)


@st.composite
def configs(draw, name):
    """Configs with everything that the architecture has."""
    cycle = {"gpt_oss": 2, "gemma2": 2, "gemma4": 6, "olmo3": 4, "qwen3_next": 3, "qwen3_5": 2}.get(name)
    layers = cycle * draw(st.integers(1, 2)) if cycle else draw(st.integers(1, 9 if name == "gemma3" else 4))
    config = {
        "num_hidden_layers": layers,
        "hidden_size": draw(sizes),
        "intermediate_size": draw(sizes),
        "num_attention_heads": draw(sizes),
        "num_key_value_heads": draw(sizes),
        "head_dim": 2 * draw(st.integers(1, 3)),
        "vocab_size": draw(st.integers(1, 9)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if name == "llama3":  # 3.1 and later; of others, the converter interleaves nothing
        config["rope_scaling"] = {"rope_type": "llama3"}
    if name in ("qwen3_moe", "mixtral", "gpt_oss") or name.startswith("deepseek"):
        count = "n_routed_experts" if name.startswith("deepseek") else "num_local_experts"
        config |= {count: draw(sizes), "moe_intermediate_size": draw(sizes)}
    if name.startswith("deepseek"):
        keys = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_shared_experts")
        config |= {key: draw(sizes) for key in (*keys, "index_n_heads", "index_head_dim")}
        config["first_k_dense_replace"] = draw(st.integers(0, layers))
        if name == "deepseek2" and draw(st.booleans()):
            config["q_lora_rank"] = None
        if name != "deepseek2":
            config["num_nextn_predict_layers"] = draw(st.integers(0, 1))
    if name in ("qwen3_next", "qwen3_5"):
        keys = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "linear_num_key_heads")
        keys += ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
        config |= {key: draw(sizes) for key in keys} | {"full_attention_interval": cycle}
    if name.startswith("gemma4"):
        config |= draw(gemma4(name, layers))
    if name == "qwen3_5":
        config["linear_num_value_heads"] = config["linear_num_key_heads"] * draw(st.integers(1, 3))
    if name in ("gemma3", "gemma4", "gemma4_small", "qwen3_5") and draw(st.booleans()):
        config = {"text_config": config, "tie_word_embeddings": config["tie_word_embeddings"]}
        if name == "gemma4" and draw(st.booleans()):
            config["vision_config"] = draw(tower())
        if name == "qwen3_5" and draw(st.booleans()):
            config["vision_config"] = draw(qwen_tower())
    return config


@st.composite
def gemma4(draw, name, layers):
    small = name == "gemma4_small"
    config = {
        "global_head_dim": draw(sizes),
        "attention_k_eq_v": not small,
        "num_kv_shared_layers": draw(st.integers(0, layers)) if small else 0,
        "hidden_size_per_layer_input": draw(st.integers(0, 3)) if small else 0,
        "vocab_size_per_layer_input": draw(sizes),
        "use_double_wide_mlp": draw(st.booleans()),
        "enable_moe_block": draw(st.booleans()) and not small,
        "num_experts": draw(sizes),
        "moe_intermediate_size": draw(sizes),
    }
    if small:
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        return config | {"layer_types": [*(draw(kinds) for _ in range(layers - 1)), "full_attention"]}
    return config | {"num_global_key_value_heads": draw(st.none() | sizes)}


@st.composite
def tower(draw):
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys += ("head_dim", "patch_size", "position_embedding_size")
    return {key: draw(sizes) for key in keys} | {"standardize": True}


@st.composite
def qwen_tower(draw):
    keys = ("intermediate_size", "depth", "num_heads", "patch_size", "spatial_merge_size", "out_hidden_size")
    keys += ("num_position_embeddings", "in_channels", "temporal_patch_size")
    config = {key: draw(sizes) for key in keys}
    return config | {"hidden_size": config["num_heads"] * draw(sizes)}


@examples(200)
@given(st.data())
def test_a_tree_has_every_stored_element_once_and_gives_it_back(data):
    name = data.draw(st.sampled_from(MODELS))
    event(name)
    config = data.draw(configs(name))
    text = config.get("text_config", config)
    scan_layers = name != "gemma4_small" and data.draw(st.booleans())
    variant = {"scan_layers": scan_layers, "param_scan_axis": data.draw(st.integers(0, 1))}
    if data.draw(st.booleans()):
        variant["vocab_size"] = text["vocab_size"] + data.draw(st.integers(0, 3))
    if name == "qwen3_5":
        variant["separate_experts"] = data.draw(st.booleans())
    family = FAMILY[name]

    shapes = {}

    def bind(tensor, shape):
        shapes[tensor] = shape
        return bound(tensor, shape)

    family.describe(config, variant, bind)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    stored = {tensor: rng.standard_normal(shape, np.float32) for tensor, shape in shapes.items()}
    tree = family.describe(config, variant, binder(stored))

    arrays = {path: evaluate(view, stored) for path, view in tree.items()}
    counts = uses(tree, shapes)
    assert counts.keys() == shapes.keys()
    assert all((count == 1).all() for count in counts.values())
    for tensor, array in given_back(tree, arrays, stored).items():
        np.testing.assert_allclose(array, stored[tensor], rtol=1e-6, atol=1e-6)
