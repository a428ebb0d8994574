"""The families against what `transformers` saves of tiny random models, and against its defaults. No download."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from orbax_safetensors.mapping import View, registry
from orbax_safetensors.mapping.families.maxtext import FAMILIES
from tests.support.evaluate import binder, evaluate, given_back, uses

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

FAMILY = {architecture: family for family in FAMILIES for architecture in family.architectures}
SIZES = {
    "vocab_size": 40,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
LATENT = {
    **SIZES,
    "num_key_value_heads": 6,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3_ROPE = ROPE | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=4, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8
    ),
    "qwen2_5": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2_5, tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, head_dim=4, rope_parameters=LLAMA3_ROPE),
    "llama3, tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "mistral": lambda: transformers.MistralConfig(**SIZES),
    "mistral, wide heads": lambda: transformers.MistralConfig(**SIZES, head_dim=4),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **EXPERTS),
    "deepseek2": lambda: transformers.DeepseekV2Config(**LATENT, q_lora_rank=14),
    "deepseek2, lite": lambda: transformers.DeepseekV2Config(**LATENT, q_lora_rank=None),
    "deepseek3": lambda: transformers.DeepseekV3Config(**LATENT, q_lora_rank=14),
    "deepseek3_2": lambda: transformers.DeepseekV32Config(**LATENT, q_lora_rank=14, index_head_dim=6, index_n_heads=3),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, **EXPERTS, head_dim=4, rope_parameters=ROPE),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=4),
    "gemma3": lambda: transformers.Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 7}, head_dim=4),
}
LINEAR = {
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 7,
    "moe_intermediate_size": 8,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 9,
}
GEMMA4 = {**SIZES, "num_hidden_layers": 12, "head_dim": 4, "global_head_dim": 6, "vocab_size_per_layer_input": 30}
LARGE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
CONFIGS |= {
    "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA4, **LARGE),
    "gemma4, with experts": lambda: transformers.Gemma4TextConfig(
        **GEMMA4, **LARGE, enable_moe_block=True, num_experts=3, top_k_experts=2, moe_intermediate_size=8
    ),
    "gemma4_small": lambda: transformers.Gemma4TextConfig(
        **GEMMA4, num_kv_shared_layers=6, hidden_size_per_layer_input=5, use_double_wide_mlp=True
    ),
    "gemma4_small, all alike": lambda: transformers.Gemma4TextConfig(**GEMMA4, hidden_size_per_layer_input=5),
    "olmo3": lambda: transformers.Olmo3Config(**SIZES),
    "olmo3, wide heads": lambda: transformers.Olmo3Config(**SIZES, head_dim=4),
    "qwen3_5": lambda: transformers.Qwen3_5MoeTextConfig(**SIZES, **LINEAR, head_dim=4),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**SIZES, **LINEAR, head_dim=4),
}


@pytest.fixture(params=CONFIGS)
def checkpoint(request, tmp_path):
    """The family's last name, and what `save_pretrained` wrote: the config and the tensors."""
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param](), dtype=torch.bfloat16)
    with torch.no_grad():
        for values in model.state_dict().values():
            values.copy_(torch.randn(values.shape, generator=generator))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    return request.param.split(",")[0], config, load_file(tmp_path / "model.safetensors")


def test_a_saved_model_is_in_the_tree_as_a_whole_and_comes_back(checkpoint):
    name, config, stored = checkpoint
    family = registry.find("maxtext", config)
    assert family.name == f"maxtext.{name}"
    scan_layers = name != "gemma4_small"
    variant = {"mtp": False} if name in ("deepseek3", "deepseek3_2") else {}
    variant |= family.stored_as({name: array.shape for name, array in stored.items()})
    tree = family.describe(config, {"scan_layers": scan_layers, **variant}, binder(stored))
    arrays = {path: evaluate(view, stored) for path, view in tree.items()}

    counts = uses(tree, {tensor: array.shape for tensor, array in stored.items()})
    assert counts.keys() == stored.keys()
    assert all((count == 1).all() for count in counts.values())

    back = given_back(tree, arrays, stored)
    computed = {tensor for view in tree.values() if any(p.ops for p in view.pieces) for tensor in view.tensors}
    for tensor, array in stored.items():
        if tensor in computed:
            rounding = ml_dtypes.finfo(array.dtype).eps
            np.testing.assert_allclose(
                back[tensor].astype("f4"), array.astype("f4"), rtol=2 * rounding, atol=4 * rounding, err_msg=tensor
            )
        else:
            assert back[tensor].tobytes() == array.tobytes(), tensor


# What configs in circulation leave out. Sizes are those that the classes' other defaults go with.
LEFT_OUT = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "mlp_only_layers")
CLASSES = {
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "MixtralForCausalLM": "MixtralConfig",
    "DeepseekV2ForCausalLM": "DeepseekV2Config",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
    "DeepseekV32ForCausalLM": "DeepseekV32Config",
    "GptOssForCausalLM": "GptOssConfig",
    "Gemma2ForCausalLM": "Gemma2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Olmo3ForCausalLM": "Olmo3Config",
    "Qwen3NextForCausalLM": "Qwen3NextConfig",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
}


def described(architecture, config, variant=()):
    shapes = {}

    def bind(name, shape):
        shapes[name] = shape
        return View.tensor(name, shape, np.dtype("f4"))

    return list(FAMILY[architecture].describe(config, dict(variant), bind)), shapes


@pytest.mark.parametrize("architecture", CLASSES)
def test_what_a_config_leaves_out_is_what_transformers_takes(architecture):
    config = getattr(transformers, CLASSES[architecture])(num_hidden_layers=4, first_k_dense_replace=1)
    full = json.loads(config.to_json_string(use_diff=False))
    short = {key: value for key, value in full.items() if key not in LEFT_OUT}
    assert described(architecture, short) == described(architecture, full)


@pytest.mark.parametrize("name", ["Llama4", "Qwen3VL", "Qwen3VLMoe"])
def test_models_with_towers_of_the_default_sizes(name):
    """All names and shapes; experts are in the layout of a model that `transformers` has made."""
    model = getattr(transformers, f"{name}ForConditionalGeneration")
    config = getattr(transformers, f"{name}Config")()
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in model(config).state_dict().items()}
    full = json.loads(config.to_json_string(use_diff=False))
    variant = {"transposed_experts": True} if name == "Qwen3VLMoe" else {}
    assert described(model.__name__, full, variant)[1] == expected


def test_gemma_3_may_leave_out_everything():
    full = json.loads(transformers.Gemma3TextConfig().to_json_string(use_diff=False))
    assert described("Gemma3ForCausalLM", {}) == described("Gemma3ForCausalLM", full)
    nested = described("Gemma3ForConditionalGeneration", {"text_config": {}})
    assert nested == described("Gemma3ForConditionalGeneration", {"text_config": full})


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"])
def test_null_follows_from_the_heads(architecture):
    full = json.loads(getattr(transformers, CLASSES[architecture])(num_hidden_layers=1).to_json_string(use_diff=False))
    paths, shapes = described(architecture, {**full, "head_dim": None, "num_key_value_heads": None})
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (4096, 4096)
    assert (paths, shapes) == described(architecture, {**full, "head_dim": 128, "num_key_value_heads": 32})
