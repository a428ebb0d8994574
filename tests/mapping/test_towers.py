"""Families of models with towers for images and sounds: switches, and what is stored in several ways."""

import re

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping.family import wrapper_of
from orbax_safetensors.mapping.inference import fit
from tests.support.evaluate import bound, unused
from tests.support.family_samples import FAMILY, Sample
from tests.support.files import write

WITH_TOWERS = ["llama4", "qwen3_omni", "qwen3_vl", "qwen3_vl_moe"]
UNSCANNED = ["qwen3_omni", "qwen3_vl", "qwen3_vl_moe"]
TOWER = re.compile(r"params\.(vision|audio)_encoder\..+")
EXPERTS = "model.language_model.layers.{}.mlp.experts.{}_proj"


def towers(tree):
    return {path for path in tree if TOWER.fullmatch(path)}


def stored_names(tree):
    return {name for view in tree.values() for name in view.tensors}


@pytest.mark.parametrize("name", WITH_TOWERS)
class TestUseMultimodal:
    def test_none_leaves_out_what_is_not_stored(self, name):
        sample = Sample(name)
        tree = sample.describe(scan_layers=False)
        optional = {path for path in tree for pattern in tree.optional if re.fullmatch(pattern, path)}
        assert towers(tree) == optional != set()

    def test_true_wants_the_tower(self, name):
        tree = Sample(name).describe(scan_layers=False, use_multimodal=True)
        assert towers(tree)
        assert not any(re.fullmatch(pattern, path) for pattern in tree.optional for path in tree if "vision" in path)

    def test_false_leaves_the_tower_out(self, name):
        sample = Sample(name)
        switches = {"use_multimodal": False} | ({"use_audio": False} if name == "qwen3_omni" else {})
        tree = sample.describe(scan_layers=False, **switches)
        assert not towers(tree)
        left = sample.stored.keys() - stored_names(tree)
        assert left
        assert all(unused(tree, tensor) for tensor in left)
        assert not any(unused(tree, tensor) for tensor in stored_names(tree))

    def test_a_config_without_a_tower(self, name):
        sample = Sample(name)
        whole = sample.config.get("thinker_config", sample.config)
        del whole["vision_config"]
        assert not [path for path in sample.describe(scan_layers=False) if "vision" in path]
        with pytest.raises(MappingError, match="use_multimodal is True, and config.json does not describe the tower"):
            sample.describe(scan_layers=False, use_multimodal=True)

    def test_it_follows_from_the_leaves(self, name):
        sample = Sample(name)
        leaves = {path: array.shape for path, array in sample.made_by_maxtext(False).items()}
        text = {path: shape for path, shape in leaves.items() if not TOWER.fullmatch(path)}
        for known, expected in ((leaves, None), (text, False)):
            found = fit([sample.family], sample.config, known, sample.shapes)
            assert found.variant["use_multimodal"] is expected
            assert found.variant["scan_layers"] is False


class TestUseAudio:
    def test_without_the_other_tower(self):
        sample = Sample("qwen3_omni")
        tree = sample.describe(use_multimodal=False)
        assert {path.split(".")[1] for path in towers(tree)} == {"audio_encoder"}
        seen = sample.describe(use_audio=False)
        assert {path.split(".")[1] for path in towers(seen)} == {"vision_encoder"}

    def test_it_follows_from_the_leaves(self):
        sample = Sample("qwen3_omni")
        leaves = {path: None for path in sample.made_by_maxtext(False) if "audio_encoder" not in path}
        found = fit([sample.family], sample.config, leaves, sample.shapes)
        assert (found.variant["use_multimodal"], found.variant["use_audio"]) == (None, False)

    def test_a_config_without_the_tower(self):
        sample = Sample("qwen3_omni")
        del sample.config["thinker_config"]["audio_config"]
        with pytest.raises(MappingError, match="use_audio is True, and config.json does not describe the tower"):
            sample.describe(use_audio=True)


def test_parts_that_speak_are_left_out():
    tree = Sample("qwen3_omni").describe()
    assert unused(tree, "talker.model.layers.0.self_attn.q_proj.weight")
    assert unused(tree, "code2wav.decoder.0.conv.weight")


@pytest.mark.parametrize("name", UNSCANNED)
def test_layers_that_maxtext_does_not_stack(name):
    sample = Sample(name)
    with pytest.raises(MappingError, match="does not stack the layers .*; expected scan_layers False, found True"):
        sample.describe(scan_layers=True)
    assert wrapper_of(sample.family, None).custom_metadata == {"scan_layers": False}


@pytest.mark.parametrize("step", [1, 2])
def test_layers_of_llama_4_without_experts(step):
    sample = Sample("llama4")
    text = {**sample.config["text_config"], "interleave_moe_layer_step": step, "moe_layers": None}
    tree = sample.family.describe({**sample.config, "text_config": text}, {}, bound)
    dense = {path.split(".")[3] for path in tree if path.endswith(".mlp.wo.kernel")}
    assert dense == ({"layers_0", "layers_2"} if step == 2 else set())
    if dense:
        view = tree["params.decoder.layers.layers_0.mlp.wo.kernel"]
        assert view.shape == (text["intermediate_size_mlp"], 2, text["hidden_size"])


def test_experts_of_llama_4_in_other_layers_are_refused():
    sample = Sample("llama4")
    sample.config["text_config"]["moe_layers"] = [1, 3, 5]
    with pytest.raises(MappingError, match=r"config.json has moe_layers = \[1, 3, 5\], and MaxText's tree is for"):
        sample.describe()


class TestTransposedExperts:
    """Qwen3-VL's experts, as `transformers` stores a model that it has made."""

    @pytest.fixture
    def transposed(self, tmp_path):
        sample = Sample("qwen3_vl_moe")
        stored = dict(sample.stored)
        for layer in range(3):
            for part in ("gate_up", "down"):
                name = EXPERTS.format(layer, part)
                stored[name] = np.ascontiguousarray(stored[name].transpose(0, 2, 1))
        write(tmp_path / "model.safetensors", stored)
        (tmp_path / "config.json").write_text((sample.directory / "hf" / "config.json").read_text())
        return tmp_path

    def restored(self, directory, **variant):
        with ost.SafetensorsCheckpointer(family="maxtext", variant=variant) as checkpointer:
            return checkpointer.restore(directory)

    def test_it_follows_from_the_stored_shapes(self, transposed):
        sample = Sample("qwen3_vl_moe")
        found = self.restored(transposed)
        for i in range(3):
            block = found["params"]["decoder"][f"layers_{i}"]["moe_block"]
            for part in ("wi_0", "wi_1", "wo"):
                expected = sample.made_by_maxtext(False)[f"params.decoder.layers_{i}.moe_block.{part}"]
                assert block[part].tobytes() == expected.tobytes()

    def test_the_caller_decides(self, transposed):
        with pytest.raises(MappingError, match=r"experts.gate_up_proj' of shape \(5, 20, 22\), found \(5, 22, 20\)"):
            self.restored(transposed, transposed_experts=False)

    def test_a_save_writes_the_published_layout(self, transposed):
        sample = Sample("qwen3_vl_moe")
        with ost.SafetensorsCheckpointer(family="maxtext") as checkpointer:
            tree = checkpointer.restore(transposed)
            checkpointer.save(transposed / "saved", args=ost.SafetensorsSave(tree, config=sample.config))
        saved = ost.open_checkpoint(transposed / "saved")
        assert {name: leaf.shape for name, leaf in saved.tensors.items()} == {
            name: array.shape for name, array in sample.stored.items()
        }

    @pytest.mark.parametrize(
        ("gate_up", "down", "expected"),
        [
            ((4, 6, 16), (4, 8, 6), False),
            ((4, 16, 6), (4, 6, 8), True),
            ((4, 16, 16), (4, 8, 16), False),
            ((4, 16, 16), (4, 16, 8), True),
            ((4, 8, 16), (4, 8, 8), False),
            ((4, 16, 8), (4, 8, 8), True),
        ],
    )
    def test_no_sizes_are_ambiguous(self, gate_up, down, expected):
        shapes = {EXPERTS.format(0, "gate_up"): gate_up, EXPERTS.format(0, "down"): down}
        assert FAMILY["maxtext.qwen3_vl_moe"].stored_as(shapes) == {"transposed_experts": expected}

    def test_other_tensors_say_nothing(self):
        assert FAMILY["maxtext.qwen3_vl_moe"].stored_as({"model.norm.weight": (3,)}) == {}
