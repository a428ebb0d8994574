"""What configs say of quantised tensors: checked, and compared with what is stored."""

import numpy as np
import pytest

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping.quantization import quantization
from tests.support.quantized_facts import (
    E4M3,
    FP8,
    GPTQ,
    GPTQ_STORED,
    INT4,
    MODELOPT,
    NVFP4,
    PACKED,
    compressed,
)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "expected an object"),
        ({}, "found None"),
        ({"quant_method": "hqq", "bits": 4}, "'hqq'"),
        ({"quant_method": ["fp8"]}, r"\['fp8'\]"),
        ({"quant_method": "gptq", "bits": "4"}, r"expected integers as bits and group_size, .* found '4'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": True}, "expected integers as bits and group_size"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format gptq or gptq_v2, found 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "version gemm, found 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"\[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"\[128, 0\]"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "found 128"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}, "rotations"),
        (compressed(num_bits=[4], type="int"), "expected integers"),
        (compressed(num_bits=4, type="int", group_size="32"), "expected integers"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 4}}}, "not valid"),
        (compressed(strategy="block"), "block size of two positive integers, found None"),
        (compressed(strategy="token"), "strategy .* found 'token'"),
        (compressed(symmetric="no"), "true or false as symmetric, found 'no'"),
        ({"quant_method": "gptq", "desc_act": 1}, "true or false as desc_act, found 1"),
        ({"quant_method": "gptq", "dynamic": ["a"]}, r"expected an object of objects as dynamic, found \['a'\]"),
        ({"quant_method": "gptq", "dynamic": {"a": 4}}, r"expected an object of objects as dynamic, found \{'a': 4\}"),
        ({"quant_method": "gptq", "dynamic": {"-:(": {}}}, r"'\(' is not a regular expression: "),
        ({"quant_method": "gptq", "dynamic": {"a": {"bits": "8"}}}, "expected integers as bits .* found '8'"),
        ({"quant_method": "auto-round", "bits": 4}, "expected packing_format auto_round, .*auto_awq, found None"),
        ({"quant_method": "auto-round", "packing_format": [4]}, r"expected packing_format .*, found \[4\]"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            "expected packing_format .*, found 'auto_round:llm_compressor'",
        ),
    ],
)
def test_methods_that_are_not_known_are_named(config, said):
    with pytest.raises(MappingError, match=f"'a.weight'.* I8 .*quantization_config: .*{said}"):
        quantization(config, {"a.weight": ((2, 2), "I8")})


ASYMMETRIC = compressed(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)
PERMUTED = compressed(num_bits=4, type="int", strategy="group", group_size=32, actorder="group")
TWO = {
    **ASYMMETRIC,
    "config_groups": {n: each["config_groups"]["group_0"] for n, each in zip("ab", (ASYMMETRIC, INT4), strict=True)},
}
MX4 = {"a.weight_packed": ((6, 32), "U8"), "a.weight_scale": ((6, 2), "U8")}
DEEPSEEK = {"a.w1.weight": ((6, 16), "I8"), "a.w1.scale": ((6, 1), "F8_E8M0"), "b.weight": ((6, 16), "I8")}


def fp8(scales, dtype="F32"):
    return {"a.weight": ((256, 256), "F8_E4M3"), "a.weight_scale": (scales, dtype)}


@pytest.mark.parametrize(
    ("config", "stored", "said"),
    [
        (
            ASYMMETRIC,
            PACKED,
            "'a.weight_packed': expected 'a.weight_zero_point', .*asymmetric.* no such tensor",
        ),
        (PERMUTED, PACKED, "'a.weight_packed': expected 'a.weight_g_idx', .*permuted.* no such tensor"),
        (
            GPTQ,
            {name: facts for name, facts in GPTQ_STORED.items() if name != "a.g_idx"},
            "'a.qweight': expected 'a.g_idx', .*permuted.* no such tensor",
        ),
        (GPTQ | {"group_size": -1}, GPTQ_STORED, r"'a.scales': expected shape \(64 / 64, 16\) .* found \(2, 16\)"),
        (FP8, fp8(()), r"'a.weight_scale': expected \(2, 2\) for blocks of 128 x 128 .* found shape \(\)"),
        (FP8, fp8((256, 1)), r"expected \(2, 2\) for blocks of 128 x 128 .* found shape \(256, 1\)"),
        (compressed(strategy="tensor"), fp8((256, 1)), r"expected .*\(1,\).* for the tensor .* found shape \(256, 1\)"),
        (compressed(symmetric=False), fp8((256, 1)), "'a.weight': expected another format, .*asymmetric.*, found fp8"),
        (compressed(), fp8((1,)), r"expected \(256, 1\) .* for rows .* found shape \(1,\)"),
        (
            compressed(strategy="group", group_size=64),
            fp8((256, 8), "U8"),
            r"expected \(256, 4\) for groups of 64 .* \(256, 8\)",
        ),
        ({"quant_method": "mxfp8"}, fp8((256, 16), "U8"), r"expected \(256, 8\) for blocks of 1 x 32 .* \(256, 16\)"),
        (None, fp8((256, 16), "F8_E8M0"), r"expected .*\(256, 8\) for groups of 32 .* found shape \(256, 16\)"),
        (MODELOPT | {"quant_algo": "FP8"}, fp8((256,)), r"expected .* for the tensor .* found shape \(256,\)"),
        (MODELOPT | {"group_size": 32}, NVFP4, "'a.weight': expected groups of 32, .* found NVFP4, .* groups of 16"),
        (
            compressed(num_bits=4, strategy="group", group_size=16),
            MX4,
            "'a.weight_packed': expected groups of 16, .* found MXFP4, which has groups of 32",
        ),
        (FP8, DEEPSEEK, "'b.weight' is I8: expected .* its scales, found no such tensor"),
        (None, DEEPSEEK, "'b.weight' is I8: expected .* its scales, found no such tensor"),
        (None, fp8(()) | {"b.weight": (E4M3, "F8_E4M3")}, "'b.weight' is F8_E4M3: expected its scales"),
        (
            compressed(),
            {"a.compressed": ((9,), "BF16"), "a.bitmask": ((6, 8), "U8")},
            "'a.bitmask' is U8: expected plain",
        ),
        (None, {"a.weight_packed": ((6, 8), "I32")}, "'a.weight_packed' is I32: expected its scales"),
    ],
)
def test_files_that_contradict_their_config_are_named(config, stored, said):
    with pytest.raises(MappingError, match=said):
        quantization(config, stored)


@pytest.mark.parametrize("scales", [(6, 0), (0,), (6, 1000), (0, 0)], ids=str)
def test_scales_that_no_group_can_have(scales):
    stored = PACKED | {"a.weight_scale": (scales, "BF16")}
    with pytest.raises(MappingError, match=r"'a.weight_scale': expected .*\(6,\) for rows"):
        quantization(None, stored, lambda name: np.array([6, 64]).tobytes())


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (TWO, PACKED),  # each of the groups of a config may be meant
        (TWO, PACKED | {"a.weight_zero_point": ((1, 2), "I32")}),
        (INT4, PACKED | {"a.weight_zero_point": ((1, 2), "I32")}),
        (FP8, {"a.weight": ((100, 100), "F8_E4M3"), "a.weight_scale": ((), "F32")}),
        (GPTQ | {"desc_act": False}, {name: facts for name, facts in GPTQ_STORED.items() if name != "a.g_idx"}),
        (MODELOPT | {"group_size": 16}, NVFP4),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, fp8((256,))),
        (compressed(num_bits=4, strategy="group", group_size=32), MX4),
        (INT4, PACKED | {"a.input_zero_point": ((1,), "I8"), "attn.k_cache_scale": ((), "F32")}),
        (None, fp8(()) | {"a.layer_norm_weight": ((256,), "BF16"), "a._extra_state": ((9,), "U8")}),
        (None, fp8(()) | {"a.A_log": ((16,), "BF16"), "a.D": ((16,), "F32"), "a.inv_freq": ((16,), "F32")}),
    ],
)
def test_files_that_their_config_allows_are_decoded(config, stored):
    assert quantization(config, stored).tensors.keys() == {"a.weight"}
