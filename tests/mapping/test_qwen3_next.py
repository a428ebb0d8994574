"""Qwen3-Next and Qwen3.5: where full attention is, how experts are stored, and the switch for the tower."""

import json

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import registry
from tests.support.compare import assert_same_arrays
from tests.support.evaluate import binder, evaluate, unused
from tests.support.family_samples import Sample
from tests.support.files import write

TOWER = "params.vision_encoder."
LANGUAGE = "model.language_model."


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3.5"])
@pytest.mark.parametrize("key", ["full_attention_interval", "layer_types"])
def test_full_attention_is_where_the_other_key_says(name, key):
    """Some configs have both keys, and others one."""
    sample = Sample(name)
    expected = sample.describe()
    del sample.config.get("text_config", sample.config)[key]
    assert sample.describe() == expected


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3.5"])
def test_layers_of_prediction_are_left_out(name):
    tree = Sample(name).describe()
    assert unused(tree, "mtp.layers.0.mlp.experts.0.up_proj.weight")
    assert unused(tree, "mtp.norm.weight")


def test_a_config_that_names_only_the_model():
    assert registry.find("maxtext", {"model_type": "qwen3_5_moe"}).name == "maxtext.qwen3_5"
    assert registry.find("maxtext", {"model_type": "qwen3_5_moe_text"}).name == "maxtext.qwen3_5"
    assert registry.find("maxtext", {"model_type": "qwen3_next"}).name == "maxtext.qwen3_next"


def test_a_language_model_alone():
    sample = Sample("qwen3.5")
    stored = {
        name.replace(LANGUAGE, "model."): array for name, array in sample.stored.items() if ".visual." not in name
    }
    tree = sample.family.describe(sample.config["text_config"], {}, binder(stored))
    made = {path: array for path, array in sample.made_by_maxtext(True).items() if not path.startswith(TOWER)}
    assert tree.keys() == made.keys()
    assert all(evaluate(view, stored).tobytes() == made[path].tobytes() for path, view in tree.items())
    with pytest.raises(MappingError, match="use_multimodal is True, and config.json does not describe the tower"):
        sample.family.describe(sample.config["text_config"], {"use_multimodal": True}, binder(stored))


# --- experts ---


def with_separate_experts(stored):
    """The tensors as `transformers` saves them."""
    out = {}
    for name, array in stored.items():
        if name.endswith(".experts.gate_up_proj"):
            for e, expert in enumerate(array):
                gate, up = np.split(expert, 2)
                base = name.replace("gate_up_proj", f"{e}.")
                out |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            out |= {name.replace("down_proj", f"{e}.down_proj.weight"): expert for e, expert in enumerate(array)}
        else:
            out[name] = array
    return out


@pytest.mark.parametrize("prefix", [LANGUAGE, "model."])
def test_experts_are_found_as_they_are_stored(tmp_path, prefix):
    sample = Sample("qwen3.5")
    alone = prefix == "model."
    stored = {
        name.replace(LANGUAGE, prefix): array
        for name, array in with_separate_experts(sample.stored).items()
        if not (alone and ".visual." in name)
    }
    # A layer of prediction has experts one by one whatever the others have.
    stored["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = np.zeros((11, 24), np.float32)
    write(tmp_path / "model.safetensors", stored)
    config = sample.config["text_config"] | {"architectures": ["Qwen3_5MoeForCausalLM"]} if alone else sample.config
    (tmp_path / "config.json").write_text(json.dumps(config))
    with ost.SafetensorsCheckpointer(family="maxtext") as checkpointer:
        separate = checkpointer.restore(tmp_path)["params"]
        joint = checkpointer.restore(sample.directory / "hf")["params"]
    block = "layers", "layer_1", "mlp", "routed_experts"
    for part in ("wi_0", "wi_1", "wo"):
        found, expected = separate["decoder"], joint["decoder"]
        for key in (*block, part):
            found, expected = found[key], expected[key]
        assert found.tobytes() == expected.tobytes()
    assert ("vision_encoder" in separate) == (not alone)


@pytest.mark.parametrize("separate", [None, False, True])
def test_experts_are_saved_together_unless_the_caller_wants_them_separate(tmp_path, separate):
    sample = Sample("qwen3.5")
    variant = {} if separate is None else {"separate_experts": separate}
    with ost.SafetensorsCheckpointer(family="maxtext") as checkpointer:
        tree = checkpointer.restore(sample.directory / "hf")
        args = ost.SafetensorsSave(tree, config=sample.config, family="maxtext", variant=variant)
        checkpointer.save(tmp_path / "saved", args=args)
    with ost.SafetensorsCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "saved")
    expected = with_separate_experts(sample.stored) if separate else sample.stored
    assert_same_arrays(saved, expected)
