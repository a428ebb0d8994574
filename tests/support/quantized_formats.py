"""Random tensors in every format of quantised checkpoints, written with NumPy, beside the values that they have.

Each function draws codes, scales and the like, stores them as the format does, and computes the values from what it
drew: nothing is unpacked here.
"""

import json
import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from orbax_safetensors.format.dtypes import from_numpy
from orbax_safetensors.mapping.quantization import quantization
from orbax_safetensors.mapping.quantized_tensor import Quantized

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
F8, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
FLOATS = (F32, BF16, F16)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NAME = "m.weight"
_seeds = st.integers(0, 2**16).map(np.random.default_rng)


class Sample(NamedTuple):
    """A checkpoint of one quantised tensor: its `quantization_config`, what is stored, and the values of `m.weight`."""

    config: dict[str, Any] | None
    stored: dict[str, np.ndarray]
    values: np.ndarray


def found_in(config: dict[str, Any] | None, stored: dict[str, np.ndarray]) -> Quantized:
    """The only quantised tensor; no stored tensor is left over."""
    facts = {name: (array.shape, from_numpy(array.dtype).name) for name, array in stored.items()}
    found = quantization(config, facts, lambda name: stored[name].tobytes())
    (tensor,) = found.tensors.values()
    assert tensor.name == NAME
    assert found.unused | set(tensor.stored) == set(stored)
    return tensor


def words(fields: np.ndarray, bits: int) -> np.ndarray:
    """Words of 32 bits of the fields of each row, the first in the lowest bits; the last word may have fewer."""
    per_word = 32 // bits
    padded = np.pad(fields.astype(np.uint32), [(0, 0), (0, -fields.shape[1] % per_word)])
    out = np.zeros((len(fields), padded.shape[1] // per_word), np.uint32)
    for at in range(per_word):
        out |= padded[:, at::per_word] << np.uint32(at * bits)
    return out.view(np.int32)


def halves(codes: np.ndarray) -> np.ndarray:
    """Bytes of two codes of each row, the first in the lower half."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def spread(array: np.ndarray, shape: tuple[int, ...], height: int, width: int) -> np.ndarray:
    """The entry of each element of a matrix, for blocks of `height` x `width`."""
    return array.repeat(height, -2)[..., : shape[-2], :].repeat(width, -1)[..., : shape[-1]]


def scales_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Scales of both signs and of sizes that keep products finite."""
    return (rng.uniform(0.5, 2, shape) * rng.choice([-1, 1, 0.001, 64], shape)).astype(dtype)


def exponents(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Exponents plus 127, the smallest among them, and what they mean."""
    stored = rng.choice(np.array([0, 1, 100, 126, 127, 128, 140, 240], np.uint8), shape)
    return stored, np.ldexp(np.float32(1), stored.astype(np.int32) - 127)


def compressed(kind: str, bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | others
    groups = {
        "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None},
        "group_1": {"targets": ["re:.*gate"], "weights": None},
    }
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head", NAME]}


@st.composite
def packed_integers(draw: Any) -> Sample:
    """compressed-tensors `pack-quantized`, in every strategy, symmetric or not; groups in any order or permuted."""
    rng, bits, rows = draw(_seeds), draw(st.sampled_from([2, 4, 8])), draw(st.integers(1, 21))
    strategy = draw(st.sampled_from(["tensor", "channel", "group", "permuted", "not permuted"]))
    size, groups = draw(st.sampled_from([1, 3, 4, 8, 16, 32])), draw(st.integers(1, 4))
    columns = draw(st.integers(1, 70)) if strategy in ("tensor", "channel") else size * groups
    of_column = np.arange(columns) // size
    if strategy in ("tensor", "channel"):
        size, groups, of_column = columns, 1, np.zeros(columns, int)
    elif strategy == "permuted":
        of_column = rng.permutation(of_column)
    height = rows if strategy == "tensor" else 1
    scale = scales_of(rng, (-(-rows // height), groups), draw(st.sampled_from(FLOATS)))
    codes = rng.integers(0, 2**bits, (rows, columns))
    zero = np.full(scale.shape, 2 ** (bits - 1))
    stored = {
        "m.weight_packed": words(codes, bits),
        "m.weight_scale": scale.reshape(1) if strategy == "tensor" else scale,
        "m.weight_shape": np.array([rows, columns], draw(st.sampled_from([np.int32, np.int64]))),
    }
    if symmetric := draw(st.booleans()) or strategy == "tensor":
        pass
    else:
        zero = rng.integers(0, 2**bits, scale.shape)
        stored["m.weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
    if strategy.endswith("permuted"):
        stored["m.weight_g_idx"] = (of_column if strategy == "permuted" else np.full(columns, -1)).astype(np.int32)
    each = [part.repeat(height, 0)[:rows][:, of_column] for part in (zero, scale.astype(np.float32))]
    group_size = None if strategy in ("tensor", "channel") else size
    said = strategy if strategy in ("tensor", "channel") else "group"
    actorder = "group" if strategy == "permuted" else draw(st.sampled_from([None, "weight"]))
    config = compressed("int", bits, said, group_size=group_size, symmetric=symmetric, actorder=actorder)
    return Sample(config, stored, (codes - each[0]).astype(np.float32) * each[1])


@st.composite
def nvfp4(draw: Any) -> Sample:
    """As compressed-tensors or ModelOpt store it: the second scale divides, or multiplies."""
    rng, rows, columns = draw(_seeds), draw(st.integers(1, 40)), 16 * draw(st.integers(1, 5))
    codes = rng.integers(0, 16, (rows, columns))
    scale = rng.uniform(0.01, 448, (rows, columns // 16)).astype(F8)
    second = rng.uniform(1, 5000, 1).astype(np.float32)
    beside = {"m.input_scale": np.ones((), F32), "m.k_proj.k_scale": np.ones((), F32)}
    if draw(st.booleans()):
        factor = (1 / second).astype(np.float32)
        floats = scale.astype(np.float32) * factor
        shape = draw(st.sampled_from([(), (1,)]))
        stored = {
            "m.weight": halves(codes),
            "m.weight_scale": scale,
            "m.weight_scale_2": factor.reshape(shape),
        } | beside
        config = draw(st.sampled_from([{"quant_method": "modelopt", "quant_algo": "NVFP4"}, None]))
        if draw(st.booleans()):  # AWQ
            stored["m.pre_quant_scale"] = scales_of(rng, (columns,), BF16)
    else:
        floats = scale.astype(np.float32) / second
        stored = {"m.weight_packed": halves(codes), "m.weight_scale": scale, "m.weight_global_scale": second}
        stored["m.input_global_scale"] = np.ones(1, F32)
        config = compressed("float", 4, "tensor_group", group_size=16)
    values = E2M1[codes] * spread(floats, codes.shape, 1, 16)
    if "m.pre_quant_scale" in stored:
        values = values * stored["m.pre_quant_scale"].astype(np.float32)
    return Sample(config, stored, values)


@st.composite
def fused_experts(draw: Any) -> Sample:
    """ModelOpt's experts in one tensor: fp8, and NVFP4 packed along rows or columns, with any kind of second scale."""
    rng, experts = draw(_seeds), draw(st.integers(1, 4))
    rows, columns = 16 * draw(st.integers(1, 3)), 16 * draw(st.integers(1, 3))
    dialect = draw(st.sampled_from(["rows", "columns", "fp8"]))
    second = draw(st.sampled_from([(), (experts,), *([(experts, 2)] if dialect == "columns" else [])]))
    factor = rng.uniform(2e-4, 2, second).astype(np.float32)
    each = np.broadcast_to(
        factor.reshape(second if len(second) == 2 else (-1, 1)), (experts, second[-1] if second[1:] else 1)
    )
    each = each.repeat(rows // each.shape[1], 1)[..., None]  # of each row
    stored = {"m.weight_input_scale": np.ones(second, F32)}
    if dialect == "fp8":
        codes = rng.integers(0, 0x7F, (experts, rows, columns), np.uint8).view(F8)
        config = draw(
            st.sampled_from([{"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"} if second else {"quant_algo": "FP8"}, {}])
        )
        stored |= {"m.weight": codes, "m.weight_weight_scale": factor}
        return Sample({"quant_method": "modelopt"} | config, stored, codes.astype(np.float32) * each)
    codes = rng.integers(0, 16, (experts, rows, columns))
    if dialect == "rows":
        scale = rng.uniform(0.01, 448, (experts, rows // 16, columns)).astype(F8)
        floats = scale.astype(np.float32).repeat(16, 1) * each
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    else:
        scale = rng.uniform(0.01, 448, (experts, rows, columns // 16)).astype(F8)
        floats = scale.astype(np.float32).repeat(16, 2) * each
        packed = halves(codes)
    stored |= {"m.weight": packed, "m.weight_weight_scale": scale, "m.weight_weight_scale_2": factor}
    config = draw(st.sampled_from([{"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, None]))
    return Sample(config, stored, E2M1[codes] * floats)


@st.composite
def bytes_of_integers(draw: Any) -> Sample:
    """compressed-tensors `int-quantized`, of 8 bits or fewer, symmetric or not."""
    rng, rows, bits = draw(_seeds), draw(st.integers(1, 21)), draw(st.sampled_from([4, 8]))
    strategy, groups = draw(st.sampled_from(["tensor", "channel", "group"])), draw(st.integers(1, 4))
    size = draw(st.sampled_from([1, 3, 16, 32]))
    columns, groups = size * groups, groups if strategy == "group" else 1
    scale = scales_of(rng, (1 if strategy == "tensor" else rows, groups), draw(st.sampled_from(FLOATS)))
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns)).astype(np.int8)
    zero = np.zeros(scale.shape, np.int8)
    shape = (1,) if strategy == "tensor" else scale.shape
    stored = {"m.weight": codes, "m.weight_scale": scale.reshape(shape), "m.input_zero_point": np.zeros(1, np.int8)}
    if not (symmetric := draw(st.booleans())):
        zero = rng.integers(-128, 128, scale.shape).astype(np.int8)
        stored["m.weight_zero_point"] = zero.reshape(shape)
    config = compressed("int", bits, strategy, symmetric=symmetric, group_size=size if strategy == "group" else None)
    height, width = rows // len(scale), columns // groups
    parts = [spread(part.astype(np.float32), codes.shape, height, width) for part in (zero, scale)]
    return Sample(config, stored, (codes - parts[0]) * parts[1])


@st.composite
def fp8(draw: Any) -> Sample:
    """Scales for tensors, rows and blocks, of matrices and of experts, in every dtype and under every name."""
    rng, rows, columns = draw(_seeds), draw(st.integers(1, 30)), draw(st.integers(1, 40))
    leading = draw(st.sampled_from([(), (), (3,)]))
    codes = rng.integers(0, 0x7F, (*leading, rows, columns), np.uint8) | rng.choice([0, 128], (*leading, rows, columns))
    codes = codes.astype(np.uint8).view(F8)
    grid = draw(st.sampled_from(["rows", "blocks", *([] if leading else ["tensor"])]))
    block = {"rows": (1, columns), "tensor": (rows, columns)}.get(grid) or draw(
        st.tuples(st.integers(1, 9), st.integers(1, 9))
    )
    shape = (*leading, -(-rows // block[0]), -(-columns // block[1]))
    dtype = draw(st.sampled_from([*FLOATS, E8M0]))
    scale = exponents(rng, shape)[0].view(E8M0) if dtype == E8M0 else scales_of(rng, shape, dtype)
    values = codes.astype(np.float32) * spread(scale.astype(np.float32), codes.shape, *block)
    config: dict[str, Any] = draw(st.sampled_from([{"quant_method": "fp8"}, {"quant_method": "modelopt"}]))
    stored_shape = shape
    if grid == "blocks":
        stored_shape = (*leading, shape[-2], 1, shape[-1], 1) if config["quant_method"] == "modelopt" else shape
        config = config | {"weight_block_size": list(block)}
    elif grid == "tensor":
        stored_shape = draw(st.sampled_from([(), (1,), (1, 1)]))
    elif draw(st.booleans()) and not (leading and rows == columns):
        stored_shape = shape[:-1]
    name = draw(
        st.sampled_from(["m.weight_scale_inv", "m.weight_scale", "m.scale", "m.qscale_weight", "m.scale_weight"])
    )
    return Sample(config, {"m.weight": codes, name: scale.reshape(stored_shape)}, values)


@st.composite
def powers_of_two(draw: Any) -> Sample:
    """MXFP8, and MXFP4 of compressed-tensors, AMD Quark, DeepSeek-V4 and gpt-oss."""
    rng, rows, columns = draw(_seeds), draw(st.integers(1, 30)), 32 * draw(st.integers(1, 4))
    scale, floats = exponents(rng, (rows, columns // 32))
    if draw(st.booleans()):
        codes = (rng.integers(0, 0x7F, (rows, columns)) | rng.choice([0, 128], (rows, columns))).astype(np.uint8)
        values = codes.view(F8).astype(np.float32) * spread(floats, codes.shape, 1, 32)
        config: Any = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
        name, dtype = "m.weight_scale_inv", draw(st.sampled_from([np.uint8, E8M0]))
        if draw(st.booleans()):
            config, name, dtype = compressed("float", 8, "group", group_size=32), "m.weight_scale", np.uint8
        return Sample(
            draw(st.sampled_from([config, None])), {"m.weight": codes.view(F8), name: scale.view(dtype)}, values
        )
    codes = rng.integers(0, 16, (rows, columns))
    values = (E2M1[codes].astype(np.float64) * spread(floats, codes.shape, 1, 32)).astype(np.float32)
    dialect = draw(st.sampled_from(["compressed-tensors", "quark", "deepseek", "gpt-oss"]))
    if dialect == "compressed-tensors":
        stored, config = {"m.weight_packed": halves(codes), "m.weight_scale": scale}, compressed("float", 4, "group")
    elif dialect == "quark":
        stored, config = {"m.weight": halves(codes), "m.weight_scale": scale}, {"quant_method": "quark"}
    elif dialect == "deepseek":
        stored = {"m.weight": halves(codes).view(np.int8), "m.scale": scale.view(E8M0)}
        config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    else:
        experts = draw(st.sampled_from([each for each in (1, 2, 3) if rows % each == 0]))
        blocks = halves(codes).reshape(experts, rows // experts, -1, 16)
        stored = {"m.weight_blocks": blocks, "m.weight_scales": scale.reshape(blocks.shape[:-1])}
        config, values = {"quant_method": "mxfp4"}, values.reshape(experts, -1, columns).swapaxes(1, 2)
    return Sample(config, stored, values)


@st.composite
def awq(draw: Any) -> Sample:
    rng, outputs = draw(_seeds), 8 * draw(st.integers(1, 5))
    size, groups = draw(st.sampled_from([1, 3, 8, 32])), draw(st.integers(1, 4))
    inputs = size * groups - (draw(st.integers(0, size - 1)) if groups > 1 else 0)  # the last group may be smaller
    codes, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(0, 16, (groups, outputs))
    scales = scales_of(rng, (groups, outputs), draw(st.sampled_from(FLOATS)))
    of_input = np.arange(inputs) // size

    def in_words(fields: np.ndarray) -> np.ndarray:
        return words(fields.reshape(len(fields), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(fields.shape), 4)

    values = (codes - zeros[of_input]).astype(np.float32) * scales.astype(np.float32)[of_input]
    stored = {"m.qweight": in_words(codes), "m.qzeros": in_words(zeros), "m.scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": -1 if groups == 1 else size, "version": "gemm"}
    return Sample(config, stored, np.ascontiguousarray(values.T))


@st.composite
def gptq(draw: Any) -> Sample:
    """2, 4 and 8 bits, of both versions, in the order of the inputs and permuted; zeros of v1 borrow."""
    rng, bits = draw(_seeds), draw(st.sampled_from([2, 4, 8]))
    per_word = 32 // bits
    outputs = per_word * draw(st.integers(1, 3))
    size, groups = per_word * draw(st.integers(1, 3)), draw(st.integers(1, 4))
    inputs = size * groups
    of_input = np.arange(inputs) // size
    permuted = draw(st.booleans())
    if permuted:
        of_input = rng.permutation(of_input)
    codes, zeros = rng.integers(0, 2**bits, (inputs, outputs)), rng.integers(0, 2**bits, (groups, outputs))
    scales = scales_of(rng, (groups, outputs), draw(st.sampled_from(FLOATS)))
    qzeros = words(zeros, bits)
    config: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "desc_act": permuted}
    config["group_size"] = -1 if groups == 1 and draw(st.booleans()) else size
    if draw(st.booleans()):
        config["checkpoint_format"] = "gptq_v2"
    else:
        one = sum(1 << at for at in range(0, 32, bits))
        qzeros = (qzeros.view(np.uint32) - np.uint32(one)).view(np.int32)
    stored = {"m.qweight": np.ascontiguousarray(words(codes.T, bits).T), "m.qzeros": qzeros, "m.scales": scales}
    if permuted or draw(st.booleans()):
        stored["m.g_idx"] = of_input.astype(np.int32)
    values = (codes - zeros[of_input]).astype(np.float32) * scales.astype(np.float32)[of_input]
    return Sample(config, stored, np.ascontiguousarray(values.T))


def dense(codes: np.ndarray, bits: int) -> np.ndarray:
    """Words of 32 bits of the codes of each row as one stream of bits, low bits first."""
    each = (codes[..., None] >> np.arange(bits) & 1).astype(np.uint8)
    return np.packbits(each.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little").view("<u4")


@st.composite
def mlx(draw: Any) -> Sample:
    """Affine codes of every size, and the modes of OCP and NVIDIA, of matrices and of stacked experts."""
    rng, rows, groups = draw(_seeds), draw(st.integers(1, 20)), draw(st.integers(1, 4))
    leading = draw(st.sampled_from([(), (), (3,)]))
    mode = draw(st.sampled_from(["affine", "affine", "mxfp4", "nvfp4", "mxfp8"]))
    bits, size = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}.get(mode) or draw(
        st.tuples(st.sampled_from([2, 3, 4, 5, 6, 8]), st.sampled_from([32, 64, 128]))
    )
    codes, grid = rng.integers(0, 2**bits, (*leading, rows, groups * size)), (*leading, rows, groups)
    if mode == "affine":
        dtype = draw(st.sampled_from(FLOATS))
        scale, biases = scales_of(rng, grid, dtype), scales_of(rng, grid, dtype)
        beside = {"m.scales": scale, "m.biases": biases}
        values = codes.astype(np.float32) * spread(scale.astype(np.float32), codes.shape, 1, size)
        values = values + spread(biases.astype(np.float32), codes.shape, 1, size)
    elif mode == "nvfp4":
        scale = rng.uniform(0.01, 448, grid).astype(F8)
        beside, floats = {"m.scales": scale.view(np.uint8)}, scale.astype(np.float32)
        if draw(st.booleans()):
            second = rng.uniform(1, 5000, leading or draw(st.sampled_from([(), (1,)]))).astype(np.float32)
            beside["m.global_scale"] = second
            floats = floats * (second / np.float32(2688)).reshape(*leading, 1, 1)
        values = E2M1[codes] * spread(floats, codes.shape, 1, size)
    else:
        scale, floats = exponents(rng, grid)
        codes = codes & 0xF7 if mode == "mxfp8" else codes  # no NaN
        meant = codes.astype(np.uint8).view(F8).astype(np.float32) if mode == "mxfp8" else E2M1[codes]
        beside = {"m.scales": scale}
        values = (meant.astype(np.float64) * spread(floats, codes.shape, 1, size)).astype(np.float32)
    entry = {"group_size": size, "bits": bits, "mode": mode}
    others = {"group_size": 64, "bits": 4}
    config = draw(st.sampled_from([entry, {**others, "m": entry, "lm_head": False}, {**entry, "n": others}]))
    return Sample({"quant_method": "mlx", **config}, {"m.weight": dense(codes, bits), **beside}, values)


@st.composite
def gptq_by_module(draw: Any) -> Sample:
    """GPTQModel's `dynamic`, of which the first pattern that matches decides."""
    sample = draw(gptq())
    own = {key: sample.config[key] for key in ("bits", "group_size", "desc_act")}
    others = {"bits": 3, "group_size": 5, "desc_act": not own["desc_act"]}
    dynamic = draw(st.sampled_from([{"-:n": {}, r"+:m\Z": own, "m": {"bits": 3}}, {"m": own, "-:m": {}}, {"-:m": {}}]))
    return sample._replace(config=sample.config | (others if own in dynamic.values() else {}) | {"dynamic": dynamic})


@st.composite
def auto_round(draw: Any) -> Sample:
    """GPTQ and AWQ under AutoRound's keys, with settings for the module by its name or by a regular expression."""
    sample = draw(awq() | gptq().filter(lambda each: "m.g_idx" not in each.stored))
    packing = "auto_awq"
    if sample.config["quant_method"] == "gptq":
        packing = draw(st.sampled_from(["gptqmodel", ""])) if "checkpoint_format" in sample.config else "auto_gptq"
    own = {key: sample.config[key] for key in ("bits", "group_size")}
    extra = draw(st.sampled_from([{"m.*": {"bits": 3}, "m": own}, {"m$": own, ".": {"bits": 16}}, {".": own, "n": {}}]))
    if packing != "auto_awq" and draw(st.booleans()):
        extra = {"^m": {"bits": 16}}
    config = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}".rstrip(":")}
    return sample._replace(config=config | {"bits": 4, "group_size": 5, "extra_config": extra})


@st.composite
def gemma(draw: Any) -> Sample:
    """2 and 4 bits in bytes, 8 bits as they are, of linear layers and of embeddings, whose rows may be in blocks."""
    rng, bits, rows, width = draw(_seeds), draw(st.sampled_from([2, 4, 8])), draw(st.integers(1, 20)), 8
    is_embedding = bits == 8 or draw(st.booleans())
    blocks, width = draw(st.integers(1, 4)) if is_embedding else 1, 4 * draw(st.integers(1, 9))
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, blocks * width))
    scale = scales_of(rng, (rows, blocks), F32)
    unsigned = (codes + 2 ** (bits - 1)).astype(np.uint8)
    packed = {2: lambda: unsigned[:, 0::4] | unsigned[:, 1::4] << 2 | unsigned[:, 2::4] << 4 | unsigned[:, 3::4] << 6}
    packed |= {4: lambda: halves(unsigned), 8: lambda: codes.astype(np.int8)}
    stored = {"m.embedding_quantized" if is_embedding else "m.weight": packed[bits]()}
    stored["m.embedding_scale" if is_embedding else "m.weight_scale"] = scale
    stored["m.input_activation_scale"] = np.zeros((), F32)
    entry, others = {"num_bits": bits}, {"num_bits": draw(st.sampled_from([2, 4, 8]))}
    config = draw(
        st.sampled_from([entry, {**others, "module_quant_configs": {"^n": others, "m$": entry, "m": others}}])
    )
    return Sample(
        {"quant_method": "gemma", **config}, stored, codes.astype(np.float32) * spread(scale, codes.shape, 1, width)
    )


@st.composite
def bitsandbytes4(draw: Any) -> Sample:
    """NF4 and FP4, with scales in float32 or nested; blocks go over the ends of rows, and the last may be short."""
    rng, size = draw(_seeds), draw(st.sampled_from([32, 64, 128]))
    shape = draw(st.tuples(st.integers(1, 30), st.integers(1, 40)))
    count = math.prod(shape)
    blocks = -(-count // size)
    codes, table = rng.integers(0, 16, count), np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    padded = np.append(codes, [0] * (count % 2)).astype(np.uint8)
    state = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": list(shape)}
    stored = {"m.weight": (padded[0::2] << 4 | padded[1::2]).reshape(-1, 1), "m.weight.quant_map": table}
    if draw(st.booleans()):
        nested = draw(st.sampled_from([1, 4, 256]))
        numbers, floats = rng.integers(0, 256, blocks, np.uint8), rng.uniform(-1, 1, 256).astype(np.float32)
        second, offset = scales_of(rng, (-(-blocks // nested),), F32), float(rng.uniform())
        stored |= {"m.weight.absmax": numbers, "m.weight.nested_quant_map": floats, "m.weight.nested_absmax": second}
        state |= {"nested_blocksize": nested, "nested_offset": offset, "nested_dtype": "float32"}
        absmax = floats[numbers] * second.repeat(nested)[:blocks] + np.float32(offset)
    else:
        stored["m.weight.absmax"] = absmax = scales_of(rng, (blocks,), F32)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    stored[f"m.weight.quant_state.bitsandbytes__{draw(st.sampled_from(['nf4', 'fp4']))}"] = text
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return Sample(config, stored, (table[codes] * absmax.repeat(size)[:count]).reshape(shape))


@st.composite
def bitsandbytes8(draw: Any) -> Sample:
    rng, shape = draw(_seeds), draw(st.tuples(st.integers(1, 30), st.integers(1, 40)))
    codes, scale = rng.integers(-128, 128, shape).astype(np.int8), scales_of(rng, shape[:1], F32)
    stored = {"m.weight": codes, "m.SCB": scale, "m.weight_format": np.zeros((), np.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return Sample(config, stored, codes.astype(np.float32) * scale[:, None] * np.float32(1 / 127))


FORMATS = {
    "pack-quantized": packed_integers(),
    "int-quantized": bytes_of_integers(),
    "NVFP4": nvfp4(),
    "fused experts": fused_experts(),
    "fp8": fp8(),
    "powers of two": powers_of_two(),
    "AWQ": awq(),
    "GPTQ": gptq(),
    "MLX": mlx(),
    "Gemma": gemma(),
    "GPTQ by module": gptq_by_module(),
    "AutoRound": auto_round(),
    "bitsandbytes 4 bits": bitsandbytes4(),
    "bitsandbytes int8": bitsandbytes8(),
}
