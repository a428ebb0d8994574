"""Kimi K2 and its successors in MaxText's tree: DeepSeek-V3's, also if they are parts of a model that reads images."""

import json

import ml_dtypes
import numpy as np
import pytest

import orbax_safetensors as ost
from tests.support.compare import assert_same_arrays
from tests.support.family_samples import Sample
from tests.support.files import write

BF16 = np.dtype(ml_dtypes.bfloat16)
SPELLINGS = {
    "published": ("language_model.model.", "language_model.lm_head.", "KimiK25ForConditionalGeneration"),
    "transformers": ("model.language_model.", "lm_head.", "Kimi_K25ForConditionalGeneration"),
}


def packed(weight):
    """Codes of 4 bits in int32 words, a scale for each row, and the values of both, in float32."""
    rows, columns = weight.shape
    scale = np.maximum(np.abs(weight).max(axis=1, keepdims=True) / 7, 1e-6).astype(BF16)
    codes = np.clip(np.rint(weight / scale.astype(np.float32)), -8, 7).astype(np.int64)
    fields = np.zeros((rows, -(-columns // 8) * 8), np.int64)
    fields[:, :columns] = codes + 8
    words = (fields.reshape(rows, -1, 8) << np.arange(0, 32, 4)).sum(-1).astype(np.uint32).view(np.int32)
    stored = {"packed": words, "scale": scale, "shape": np.array([rows, columns], np.int64)}
    return stored, codes.astype(np.float32) * scale.astype(np.float32)


def model(spelling):
    """The names, config and tensors of a model that reads images, with Kimi K2's for text in the sample."""
    sample = Sample("kimi-k2")
    body, head, architecture = SPELLINGS[spelling]
    config = {"architectures": [architecture], "model_type": "kimi_k25", "text_config": sample.config}
    stored = {
        name.replace("lm_head.", head) if name.startswith("lm_head.") else name.replace("model.", body, 1): array
        for name, array in sample.stored.items()
    }
    stored |= {"vision_tower.patch_embed.proj.bias": np.ones(3, np.float32)}
    stored |= {"mm_projector.proj.0.bias": np.ones(3, np.float32)}
    return sample, config, stored


def save(directory, config, stored):
    write(directory / "model.safetensors", stored)
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_language_model_is_a_deepseek_v3(tmp_path, spelling, scan_layers):
    sample, config, stored = model(spelling)
    save(tmp_path, config, stored)
    variant = {"scan_layers": scan_layers}
    tree = ost.load(tmp_path, family="maxtext", variant=variant)
    assert_same_arrays(tree, sample.made_by_maxtext(scan_layers))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_experts_of_four_bits(tmp_path, spelling):
    """As published: the routed experts alone are codes, and the config for the text says so."""
    sample, config, stored = model(spelling)
    sample_text = dict(sample.config)
    weights = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True, "group_size": None}
    sample_text["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    }
    plain = dict(stored)
    for name in [name for name in stored if ".mlp.experts." in name]:
        parts, plain[name] = packed(stored.pop(name))
        stored |= {f"{name}_{part}": array for part, array in parts.items()}
    (tmp_path / "plain").mkdir()
    save(tmp_path / "plain", config, plain)
    save(tmp_path, {**config, "text_config": sample_text}, stored)
    assert_same_arrays(ost.load(tmp_path, family="maxtext"), ost.load(tmp_path / "plain", family="maxtext"))


def test_a_save_has_the_published_names(tmp_path):
    sample, config, stored = model("published")
    save(tmp_path, config, stored)
    params = ost.load(tmp_path, family="maxtext")
    ost.save(tmp_path / "again", params, family="maxtext", config=config)
    names = {f"language_model.{name}" for name in sample.stored}
    assert set(ost.open_checkpoint(tmp_path / "again").tensors) == names
    ost.save(tmp_path / "like", params, family="maxtext", like=tmp_path)
    assert ost.open_checkpoint(tmp_path / "like").tensors.keys() == stored.keys()
    ost.save(tmp_path / "text", params, family="maxtext", like=tmp_path, rest="leave")
    towers = {name for name in stored if "language_model" not in name}
    assert set(ost.open_checkpoint(tmp_path / "text").tensors) == stored.keys() - towers
