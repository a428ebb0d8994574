"""Configs of `transformers`: what they leave out, and what follows from their defaults. No download."""

import json

import pytest

from orbax_safetensors.mapping.families.maxtext import FAMILIES
from tests.support.evaluate import bound

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

FAMILY = {architecture: family for family in FAMILIES for architecture in family.architectures}
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
        return bound(name, shape)

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


def test_the_heads_of_qwen3_omni_follow_from_its_width_if_the_config_does_not_say_their_size():
    config = transformers.Qwen3OmniMoeConfig(enable_audio_output=False)
    with torch.device("meta"):
        model = transformers.Qwen3OmniMoeForConditionalGeneration(config)
    full = json.loads(config.to_json_string(use_diff=False))
    _, shapes = described(type(model).__name__, full)
    made = {
        name.replace(".language_model.", "."): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if ".language_model.layers." in name and ".experts." not in name
    }
    assert made["thinker.model.layers.0.self_attn.q_norm.weight"] == (
        config.thinker_config.text_config.hidden_size // 28,
    )
    assert made == {name: shapes.get(name) for name in made}


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
