"""A save with a family has the names and shapes that `save_pretrained` of the model's class writes. No download."""

import json
import re

import pytest

import orbax_safetensors as ost
from orbax_safetensors.mapping import registry
from tests.support.family_samples import SAMPLES, Sample

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA3 = {"vision_config": TOWER | {"image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4}
KIMI = {"vision_config": TOWER | {"pos_emb_height": 4, "pos_emb_width": 4}}
KIMI["text_config"] = Sample("deepseek3").config


def _config(sample, **more):
    return Sample(sample).config | more


def _text(sample):
    return Sample(sample).config["text_config"]


# By the names of classes. `kimi-k2` is a DeepSeek-V3 whose type `transformers` does not know.
MODELS = [(_config(name)["architectures"][0], _config(name)) for name in SAMPLES if name not in ("gemma3", "kimi-k2")]
MODELS += [
    ("Gemma2ForCausalLM", _config("gemma2", query_pre_attn_scalar=_config("gemma2")["head_dim"])),
    ("Gemma3ForCausalLM", _text("gemma3")),
    ("Gemma3ForConditionalGeneration", _config("gemma3", **GEMMA3)),
    ("Gemma3ForConditionalGeneration", _config("gemma3", **GEMMA3, tie_word_embeddings=False)),
    ("Gemma4ForCausalLM", _text("gemma4_moe")),
    ("Gemma4ForCausalLM", _text("gemma4_small")),
    ("Kimi_K25ForConditionalGeneration", KIMI),
    ("Qwen3_5MoeForCausalLM", _text("qwen3.5")),
]


def _is_for(family, config):
    """Whether a family's model is for such a config: Tunix's are for fewer, and refuse the others by name."""
    text = config.get("text_config", config)
    if not family.name.startswith("tunix.gemma"):
        return True
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    scaled = text.get("query_pre_attn_scalar") == text.get("head_dim") or family.name != "tunix.gemma2"
    # `transformers` does not store the keys and values of layers that share those of others.
    return tied and scaled and not text.get("num_kv_shared_layers")


CASES = [
    (model, config, family)
    for model, config in MODELS
    for family in registry.known()
    if model in family.architectures and family.applies_to(config) and _is_for(family, config)
]
IDS = [f"{model}-{family.name}" for model, _, family in CASES]
# Tensors that the trees have no place for.
TOWERS = r"(model\.)?(vision_tower|multi_modal_projector|mm_projector|embed_vision|audio_tower|embed_audio)\..+"
ROUTERS = r".*\.gate\.(bias|tid2eid)"
# How `transformers` stores models that it has made itself; those that it has loaded it stores as they are published.
AS_MADE = {"maxtext.qwen3_5": {"separate_experts": True}, "maxtext.qwen3_vl_moe": {"transposed_experts": True}}


def test_all_architectures_are_tried():
    every = {name for family in registry.known() for name in family.architectures if hasattr(transformers, name)}
    assert {name for name, _ in MODELS if hasattr(transformers, name)} == every


def shapes(directory):
    return ost.open_checkpoint(directory).shapes


@pytest.mark.parametrize(("model", "config", "family"), CASES, ids=IDS)
def test_a_save_has_the_names_of_transformers(tmp_path, model, config, family):
    made = getattr(transformers, model, None)
    if made is None:
        pytest.skip(f"transformers {transformers.__version__} has no {model}")
    made._from_config(made.config_class.from_dict(config)).save_pretrained(tmp_path / "first")
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    tree = ost.load(tmp_path / "first", family=family)
    ost.save(tmp_path / "second", tree, family=family, config=config, variant=AS_MADE.get(family.name))
    found, expected = shapes(tmp_path / "second"), shapes(tmp_path / "first")
    # `transformers` 5.24 renames the layers of Kimi's language model as it renames those of its tower.
    expected = {re.sub(r"^(language_model\.model\.)blocks", r"\1layers", name): expected[name] for name in expected}
    assert found.items() <= expected.items()
    left_out = expected.keys() - found.keys()
    assert not {name for name in left_out if not re.fullmatch(f"{TOWERS}|{ROUTERS}", name)}
