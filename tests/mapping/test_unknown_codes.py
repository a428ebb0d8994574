"""Tensors that look like codes, beside what no format has: they are named, and plain tensors stay plain."""

import pytest

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping.quantization import quantization
from tests.support.quantized_facts import (
    BNB,
    E4M3,
    EXPERTS,
    FP8,
    GPTQ,
    INT4,
    MODELOPT,
    NVFP4,
    PACKED,
)

OF_NO_METHOD = {"group_size": 64, "bits": 4}
HQQ = {"quant_method": "hqq"}


@pytest.mark.parametrize(
    ("config", "codes", "beside", "others"),
    [
        (None, ("a.weight", E4M3, "F8_E4M3"), ("a.weight_rescale", (), "F32"), {"scaled_fp8": ((0,), "F8_E4M3")}),
        (None, ("a.weight", E4M3, "F8_E4M3"), ("a.wscale", (6,), "BF16"), {"a.bias": ((6,), "BF16")}),
        (None, ("a.weight", E4M3, "F8_E4M3"), ("a.s", (6, 1), "U8"), {}),
        (FP8, ("a.weight", E4M3, "F8_E4M3"), ("a.weight.scale", (), "F32"), {}),
        (None, ("a.weight", E4M3, "F8_E5M2"), ("a.amax", (1,), "F32"), {}),
        (None, ("a_weight", E4M3, "F8_E4M3FNUZ"), ("a_descale", (), "F32"), {}),
        (OF_NO_METHOD, ("a.weight", (6, 8), "U32"), ("a.scales", (6, 1), "BF16"), {"a.biases": ((6, 1), "BF16")}),
        (None, ("experts.up", EXPERTS, "F8_E4M3"), ("experts.up_wscale", (), "F32"), {}),
        (MODELOPT, ("experts.up", EXPERTS, "U8"), ("experts.up_qscale", (3, 2, 32), "F32"), {}),
        (MODELOPT, ("a.weight", (6, 16), "U8"), ("a.smooth_scale", (32,), "BF16"), NVFP4),
        (None, ("a.weight", (6, 16), "U8"), ("a.s", (32,), "BF16"), NVFP4),
        (INT4, ("a.weight_packed", (6, 8), "I32"), ("a.zeros", (6, 2), "I32"), PACKED),
        (None, ("a.W_q", (6, 8), "U8"), ("a.scale", (6, 1), "F16"), {"a.zero": ((6, 1), "F16")}),
        (HQQ, ("a.W_q", (6, 8), "U8"), ("a.scale", (6, 1), "F16"), {"a.zero": ((6, 1), "F16")}),
        (None, ("a.weight._data", (6, 8), "I8"), ("a.weight._scale", (6, 1), "F16"), {}),
        (
            None,
            ("a.codes", (6, 8, 2), "I16"),
            ("a.scales", (6, 1, 1, 1), "F16"),
            {"a.codebooks": ((2, 9, 1, 8), "F16")},
        ),
        (None, ("a.packed", (64, 32), "U8"), ("a.d", (64, 2), "F32"), {"a.dmin": ((64, 2), "F32")}),
        (None, ("a.data", (64, 32), "U8"), ("a.d", (64, 2), "F32"), {"a.m": ((64, 2), "F32")}),
        (None, ("a.words", (8, 64), "U32"), ("a.d", (2, 64), "F16"), {}),
        (None, ("a.q", (64, 32), "I8"), ("a.scale", (64,), "F16"), {}),
        (None, ("a.qdata", (64, 32), "U8"), ("a_scales", (64, 2), "F32"), {}),
        (None, ("l.0.q_proj.weight", E4M3, "F8_E4M3"), ("l.0.q_proj_weight_scale", (), "F32"), {}),
        (None, ("l.0.q_proj.weight", E4M3, "F8_E4M3"), ("scales.l.0.q_proj", (1,), "F32"), {}),
        (None, ("a.weight", (6, 16), "I8"), ("scales.a", (6,), "F32"), {}),
        (
            None,
            ("l.0.q_proj.weight", E4M3, "F8_E4M3"),
            ("l.0.qkv_scale", (2,), "F32"),
            {"l.0.k_proj.weight": (E4M3, "F8_E4M3")},
        ),
        (None, ("a.w1.weight", E4M3, "F8_E4M3"), ("a.w13_weight_scale", (), "F32"), {"a.w3.weight": (E4M3, "F8_E4M3")}),
    ],
)
def test_codes_beside_what_no_format_has_are_named_with_it(config, codes, beside, others):
    name, shape, dtype = codes
    stored = others | {name: (shape, dtype), beside[0]: beside[1:], "norm.weight": ((6,), "BF16")}
    said = rf"{name!r} \({dtype}, .* and {beside[0]!r} \({beside[2]}, .* found neither"
    with pytest.raises(MappingError, match=said):
        quantization(config, stored)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("a.B", (6, 8), "I32"), ("a.Qidxs", (6, 8), "I16"), ("a.trellis", (6, 8, 32), "I16"), ("a.q", (1, 2), "F4")],
)
def test_no_codes_of_an_unknown_method_are_plain(name, shape, dtype):
    said = rf"{name!r}.*{dtype}.*expected quant_method .* found 'marlin'"
    with pytest.raises(MappingError, match=said):
        quantization({"quant_method": "marlin"}, {name: (shape, dtype), "a.s": ((6, 8), "F16")})


PLAIN = {
    "vision.class_embedding": ((8,), "F32"),
    "vision.position_ids": ((1, 5), "I64"),
    "text.position_ids": ((1, 5), "I32"),
    "text.position_scale": ((), "F32"),
    "attn.bias": ((1, 1, 5, 5), "U8"),
    "attn.masked_bias": ((), "F32"),
    "attn.mask": ((5, 5), "U8"),
    "attn.logit_scale": ((5, 1, 1), "F32"),
    "attn.relative_position_index": ((5, 5), "I64"),
    "norm.num_batches_tracked": ((), "I64"),
    "norm.weight": ((5,), "F32"),
    "norm.running_mean": ((5,), "F32"),
    "router.weight": ((5, 5), "BF16"),
    "router.per_expert_scale": ((5,), "BF16"),
    "layers.0.layer_scalar": ((1,), "BF16"),
    "tokens.table": ((5, 2), "I32"),
    "tokens.weight": ((5, 1), "F32"),
    "allowed": ((5, 5), "BOOL"),
    "empty.weight": ((0, 4), "F8_E4M3"),
}


@pytest.mark.parametrize(
    "config", [None, FP8, INT4, GPTQ, BNB, HQQ, {}, [], {"quant_method": "awq", "bits": "4"}], ids=str
)
def test_plain_tensors_stay_plain_whatever_the_config_says(config):
    found = quantization(config, PLAIN)
    assert (dict(found.tensors), found.unused) == ({}, frozenset())
    assert bool(found.fault) == (config not in (None, FP8, INT4, GPTQ, BNB))


LINEAR = {"weight": (E4M3, "F8_E4M3"), "bias": ((6,), "BF16")}


def test_plain_fp8_has_no_scales():
    stored = {"a.weight": (E4M3, "F8_E4M3"), "a.bias": ((6,), "BF16"), "a.norm.weight": ((6,), "F32")}
    stored |= {"lstm.weight_hh_l0": (E4M3, "F8_E4M3"), "lstm.bias_hh_l0": ((6,), "BF16")}
    stored |= dict.fromkeys(("logit_scale", "layers.0.layer_scale", "experts.10.router_scale"), ((6,), "BF16"))
    modules = ("layers.0.q", "upscale", *(f"experts.{number}.up" for number in range(11)))
    stored |= {f"{module}.{name}": facts for module in modules for name, facts in LINEAR.items()}
    stored |= {"flow.translate": ((2, 1), "F8_E4M3"), "flow.log_scale": ((2, 1), "F8_E4M3")}
    assert not quantization(None, stored).tensors
