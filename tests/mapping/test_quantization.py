"""Quantised checkpoints by their names, shapes and dtypes, down to the full-size ones; and those that are wrong."""

import gzip
import json

import pytest

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry.encoding import Encoding
from orbax_safetensors.mapping.quantization import Quantized, quantization
from tests.support.roots import TESTDATA

GEOMETRY = TESTDATA / "geometry"
F8, F4, F32, BF16, U8 = (DTYPES[name] for name in ("F8_E4M3", "F4", "F32", "BF16", "U8"))
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}


def compressed(**weights):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def full_size(name):
    config = json.loads((GEOMETRY / f"{name}.config.json").read_text())
    with gzip.open(GEOMETRY / f"{name}.json.gz") as file:
        stored = {key: (tuple(shape), dtype) for key, (dtype, shape) in json.load(file).items()}
    return config["quantization_config"], stored


def restored(config, stored):
    """The names and shapes that a model sees."""
    found = quantization(config, stored)
    names = {part for tensor in found.tensors.values() for part in (tensor.codes, tensor.scales)} | found.unused
    seen = {name: shape for name, (shape, _) in stored.items() if name not in names}
    return seen | {
        name: tuple(tensor.encoding.shape[axis] for axis in tensor.axes) for name, tensor in found.tensors.items()
    }


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_full_size_mxfp4_is_what_the_plain_model_stores(name):
    with gzip.open(GEOMETRY / f"{name}.json.gz") as file:
        plain = {key: tuple(shape) for key, (_, shape) in json.load(file).items()}
    assert restored(*full_size(f"{name}-mxfp4")) == plain


@pytest.mark.full_size
def test_full_size_fp8_is_taken_apart_completely():
    config, stored = full_size("deepseek-v3-fp8")
    found = quantization(config, stored)
    assert set(found.tensors) == {name for name, (_, dtype) in stored.items() if dtype == "F8_E4M3"}
    assert not found.unused
    seen = restored(config, stored)
    with gzip.open(GEOMETRY / "deepseek-v3.json.gz") as file:
        plain = {key: tuple(shape) for key, (_, shape) in json.load(file).items()}
    assert seen == plain
    kv = found.tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert kv.encoding.grid == (5, 56)
    assert len({id(tensor.encoding) for tensor in found.tensors.values()}) < 20


def test_without_a_config_nothing_is_quantised():
    assert not quantization(None, {"a.weight": ((2, 2), "F8_E4M3")}).tensors


def test_blocks_may_be_partial_and_other_tensors_stay_plain():
    stored = {
        "a.weight": ((130, 257), "F8_E4M3"),
        "a.weight_scale_inv": ((2, 3), "F32"),
        "lm_head.weight": ((130, 257), "BF16"),
        "logit_scale": ((), "F32"),
        "a.input_scale": ((), "F32"),
        "attn.k_scale": ((), "F32"),
        "experts.up_proj_activation_scale": ((), "F32"),
    }
    found = quantization(FP8, stored)
    assert found.tensors == {
        "a.weight": Quantized("a.weight", "a.weight_scale_inv", Encoding((130, 257), (128, 128), F8, F32), axes=(0, 1))
    }
    assert found.unused == {"a.input_scale", "attn.k_scale", "experts.up_proj_activation_scale"}


@pytest.mark.parametrize(
    ("config", "shape", "scales", "block"),
    [
        ({"quant_method": "fp8"}, (6, 4), (), (6, 4)),
        (FP8, (600, 4), (1,), (600, 4)),
        ({"quant_method": "fbgemm_fp8"}, (6, 4), (6, 1), (1, 4)),
        (compressed(), (6, 4), (6,), (1, 4)),
        (compressed(strategy="tensor"), (6, 4), (1,), (6, 4)),
        (compressed(strategy="block", block_structure=[2, 3]), (6, 4), (3, 2), (2, 3)),
        (compressed(strategy="block", block_structure=[2, 3]), (5, 6, 4), (5, 3, 2), (2, 3)),
        (FP8, (5, 256, 128), (5, 2, 1), (128, 128)),
    ],
)
def test_scales_for_tensors_channels_and_blocks(config, shape, scales, block):
    stored = {"a.weight": (shape, "F8_E4M3"), "a.weight_scale": (scales, "BF16")}
    (tensor,) = quantization(config, stored).tensors.values()
    assert tensor.encoding == Encoding(shape, block, F8, BF16)


def test_mxfp4_swaps_rows_and_columns():
    stored = {
        "e.down_proj_blocks": ((4, 5, 3, 16), "U8"),
        "e.down_proj_scales": ((4, 5, 3), "U8"),
        "e.down_proj_bias": ((4, 5), "BF16"),
    }
    assert quantization(MXFP4, stored).tensors == {
        "e.down_proj": Quantized(
            "e.down_proj_blocks", "e.down_proj_scales", Encoding((4, 5, 96), (1, 32), F4, U8), axes=(0, 2, 1)
        )
    }
    assert restored(MXFP4, stored) == {"e.down_proj": (4, 96, 5), "e.down_proj_bias": (4, 5)}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "expected an object"),
        ({}, "found None"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"\[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"\[128, 0\]"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "found 128"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (compressed(num_bits=4, type="int"), "'int', 4"),
        (compressed() | {"format": "pack-quantized"}, "'pack-quantized'"),
        (
            compressed()
            | {
                "config_groups": {
                    n: {"weights": {"type": "float", "num_bits": 8, "block_structure": [n, n]}} for n in (1, 2)
                }
            },
            "one block_structure",
        ),
    ],
)
def test_methods_that_are_not_known_are_named(config, said):
    with pytest.raises(MappingError, match=f"quantization_config: .*{said}"):
        quantization(config, {})


@pytest.mark.parametrize(
    ("config", "stored", "said"),
    [
        (FP8, {"a.weight": ((2, 2), "F8_E4M3")}, "'a.weight' is F8_E4M3: expected its scales 'a.weight_scale_inv'"),
        (FP8, {"a.weight_scale_inv": ((2, 2), "F32")}, "'a.weight': .* codes of 'a.weight_scale_inv'.* no such tensor"),
        (
            FP8,
            {"a.weight": ((2, 2), "BF16"), "a.weight_scale": ((), "F32")},
            "'a.weight': expected the codes .* in F8_E4M3, found BF16",
        ),
        (
            FP8,
            {"a.weight": ((2, 2), "F8_E5M2"), "a.weight_scale": ((), "F32")},
            "'a.weight': expected the codes .* in F8_E4M3, found F8_E5M2",
        ),
        (
            FP8,
            {"a.weight": ((2, 2), "F8_E4M3"), "a.weight_scale_inv": ((1, 1), "U8")},
            "'a.weight_scale_inv': expected the scales .* in F32 .*, found U8",
        ),
        (
            FP8,
            {"a.weight": ((130, 257), "F8_E4M3"), "a.weight_scale_inv": ((3, 2), "F32")},
            r"'a.weight_scale_inv': expected \(2, 3\) for blocks of 128 x 128, .* of 'a.weight' of shape \(130, 257\), "
            r"found shape \(3, 2\)$",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": None},
            {"a.weight": ((130, 257), "F8_E4M3"), "a.weight_scale_inv": ((2, 3), "F32")},
            r"found shape \(2, 3\); quantization_config has no block size",
        ),
        (
            FP8,
            {"a.weight": ((2, 2), "F8_E4M3"), "a.weight_scale": ((), "F32"), "a.weight_scale_inv": ((), "F32")},
            "expected one tensor of scales, found 'a.weight_scale' and 'a.weight_scale_inv'",
        ),
        (FP8, {"a.weight": ((2,), "F8_E4M3"), "a.weight_scale": ((), "F32")}, r"'a.weight': .* found shape \(2,\)"),
        (MXFP4, {"e_blocks": ((1, 2, 3, 16), "U8")}, "'e_scales': .* no such tensor"),
        (MXFP4, {"e_scales": ((1, 2, 3), "U8")}, "'e_blocks': .* no such tensor"),
        (
            MXFP4,
            {"e_blocks": ((1, 2, 3, 16), "U8"), "e_scales": ((1, 2, 3), "F32")},
            "'e_scales': expected the scales of 'e' in U8, found F32",
        ),
        (
            MXFP4,
            {"e_blocks": ((1, 2, 3, 8), "U8"), "e_scales": ((1, 2, 3), "U8")},
            r"'e_blocks': expected shape .* found \(1, 2, 3, 8\)",
        ),
        (
            MXFP4,
            {"e_blocks": ((1, 2, 3, 16), "U8"), "e_scales": ((1, 2, 4), "U8")},
            r"'e_scales': expected shape \(1, 2, 3\) .* found \(1, 2, 4\)",
        ),
        (
            MXFP4,
            {"e": ((1, 2), "BF16"), "e_blocks": ((1, 2, 3, 16), "U8"), "e_scales": ((1, 2, 3), "U8")},
            "'e': .* found both",
        ),
    ],
)
def test_what_does_not_fit_is_named(config, stored, said):
    with pytest.raises(MappingError, match=said):
        quantization(config, stored)
