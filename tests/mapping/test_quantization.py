"""Quantised checkpoints by their names, shapes and dtypes, down to the full-size ones; and those that are wrong."""

import gzip
import json

import numpy as np
import pytest

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.mapping.quantization import quantization
from tests.support.quantized import scaled
from tests.support.quantized_facts import (
    AUTO_ROUND,
    AUTO_STORED,
    AWQ,
    AWQ_STORED,
    BNB,
    BY_MODULE,
    FP8,
    FUSED,
    GEMMA,
    GEMMA_STORED,
    GPTQ,
    GPTQ_STORED,
    INT4,
    INT8,
    MLX,
    MLX_FP4,
    MLX_FP4_STORED,
    MLX_STORED,
    MODELOPT,
    MXFP4,
    NVFP4,
    PACKED,
    SHARDED,
    W8A8,
    W8A8_STORED,
    compressed,
)
from tests.support.roots import TESTDATA

GEOMETRY = TESTDATA / "geometry"
F32, BF16, U8 = (DTYPES[name] for name in ("F32", "BF16", "U8"))


def full_size(name):
    config = json.loads((GEOMETRY / f"{name}.config.json").read_text())
    with gzip.open(GEOMETRY / f"{name}.json.gz") as file:
        stored = {key: (tuple(shape), dtype) for key, (dtype, shape) in json.load(file).items()}
    return config["quantization_config"], stored


def restored(config, stored):
    """The names and shapes that a model sees."""
    found = quantization(config, stored)
    names = {part for tensor in found.tensors.values() for part in tensor.stored} | found.unused
    seen = {name: shape for name, (shape, _) in stored.items() if name not in names}
    for name, tensor in found.tensors.items():
        assert tensor.view(np.dtype(np.float32)).shape == tensor.shape
        seen[name] = tensor.shape
    return seen


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
    assert kv.encoding.parameters[0].grid == (5, 56)
    assert len({id(tensor.encoding) for tensor in found.tensors.values()}) < 20


def test_shapes_of_mlx_leave_bits_and_group_to_the_entry_of_a_module():
    config = {"quant_method": "mlx", "bits": 4, "group_size": 64, "b": {"bits": 8, "group_size": 32}}
    facts = {"weight": ((6, 16), "U32"), "scales": ((6, 2), "BF16"), "biases": ((6, 2), "BF16")}
    found = quantization(config, {f"{name}.{end}": fact for name in "ab" for end, fact in facts.items()}).tensors
    assert [(each.shape, each.encoding.bits) for each in found.values()] == [((6, 128), 4), ((6, 64), 8)]


def test_what_a_pattern_of_gemma_finds_first_in_a_name_counts():
    """As in one regular expression of all patterns; an entry without bits has those of all other modules."""
    patterns = {"mlp": {"num_bits": 2}, r"layers\.1\.": {}, "self": {"num_bits": 2}}
    names = ["layers.0.mlp", "layers.1.mlp", "layers.1.self_attn", "layers.0.self_attn", "head"]
    stored = {f"{name}.weight": ((6, 16), "U8") for name in names}
    stored |= {f"{name}.weight_scale": ((6, 1), "F32") for name in names}
    found = quantization({"quant_method": "gemma", "num_bits": 4, "module_quant_configs": patterns}, stored)
    assert [found.tensors[f"{name}.weight"].encoding.bits for name in names] == [2, 4, 4, 2, 4]
    assert [found.tensors[f"{name}.weight"].shape for name in names] == [(6, 64), (6, 32), (6, 32), (6, 64), (6, 32)]


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
        "a.qscale_act": ((), "F32"),
    }
    found = quantization(FP8, stored)
    (tensor,) = found.tensors.values()
    assert (tensor.name, tensor.stored) == ("a.weight", ("a.weight", "a.weight_scale_inv"))
    assert (tensor.format, tensor.shape, tensor.axes) == ("fp8", (130, 257), (0, 1))
    assert tensor.encoding == scaled((130, 257), 8, "F8_E4M3", F32, (128, 128))
    unused = {"a.input_scale", "attn.k_scale", "experts.up_proj_activation_scale", "a.qscale_act"}
    assert found.unused == unused


@pytest.mark.parametrize("marker", [((0,), "F8_E4M3"), ((2,), "F8_E4M3"), ((0,), "F32")], ids=str)
def test_the_marker_of_a_file_of_comfyui_is_no_tensor_of_its_model(marker):
    scales = {"model.a.scale_weight": ((), "F32"), "model.a.scale_input": ((), "F32")}
    found = quantization(None, {"model.scaled_fp8": marker, "model.a.weight": ((6, 16), "F8_E4M3"), **scales})
    assert found.tensors["model.a.weight"].stored == ("model.a.weight", "model.a.scale_weight")
    assert found.unused == {"model.scaled_fp8", "model.a.scale_input"}


@pytest.mark.parametrize(
    ("config", "shape", "scales", "block"),
    [
        ({"quant_method": "fp8"}, (6, 4), (), (6, 4)),
        (FP8, (100, 4), (1,), (100, 4)),
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
    assert tensor.encoding == scaled(shape, 8, "F8_E4M3", BF16, block)


def test_mxfp4_swaps_rows_and_columns():
    stored = {
        "e.down_proj_blocks": ((4, 5, 3, 16), "U8"),
        "e.down_proj_scales": ((4, 5, 3), "U8"),
        "e.down_proj_bias": ((4, 5), "BF16"),
    }
    (tensor,) = quantization(MXFP4, stored).tensors.values()
    assert (tensor.name, tensor.stored) == ("e.down_proj", ("e.down_proj_blocks", "e.down_proj_scales"))
    assert (tensor.format, tensor.shape, tensor.axes) == ("MXFP4", (4, 96, 5), (0, 2, 1))
    assert tensor.encoding == scaled((4, 5, 96), 4, "doubled F4", U8, (1, 32))
    assert restored(MXFP4, stored) == {"e.down_proj": (4, 96, 5), "e.down_proj_bias": (4, 5)}


@pytest.mark.parametrize(
    ("config", "stored", "said"),
    [
        (FP8, {"a.weight": ((2, 2), "F8_E4M3")}, "'a.weight' is F8_E4M3: expected its scales 'a.weight_scale_inv'"),
        (FP8, {"a.weight_scale_inv": ((2, 2), "F32")}, "'a.weight': .* codes of 'a.weight_scale_inv'.* no such tensor"),
        (
            FP8,
            {"a.weight": ((2, 2), "BF16"), "a.weight_scale": ((), "F32")},
            "'a.weight': expected the codes .* in I8 or F8_E4M3 or U8, found BF16",
        ),
        (
            FP8,
            {"a.weight": ((2, 2), "F8_E5M2"), "a.weight_scale": ((), "F32")},
            "'a.weight': expected the codes of 'a.weight_scale' in I8 or F8_E4M3 or U8, found F8_E5M2",
        ),
        (
            FP8,
            {"a.weight": ((2, 2), "F8_E4M3"), "a.weight_scale_inv": ((1, 1), "I32")},
            "'a.weight_scale_inv': expected F32 or .* beside 'a.weight' of F8_E4M3, found I32",
        ),
        (
            FP8,
            {"a.weight": ((130, 257), "F8_E4M3"), "a.weight_scale_inv": ((3, 2), "F32")},
            r"'a.weight_scale_inv': expected \(2, 3\) for blocks of 128 x 128 of 'a.weight' of shape \(130, 257\), "
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
        (FP8, {"a.weight": ((2, 2), "F8_E5M2")}, "'a.weight': expected codes in F8_E4M3, found F8_E5M2"),
        (
            MXFP4,
            {"e_blocks": ((1, 2, 3, 16), "U8")},
            "'e_blocks' is U8: expected its scales 'e_scales', .*no such tensor",
        ),
        (MXFP4, {"e_scales": ((1, 2, 3), "U8")}, "'e_blocks': .* no such tensor"),
        (
            MXFP4,
            {"e_blocks": ((1, 2, 3, 16), "U8"), "e_scales": ((1, 2, 3), "F32")},
            "'e_scales': expected U8 beside 'e_blocks' of U8, found F32",
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


@pytest.mark.parametrize(
    ("config", "stored", "changed", "said"),
    [
        (INT4, PACKED, {"a.weight_scale": None}, r"'a.weight_packed' is I32: expected its scales 'a.weight_scale', "),
        (INT4, PACKED, {"a.weight_packed": None}, r"'a.weight_packed': expected the codes of 'a.weight_scale' in I32"),
        (INT4, PACKED, {"a.weight_scale": ((6, 2), "I8")}, r"'a.weight_scale': expected F32 or .*, found I8"),
        (INT4, PACKED, {"a.weight_scale": ((6, 3), "BF16")}, r"'a.weight_shape': expected two integers"),
        (INT4, PACKED, {"a.weight_scale": ((5, 2), "BF16")}, r"'a.weight_scale': expected .*\(6, 2\) for groups of 32"),
        (INT4, PACKED, {"a.weight_zero_point": ((1, 1), "I32")}, r"_zero_point': expected shape \(1, 2\) .* \(1, 1\)"),
        (INT4, PACKED, {"a.weight_zero_point": ((6, 2), "I8")}, r"_zero_point': expected I32 beside .*, found I8"),
        (INT4, PACKED, {"a.weight_g_idx": ((32,), "I32")}, r"'a.weight_g_idx': expected shape \(64,\) .* \(32,\)"),
        (INT4, PACKED, {"a.weight_g_idx": ((64,), "I64")}, r"'a.weight_g_idx': expected I32 beside .*, found I64"),
        (INT4, PACKED, {"a.weight": ((6, 64), "BF16")}, "'a.weight': expected it either plain or .* found both"),
        (compressed(num_bits=3, type="int"), PACKED, {}, r"expected codes of \(2, 4, 8\) bits, found 3"),
        (MODELOPT, NVFP4, {"a.weight_scale_2": None}, "'a.weight' is U8: expected 'a.weight_scale_2', found no such"),
        (MODELOPT, NVFP4, {"a.weight_scale_2": ((), "F64")}, r"'a.weight_scale_2': expected F32 .*, found F64"),
        (MODELOPT, NVFP4, {"a.weight_scale_2": ((6,), "F32")}, r"_scale_2': expected one number .* \(6,\)"),
        (MODELOPT, NVFP4, {"a.weight_scale": ((6, 3), "F8_E4M3")}, r"expected \(6, 2\) for groups of 16 .* \(6, 3\)"),
        (
            MODELOPT,
            {"a.weight": ((6, 16), "F8_E4M3"), "a.weight_scale": ((), "F32")},
            {"a.weight_scale_2": ((), "F32")},
            "'a.weight': expected the codes of 'a.weight_scale_2' in U8, found F8_E4M3",
        ),
        (
            None,
            {"a.weight_packed": ((6, 16), "U8"), "a.weight_scale": ((6, 1), "U8")},
            {"a.weight_global_scale": ((1,), "F32")},
            "'a.weight_scale': expected F8_E4M3 beside 'a.weight_packed' of U8, found U8",
        ),
        (compressed(), W8A8_STORED, {}, "'a.weight': expected float codes of 8 bits, as in .*, found int8"),
        (W8A8 | compressed(num_bits=16, type="int"), W8A8_STORED, {}, "expected int codes of 16 bits, .* found int8"),
        (W8A8, W8A8_STORED, {"a.weight_scale": None}, r"'a.weight' is I8: expected its scales '.*weight_scale'"),
        (
            W8A8,
            W8A8_STORED,
            {"a.weight_scale": ((7, 1), "BF16")},
            r"'a.weight_scale': expected \(6, 1\) or .* \(7, 1\)",
        ),
        (W8A8, W8A8_STORED, {"a.weight_zero_point": None}, "'a.weight': expected 'a.weight_zero_point', .*asymmetric"),
        (W8A8, W8A8_STORED, {"a.weight_zero_point": ((6,), "I8")}, r"_zero_point': expected shape \(6, 1\) .* \(6,\)"),
        (W8A8, W8A8_STORED, {"a.weight_zero_point": ((6, 1), "I32")}, "_zero_point': expected I8 .*, found I32"),
        (
            compressed(num_bits=4, type="int", strategy="group", group_size=3),
            W8A8_STORED,
            {"a.weight_zero_point": None},
            r"'a.weight_scale': expected none for groups of 3 of 'a.weight' of shape \(6, 8\)",
        ),
        (
            FP8,
            {"a.weight": ((6, 16), "F8_E4M3"), "a.weight_scale_inv": ((), "F32")},
            {"a.weight_zero_point": ((6,), "I8")},
            "'a.weight': expected the codes of 'a.weight_zero_point' in I8, found F8_E4M3",
        ),
        (MODELOPT, NVFP4, {"a.pre_quant_scale": ((6,), "BF16")}, r"_quant_scale': expected shape \(32,\) .* \(6,\)"),
        (MODELOPT, NVFP4, {"a.pre_quant_scale": ((32,), "F8_E4M3")}, "_scale': expected F32 or .* found F8_E4M3"),
        (MODELOPT, FUSED, {"e.up_weight_scale_2": None}, "'e.up' is U8: expected 'e.up_weight_scale_2', found no such"),
        (MODELOPT, FUSED, {"e.up_weight_scale": None}, "'e.up' is U8: expected its scales 'e.up_weight_scale', found"),
        (MODELOPT, FUSED, {"e.up_weight_scale_2": ((2,), "F32")}, r"_2': expected shape \(\) or \(1,\) or \(3,\) for"),
        (MODELOPT, FUSED, {"e.up_weight_scale_2": ((3, 2), "F32")}, r"_2': expected shape .*, found \(3, 2\)"),
        (
            MODELOPT,
            FUSED,
            {"e.up_weight_scale": ((3, 3, 24), "F8_E4M3")},
            r"'e.up_weight_scale': expected \(3, 16, 3\) or \(3, 2, 24\) for groups of 16 .* found shape \(3, 3, 24\)",
        ),
        (
            MODELOPT,
            FUSED,
            {"e.up": ((3, 15, 23), "U8")},
            r"'e.up_weight_scale': expected no scales for groups of 16 of 'e.up' of shape \(3, 15, 23\)",
        ),
        (MODELOPT | {"group_size": 32}, FUSED, {}, "'e.up': expected groups of 32, .* found NVFP4, .* groups of 16"),
        (
            MODELOPT,
            FUSED,
            {"e.up": ((16, 24), "U8")},
            r"'e.up': expected shape \(experts, rows, columns\), found \(16,",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            {"e.up": ((3, 16, 24), "F8_E4M3"), "e.up_weight_scale": ((3,), "F32")},
            {"e.up_weight_scale": ((24,), "F32")},
            r"'e.up_weight_scale': expected \(3,\) for the tensor of 'e.up' .* found shape \(24,\)",
        ),
        (
            {"quant_method": "modelopt"},
            {"e.up": ((3, 16, 16), "F8_E4M3"), "e.up_weight_scale": ((3, 16), "F32")},
            {},
            r"'e.up_weight_scale': expected .*\(3, 16, 1\) for rows.* found shape \(3, 16\)",  # or for columns
        ),
        (BY_MODULE, GPTQ_STORED, {}, "'a.qweight': expected codes of .*8.* bits, .* found 4"),
        (BY_MODULE | {"bits": 8, "dynamic": {"-:b": {}}}, GPTQ_STORED, {}, "expected codes of .*8.* bits, .* found 4"),
        (
            BY_MODULE | {"dynamic": {"a": {"group_size": 16}}},
            GPTQ_STORED,
            {},
            r"'a.scales': expected shape \(64 / 16, 16\)",
        ),
        (AUTO_ROUND | {"bits": 8}, AUTO_STORED, {}, "'a.qweight': expected codes of .*8.* bits, .* found 4"),
        (
            AUTO_ROUND,
            AUTO_STORED,
            {"a.scales": None},
            "'a.qweight' is I32: expected its scales 'a.scales', found no such",
        ),
        (
            AUTO_ROUND | {"extra_config": {"a": {"group_size": 24}}},
            AUTO_STORED,
            {},
            r"'a.scales': expected shape \(64 / 24, 16\) for 'a.qweight' .* found \(2, 16\)",
        ),
        (
            SHARDED,
            {"a.qkv_proj.weight": ((304, 144), "F8_E4M3"), "a.qkv_proj.weight_scale_inv": ((4, 2), "F32")},
            {},
            r"_inv': expected 4 rows of scales for 304 rows of 'a.qkv_proj.weight' in one way only, found .* 2 or 4 ",
        ),
        (
            SHARDED,
            {"a.qkv_proj.weight": ((544, 144), "F8_E4M3"), "a.qkv_proj.weight_scale_inv": ((7, 2), "F32")},
            {},
            r"_inv': expected \(5, 2\) for blocks of 128 x 128 of 'a.qkv_proj.weight' .* found shape \(7, 2\)",
        ),
        (
            SHARDED,
            {"a.o_proj.weight": ((544, 144), "F8_E4M3"), "a.o_proj.weight_scale_inv": ((6, 2), "F32")},
            {},
            r"_inv': expected \(5, 2\) for blocks of 128 x 128 of 'a.o_proj.weight' .* found shape \(6, 2\)",
        ),
        (GPTQ, GPTQ_STORED, {"a.qzeros": None}, "'a.qweight' is I32: expected 'a.qzeros', found no such tensor"),
        (GPTQ, GPTQ_STORED, {"a.scales": None}, "'a.qweight' is I32: expected its scales 'a.scales', found no such"),
        (GPTQ, GPTQ_STORED, {"a.scales": ((3, 16), "F16")}, r"'a.scales': expected shape \(64 / 32, 16\).*\(3, 16\)"),
        (GPTQ, GPTQ_STORED, {"a.qzeros": ((3, 2), "I32")}, r"'a.qzeros': expected shape \(2, 2\) .* \(3, 2\)"),
        (GPTQ, GPTQ_STORED, {"a.qzeros": ((2, 3), "I32")}, r"'a.qzeros': expected shape \(groups, 16 \* bits / 32\)"),
        (GPTQ, GPTQ_STORED, {"a.g_idx": ((63,), "I32")}, r"'a.g_idx': expected shape \(64,\) .* \(63,\)"),
        (GPTQ, GPTQ_STORED, {"a.g_idx": ((64,), "I64")}, r"'a.g_idx': expected I32 beside 'a.qweight' .* found I64"),
        (GPTQ, GPTQ_STORED, {"a.qweight": ((8,), "I32")}, r"'a.qweight': expected two dimensions, found shape \(8,\)"),
        (GPTQ | {"bits": 8}, GPTQ_STORED, {}, r"'a.qweight': expected codes of .*8.* bits.* found 4"),
        (GPTQ | {"group_size": 4, "desc_act": False}, GPTQ_STORED, {"a.scales": ((16, 16), "F16")}, "'a.qzeros'"),
        (
            None,
            MLX_STORED,
            {},
            r"'a.weight': expected rows of whole codes of 2, .* and codes of \[\] for its module in quantiz",
        ),
        (
            MLX | {"a": False},
            MLX_STORED,
            {},
            "'a.weight': expected rows of whole codes of 2, .* codes of .. for its module",
        ),
        (MLX | {"a": {"bits": 8, "group_size": 64}}, MLX_STORED, {}, r"'a.scales': expected \(6, 1\) for groups of 64"),
        (MLX | {"bits": 8}, MLX_STORED, {}, r"'a.scales': expected \(6, 1\) for groups of 64 .* \(6, 2\)"),
        (
            MLX | {"bits": 7},
            MLX_STORED,
            {},
            "'a.weight': expected rows of whole codes of 2, .* codes of .7. for its module",
        ),
        (
            MLX | {"bits": 0},
            MLX_STORED,
            {},
            "'a.weight': expected rows of whole codes of 2, .* codes of .0. for its module",
        ),
        (MLX | {"bits": "4"}, MLX_STORED, {}, "expected integers as bits and group_size, .* found '4' and 64"),
        (
            MLX | {"bits": 3},
            MLX_STORED,
            {},
            "'a.weight': expected rows of whole codes of .*, found rows of 512 bits, and codes of .3. ",
        ),
        (MLX | {"group_size": 96}, MLX_STORED, {}, "'a.scales': expected none for groups of 96 .*, found shape"),
        (MLX | {"mode": "mxfp6"}, MLX_STORED, {}, "expected mode affine, mxfp4, nvfp4, mxfp8, found 'mxfp6'"),
        (MLX_FP4, MLX_STORED, {}, "'a.weight': expected rows of whole codes of 2, .* codes of .. for its module"),
        (MLX, MLX_STORED, {"a.scales": None}, "'a.weight' is U32: expected its scales 'a.scales', found no such"),
        (MLX, MLX_STORED, {"a.biases": None}, "'a.weight' is U32: expected 'a.biases', found no such tensor"),
        (MLX, MLX_STORED, {"a.biases": ((6, 1), "BF16")}, r"'a.biases': expected shape \(6, 2\) .* found \(6, 1\)"),
        (MLX, MLX_STORED, {"a.weight": ((6, 16), "I32")}, "'a.weight': expected the codes of 'a.scales' in U32, found"),
        (MLX, MLX_FP4_STORED, {}, "'a.weight': expected int codes of 4 bits, as in quantization_config, found MXFP4"),
        (
            MLX_FP4 | {"mode": "nvfp4"},
            MLX_FP4_STORED,
            {},
            r"\(4, 16\) as bits and group_size of mode nvfp4, .*\(4, 32\)",
        ),
        (MLX_FP4 | {"mode": "nvfp4", "group_size": 16}, MLX_FP4_STORED, {}, r"\(6, 8\) for groups of 16 .* \(6, 4\)"),
        (MLX_FP4, MLX_FP4_STORED, {"a.scales": ((6, 8), "U8")}, r"\(6, 4\) for groups of 32 .* \(6, 8\)"),
        (MLX_FP4, MLX_FP4_STORED, {"a.scales": ((6, 3), "U8")}, r"\(6, 4\) for groups of 32 .* \(6, 3\)"),
        (MLX_FP4, MLX_FP4_STORED, {"a.scales": ((5, 4), "U8")}, r"expected \(6, 4\) for groups of 32 .* \(5, 4\)"),
        (
            MLX_FP4 | {"mode": "nvfp4", "group_size": 16},
            MLX_FP4_STORED,
            {"a.scales": ((6, 8), "U8"), "a.global_scale": ((6,), "F32")},
            r"'a.global_scale': expected one number for 'a.weight', found shape \(6,\)",
        ),
        (
            GEMMA | {"num_bits": 8},
            GEMMA_STORED,
            {},
            r"'a.weight': expected rows of whole codes of .* codes of \[\] for its",
        ),
        (GEMMA | {"num_bits": 3}, GEMMA_STORED, {}, "expected num_bits 2, 4 or 8, found 3"),
        (GEMMA | {"module_quant_configs": {"a": {"num_bits": 5}}}, GEMMA_STORED, {}, "num_bits 2, 4 or 8, found 5"),
        (GEMMA | {"module_quant_configs": {"a": 2}}, GEMMA_STORED, {}, "an object of objects as module_quant"),
        (GEMMA | {"module_quant_configs": {"(": {}}}, GEMMA_STORED, {}, r"'\(' is not a regular expression"),
        (GEMMA | {"module_quant_configs": [2]}, GEMMA_STORED, {}, "an object of objects as module_quant"),
        (GEMMA, W8A8_STORED, {"a.weight_scale": ((6, 1), "F32")}, "expected int codes of 4 bits, .* found int8"),
        (GEMMA, GEMMA_STORED, {"a.weight_scale": ((5, 1), "F32")}, r"'a.weight_scale': expected \(6, 1\) .* \(5, 1\)"),
        (GEMMA, GEMMA_STORED, {"a.weight_scale": None, "b.input_activation_scale": ((), "F32")}, "'a.weight' is U8"),
        (GEMMA, {"a.embedding_quantized": ((6, 15), "U8")}, {}, "expected its scales 'a.embedding_scale', found no"),
        (None, GEMMA_STORED, {}, "'a.weight_scale': expected F8_E4M3 beside 'a.weight' of U8, found F32"),
        (AWQ, AWQ_STORED, {"a.qzeros": ((2, 3), "I32")}, r"'a.qzeros': expected shape \(2, 2\) .* \(2, 3\)"),
        (AWQ, AWQ_STORED, {"a.scales": ((2, 15), "F16")}, r"'a.scales': expected shape \(64 / 32, 16\) .* \(2, 15\)"),
        (AWQ, AWQ_STORED, {"a.g_idx": ((64,), "I32")}, "'a.g_idx': does not fit 'a.qweight'"),
        (AWQ | {"bits": 8}, AWQ_STORED, {}, r"'a.qweight': expected codes of .*8.* bits.* found 4"),
        (BNB, INT8, {"a.SCB": None}, "'a.weight' is I8: expected its scales 'a.SCB', found no such tensor"),
        (BNB, INT8, {"a.SCB": ((5,), "F32")}, r"'a.SCB': expected \(6, 1\) or \(6,\) for rows.* found shape \(5,\)"),
        (BNB, INT8, {"a.SCB": ((6,), "F16")}, "'a.SCB': expected F32 beside 'a.weight' of I8, found F16"),
        (BNB, INT8, {"a.weight": ((6, 8), "U8")}, "'a.weight': expected the codes of 'a.SCB' in I8, found U8"),
    ],
)
def test_what_does_not_fit_a_packed_format_is_named(config, stored, changed, said):
    found = {name: facts for name, facts in (stored | changed).items() if facts is not None}
    with pytest.raises(MappingError, match=said):
        quantization(config, found)


@pytest.mark.parametrize(
    ("rows", "scales", "shape"),
    [(544, 6, (2, 272, 144)), (512, 4, (512, 144)), (27136, 216, (8, 3392, 144)), (14848, 116, (14848, 144))],
)
def test_blocks_begin_anew_in_each_shard_of_rows(rows, scales, shape):
    """If shards have whole blocks, it does not matter how many there are."""
    name = "layers.0.self_attn.qkv_proj.weight"
    stored = {name: ((rows, 144), "F8_E4M3"), f"{name}_scale_inv": ((scales, 2), "F32")}
    tensor = quantization(SHARDED, stored).tensors[name]
    assert tensor.encoding == scaled(shape, 8, "F8_E4M3", F32, (128, 128))
    assert tensor.view(np.dtype(np.float32)).shape == (rows, 144)
