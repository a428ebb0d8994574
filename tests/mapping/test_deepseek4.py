"""DeepSeek-V4's spellings and kinds of layers."""

import re

import ml_dtypes
import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.errors import MappingError
from tests.support.compare import assert_same_arrays
from tests.support.evaluate import bound
from tests.support.family_samples import Sample
from tests.support.files import write

# From the published names to those that MaxText's converter asks for.
PUBLISHED = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{block}_{part}": f"{block}_hc.{part}" for block in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    **{
        f"ffn.shared_experts.{short}.weight": f"mlp.shared_experts.{long}_proj.weight"
        for short, long in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    },
    **{
        f"ffn.experts.{e}.{part}.weight": f"mlp.experts.{e}.{part}.weight"
        for e in range(5)
        for part in ("w1", "w2", "w3")
    },
}


@pytest.fixture
def sample():
    return Sample("deepseek4")


def published(name):
    whole = {ours: theirs for theirs, ours in PUBLISHED.items()}
    if layer := re.fullmatch(r"model\.(layers\.\d+\.)(.+)", name):
        return layer[1] + whole[layer[2]]
    return whole[name]


def test_published_names(sample, tmp_path):
    stored = {published(name): array for name, array in sample.files.items()}
    assert not stored.keys() & (sample.files.keys() - {"head.weight"})
    stored["mtp.0.attn.wq_a.weight"] = np.zeros((2, 2), "f4")
    write(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text((sample.directory / "hf" / "config.json").read_text())
    with ost.SafetensorsCheckpointer(family="maxtext") as checkpointer:
        tree = checkpointer.restore(tmp_path)
        assert_same_arrays(tree, sample.made_by_maxtext(True))
        checkpointer.save(tmp_path / "whole", args=ost.SafetensorsSave(tree, like=tmp_path))
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree, like=tmp_path, rest="leave"))
    assert ost.open_checkpoint(tmp_path / "whole").tensors.keys() == stored.keys()
    saved = ost.open_checkpoint(tmp_path / "saved").tensors
    without_place = {name for name in stored if name.startswith("mtp.") or re.search(r"gate\.(bias|tid2eid)$", name)}
    assert saved.keys() == stored.keys() - without_place


def test_ratios_instead_of_kinds(sample):
    """Published configs list the ratios, and one more for the layer of multi-token prediction."""
    config = {key: value for key, value in sample.config.items() if key != "layer_types"}
    config["compress_ratios"] = [0, 0, 4, 128, 4, 128, 4, 0]
    again = Sample("deepseek4")
    again.config = config
    assert {path: str(view) for path, view in again.describe().items()} == {
        path: str(view) for path, view in sample.describe().items()
    }


def test_the_scales_of_norms_that_are_not_stored_are_ones_of_float32(sample, tmp_path):
    narrow = {
        name: array.astype(ml_dtypes.bfloat16) if array.dtype == np.float32 else array
        for name, array in sample.stored.items()
    }
    write(tmp_path / "model.safetensors", narrow)
    (tmp_path / "config.json").write_text((sample.directory / "hf" / "config.json").read_text())
    with ost.SafetensorsCheckpointer(family="maxtext") as checkpointer:
        decoder = checkpointer.restore(tmp_path)["params"]["decoder"]
    scale = decoder["scanned_blocks"]["layers_0"]["mhc_mlp"]["mhc_norm"]["scale"]
    assert scale.dtype == np.float32
    np.testing.assert_array_equal(scale, np.ones((56, 2)))
    assert decoder["layers_0"]["mhc_mlp"]["pre_beta"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("change", "scan_layers", "message"),
    [
        ({"hc_mult": 2}, False, "config.json has hc_mult = 2, and MaxText's tree is for 4"),
        ({"num_hash_layers": 2}, False, "config.json has num_hash_layers = 2, and MaxText's tree is for 3"),
        ({"num_hidden_layers": 6}, True, r"in pairs of the ratios \[128, 4\]; .* \[0, 0, 4, 128, 4, 128\]"),
        ({"num_hidden_layers": 8}, False, "ratios .* for 8 layers, found"),
        ({"layer_types": ["full_attention"] * 7}, False, "ratios .* for 7 layers, found .'full_attention'"),
        ({"layer_types": None, "compress_ratios": [0, 0, 4, 128, 8, 128, 8]}, False, "ratios .* for 7 layers, found"),
        (
            {"layer_types": None, "compress_ratios": [0, 0, 4, 128, 4, 4, 4]},
            True,
            r"in pairs of the ratios \[128, 4\]; config.json has the ratios \[0, 0, 4, 128, 4, 4, 4\]",
        ),
    ],
)
def test_configs_that_maxtext_has_no_place_for(sample, change, scan_layers, message):
    with pytest.raises(MappingError, match=message):
        sample.family.describe(sample.config | change, {"scan_layers": scan_layers}, bound)
