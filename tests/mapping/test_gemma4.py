"""Gemma 4: the configs that describe it, the switch for its tower, and what MaxText has no place for."""

import pytest

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import registry
from tests.support.evaluate import binder, bound, evaluate, unused
from tests.support.family_samples import FAMILY, Sample

EVERY = ("gemma4", "gemma4_moe", "gemma4_small")
TOWER = "params.vision_encoder."


def text(sample):
    return sample.config["text_config"]


# --- configs ---


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "keys", [["per_layer_config"], ["global_head_dim", "num_global_key_value_heads"]], ids=["published", "transformers"]
)
def test_heads_of_global_layers_in_either_spelling(name, keys):
    """The samples' configs have both."""
    sample = Sample(name)
    expected = sample.describe()
    for key in keys:
        del text(sample)[key]
    assert sample.describe() == expected


@pytest.mark.parametrize("name", EVERY)
def test_the_kinds_of_layers_have_a_default(name):
    sample = Sample(name)
    if name == "gemma4_small":  # every fifth layer is global, by default every sixth
        text(sample)["layer_types"] = None
        del text(sample)["per_layer_config"]
        with pytest.raises(MappingError, match=r"layers.4.self_attn.q_proj.weight is stored as \(32, 16\), not"):
            sample.describe()
        return
    expected = sample.describe()
    del text(sample)["layer_types"]
    assert sample.describe() == expected


@pytest.mark.parametrize("name", EVERY)
def test_a_language_model_alone(name):
    sample = Sample(name)
    stored = {
        name.replace("model.language_model.", "model."): array
        for name, array in sample.stored.items()
        if "vision" not in name
    }
    tree = sample.family.describe(text(sample), {}, binder(stored))
    made = sample.made_by_maxtext(sample.scanned)
    assert tree.keys() == {path for path in made if not path.startswith(TOWER)}
    for path, view in tree.items():
        assert evaluate(view, stored).tobytes() == made[path].tobytes(), path


def published(**more):
    """What a published config has that the default of its class is not."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, **more},
    }


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((f"maxtext.{name.removesuffix('_moe')}", Sample(name).config) for name in EVERY),
        ("maxtext.gemma4", published(hidden_size_per_layer_input=0, attention_k_eq_v=True)),
        ("maxtext.gemma4_small", published(hidden_size_per_layer_input=0, num_kv_shared_layers=3)),
        ("maxtext.gemma4_small", published()),  # the default is an embedding for each layer
        ("maxtext.gemma4_small", {"model_type": "gemma4_text"}),
    ],
)
def test_the_config_tells_large_models_from_small_ones(name, config):
    assert registry.find("maxtext", config).name == name


@pytest.mark.parametrize("wrong", [None, 3])
def test_a_config_that_cannot_tell(wrong):
    with pytest.raises(
        MappingError, match="maxtext.gemma4: cannot tell from this config.json if it applies: TypeError"
    ):
        registry.find("maxtext", {"architectures": ["Gemma4ForCausalLM"], "text_config": wrong})


# --- the tower ---


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_clipped_linears", True, "use_clipped_linears = True, which adds parameters that MaxText's tree has no"),
        ("standardize", False, "config.json has standardize = False, and MaxText's tree is for True"),
    ],
)
def test_towers_that_maxtext_has_no_place_for(key, value, message):
    sample = Sample("gemma4")
    sample.config["vision_config"][key] = value
    with pytest.raises(MappingError, match=message):
        sample.describe()
    assert not any(path.startswith(TOWER) for path in sample.describe(use_multimodal=False))


def test_sounds_are_left_out():
    for name in EVERY:
        tree = Sample(name).describe()
        assert unused(tree, "model.audio_tower.layers.0.feed_forward1.ffw_layer_1.linear.weight")
        assert unused(tree, "model.embed_audio.embedding_projection.weight")


# --- small models ---


def test_keys_and_values_that_are_not_used_may_be_stored():
    sample = Sample("gemma4_small")
    tree = sample.describe()
    for part in ("k_proj", "v_proj", "k_norm"):
        assert unused(tree, f"model.language_model.layers.10.self_attn.{part}.weight")
        assert unused(tree, f"model.language_model.layers.19.self_attn.{part}.weight")
        assert not unused(tree, f"model.language_model.layers.1.self_attn.{part}.weight")
        assert not unused(tree, f"model.language_model.layers.9.self_attn.{part}.weight")
    assert not unused(tree, "model.language_model.layers.19.self_attn.q_proj.weight")


def test_a_model_without_shared_layers_uses_all_keys():
    sample = Sample("gemma4_small")
    text(sample)["num_kv_shared_layers"] = 0
    tree = sample.family.describe(sample.config, {}, bound)
    assert all(f"params.decoder.layers_{i}.self_attention.value.kernel" in tree for i in range(20))
    assert not unused(tree, "model.language_model.layers.19.self_attn.k_proj.weight")


# --- what MaxText has no place for ---


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("gemma4", "attention_k_eq_v", False, "attention_k_eq_v = False, and MaxText's tree is for True"),
        ("gemma4", "num_kv_shared_layers", 2, "num_kv_shared_layers = 2, which adds parameters"),
        ("gemma4", "hidden_size_per_layer_input", 5, "hidden_size_per_layer_input = 5, which adds parameters"),
        ("gemma4", "attention_bias", True, "attention_bias = True, which adds parameters"),
        (
            "gemma4",
            "layer_types",
            ["full_attention"] * 12,
            "in the last layer of each 6, and config.json in layers 0, 1, .* of 12",
        ),
        ("gemma4_small", "attention_k_eq_v", True, "attention_k_eq_v = True, and MaxText's tree is for False"),
        ("gemma4_small", "enable_moe_block", True, "enable_moe_block = True, which adds parameters"),
    ],
)
def test_models_that_maxtext_has_no_place_for(name, key, value, message):
    sample = Sample(name)
    text(sample)[key] = value
    with pytest.raises(MappingError, match=message):
        sample.describe()


def test_the_last_layer_is_always_global():
    """Whatever the config says, so that MaxText has no place for other numbers of layers."""
    sample = Sample("gemma4")
    text(sample)["num_hidden_layers"] = 8
    text(sample)["layer_types"] = text(sample)["layer_types"][:8]
    for scan_layers in (True, False):
        with pytest.raises(MappingError, match="config.json in layers 5, 7 of 8, counted from 0"):
            sample.describe(scan_layers=scan_layers)


@pytest.mark.parametrize(("name", "layers"), [("gemma4", 12), ("gemma4_small", 20)])
@pytest.mark.parametrize("other", [-1, 1])
def test_layer_types_are_for_all_layers_and_for_no_others(name, layers, other):
    sample = Sample(name)
    kinds = text(sample)["layer_types"]
    assert len(kinds) == layers
    text(sample)["layer_types"] = (kinds * 2)[: layers + other]
    with pytest.raises(MappingError, match=f"expected layer_types for {layers} layers, .* found {layers + other} of"):
        sample.describe()


def test_architectures_are_shared_by_two_families():
    assert FAMILY["maxtext.gemma4"].architectures == FAMILY["maxtext.gemma4_small"].architectures
