"""The families on configs of any small sizes: each stored element is in the tree once, and comes back.

Trees with other switches have the same layers, stacked or not, and the same vocabulary, padded or not.
"""

import re

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from orbax_safetensors.mapping.families.maxtext import FAMILIES
from tests.support.compare import assert_same_arrays
from tests.support.evaluate import binder, bound, evaluate, given_back, uses
from tests.support.strategies import examples
from tests.support.tiers import cross

FAMILY = {family.name.removeprefix("maxtext."): family for family in FAMILIES}
MODELS = [
    "deepseek2", "deepseek3", "deepseek3_2", "gemma", "gemma2", "gemma3", "gemma4", "gemma4_small", "gpt_oss", "llama3",
    "mistral", "mixtral", "olmo3", "qwen2_5", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_next",
]  # fmt: skip
# Stored layers after which those of the same kind come again.
CYCLES = {"gpt_oss": 2, "gemma2": 2, "gemma3": 6, "gemma4": 6, "olmo3": 4, "qwen3_next": 3, "qwen3_5": 2}
sizes = st.integers(1, 5)


def text_of(config):
    """The part of a config that describes the language model."""
    return config.get("text_config", config)


@st.composite
def configs(draw, name):
    """Configs with everything that the architecture has."""
    cycle = CYCLES.get(name)
    if cycle is None or name == "gemma3":  # whose last cycle may be incomplete
        layers = draw(st.integers(1, 9 if cycle else 4))
    else:
        layers = cycle * draw(st.integers(1, 2))
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


def unstacked(arrays, axis, length, layers):
    """The arrays of a tree of `layers`, stacked along `axis` and in cycles of `length`, by their names if numbered."""
    out = {}
    for path, array in arrays.items():
        group, _, rest = path.removeprefix("params.decoder.").partition(".")
        place, _, leaf = rest.partition(".")
        match = re.fullmatch(r"layers?_(\d+)", place)
        number = int(match[1]) if match else length - 1 if place == "global_layer" else None
        if group == "layers_remainder":
            found = {f"layers_{layers // length * length + number}.{leaf}": array}
        elif place == "local_layers":
            blocks = np.moveaxis(array, (axis, axis + 1), (0, 1))
            found = {f"layers_{i * length + j}.{leaf}": blocks[i, j] for i, j in np.ndindex(blocks.shape[:2])}
        elif group in ("layers", "scanned_blocks") and number is not None:
            found = {f"layers_{i * length + number}.{leaf}": one for i, one in enumerate(np.moveaxis(array, axis, 0))}
        elif group in ("layers", "dense_layers", "moe_layers"):
            found = {f"{group}_{i}.{rest}": one for i, one in enumerate(np.moveaxis(array, axis, 0))}
        else:
            out[path] = array
            continue
        out |= {f"params.decoder.{name}": one for name, one in found.items()}
    return out


def padded(arrays, vocab_size):
    """The arrays of a tree with zeros behind the last entry of the vocabulary."""
    out = dict(arrays)
    for path, axis in (("params.token_embedder.embedding", 0), ("params.decoder.logits_dense.kernel", 1)):
        if path in out:
            more = vocab_size - out[path].shape[axis]
            out[path] = np.pad(out[path], [(0, more * (at == axis)) for at in range(2)])
    return out


def stored_tensors(data, name, config, variant):
    """Random values for all tensors that a family asks for."""
    shapes = {}

    def bind(tensor, shape):
        shapes[tensor] = shape
        return bound(tensor, shape)

    FAMILY[name].describe(config, variant, bind)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    return {tensor: rng.standard_normal(shape, np.float32) for tensor, shape in shapes.items()}


def made(name, config, variant, stored):
    """The tree that a family makes of a config, and its arrays."""
    tree = FAMILY[name].describe(config, variant, binder(stored))
    return tree, {path: evaluate(view, stored) for path, view in tree.items()}


@examples(200)
@given(st.data())
def test_a_tree_has_every_stored_element_once_and_gives_it_back(data):
    name = data.draw(st.sampled_from(MODELS))
    event(name)
    config = data.draw(configs(name))
    scan_layers = name != "gemma4_small" and data.draw(st.booleans())
    variant = {"scan_layers": scan_layers, "param_scan_axis": data.draw(st.integers(0, 1))}
    if data.draw(st.booleans()):
        variant["vocab_size"] = text_of(config)["vocab_size"] + data.draw(st.integers(0, 3))
    if name == "qwen3_5":
        variant["separate_experts"] = data.draw(st.booleans())
    stored = stored_tensors(data, name, config, variant)
    tree, arrays = made(name, config, variant, stored)
    counts = uses(tree, {tensor: array.shape for tensor, array in stored.items()})
    assert counts.keys() == stored.keys()
    assert all((count == 1).all() for count in counts.values())
    for tensor, array in given_back(tree, arrays, stored).items():
        np.testing.assert_allclose(array, stored[tensor], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", cross(MODELS, ["deepseek3", "gemma3", "gemma4", "qwen3_next"]))
@examples(20)
@given(st.data())
def test_trees_with_other_switches_have_the_same_layers_and_vocabulary(name, data):
    config = data.draw(configs(name))
    layers, vocab_size = (text_of(config)[key] for key in ("num_hidden_layers", "vocab_size"))
    stored = stored_tensors(data, name, config, {"scan_layers": False})
    _, arrays = made(name, config, {"scan_layers": False}, stored)
    expected = padded(arrays, vocab_size + 3)
    for scanned in [False] if name == "gemma4_small" else [False, True]:
        for axis in (0, 1):
            variant = {"scan_layers": scanned, "param_scan_axis": axis, "vocab_size": vocab_size + 3}
            _, found = made(name, config, variant, stored)
            assert_same_arrays(unstacked(found, axis, CYCLES.get(name), layers) if scanned else found, expected)
