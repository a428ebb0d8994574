"""The formats of quantised tensors: a row for each, which says what is stored beside what, and what codes mean.

A row is data. `mapping.quantization` finds the row of each tensor by the names, dtypes and shapes of what is stored,
and makes an `Encoding` of it, which one decoder executes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from orbax_safetensors.geometry.encoding import Order, Role

FLOATS = ("F32", "BF16", "F16")
EXPONENTS = ("U8", "F8_E8M0")


class CodeLayout(Enum):
    """How the codes of a matrix of outputs and inputs are arranged."""

    OUTPUTS = auto()  # a row for each output, its inputs from the first word on
    BLOCKS = auto()  # the same with a dimension for the bytes of a block; models have outputs and inputs swapped
    INPUTS = auto()  # a row for each input, its outputs in words
    INPUT_WORDS = auto()  # a row for each word of inputs, with the words of all outputs
    EXPERTS = auto()  # matrices of experts; the shape of scales says whether a byte has two columns or two rows
    FLAT = auto()  # all elements one after the other; blocks go over the ends of rows


@dataclass(frozen=True, slots=True)
class ParameterFormat:
    """A parameter: the endings that its name may have in place of that of the codes, and the dtypes it may have.

    `meaning` is the dtype of its entries if they are stored as another, and `divided` as in `Parameter`.
    """

    role: Role
    endings: tuple[str, ...]
    dtypes: tuple[str, ...]
    required: bool = True
    meaning: str | None = None
    divided: float = 1


@dataclass(frozen=True, slots=True, eq=False)  # a row is the same only as itself, and quick to hash
class Format:
    """How one format stores a tensor.

    Attributes:
      name: what users call it; `{bits}` is the size of a code.
      codes: what the name of the codes ends in, and `tensor` what that of the tensor ends in instead.
      dtypes: of the codes.
      values: what a code means, see `Encoding.values`; `{bits}` is the size of a code.
      bits: of a code; None if shapes or the config say it.
      parameters: what is stored beside them; the scale first.
      layout: of the codes.
      order: of codes in a byte or a word.
      facts: endings of stored tensors that describe the codes, and are not needed to decode them.
      sharded: endings of codes whose rows may be those of several shards, in each of which blocks begin anew.
      group: elements of a row that share a scale; None if shapes or the config say it.
      final: what a scaled element is multiplied by.
      method: the `quant_method` of its configs, if another format has the same names and dtypes.
    """

    name: str
    codes: str
    tensor: str
    dtypes: tuple[str, ...]
    values: str
    bits: int | None
    parameters: tuple[ParameterFormat, ...]
    layout: CodeLayout = CodeLayout.OUTPUTS
    order: Order = Order.LOW_FIRST
    facts: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    group: int | None = None
    final: float = 1
    method: str | None = None


_PACKED_FACTS = (".weight_shape",)
_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")

# What formats store beside their codes.
_EXPONENT = ParameterFormat(Role.SCALE, (".weight_scale",), ("U8",))
_FP8_SCALE = ParameterFormat(Role.SCALE, (".weight_scale",), ("F8_E4M3",))
_OF_INPUTS = ParameterFormat(Role.INPUT_FACTOR, (".pre_quant_scale",), FLOATS, required=False)
_BYTES = (
    ParameterFormat(Role.SCALE, (".weight_scale",), FLOATS),
    ParameterFormat(Role.ZERO, (".weight_zero_point",), ("I8",), required=False),
    _OF_INPUTS,
)
_VALUES = ParameterFormat(Role.VALUES, (".weight.quant_map",), ("F32",))
_PACKED = (
    ParameterFormat(Role.SCALE, (".weight_scale",), FLOATS),
    ParameterFormat(Role.ZERO, (".weight_zero_point",), ("I32",), required=False),
    ParameterFormat(Role.GROUP, (".weight_g_idx",), ("I32",), required=False),
)
_WITH_DIVISOR = (_FP8_SCALE, ParameterFormat(Role.DIVISOR, (".weight_global_scale",), ("F32",)))
_WITH_FACTOR = (_FP8_SCALE, ParameterFormat(Role.FACTOR, (".weight_scale_2",), ("F32",)), _OF_INPUTS)
_FUSED = (
    ParameterFormat(Role.SCALE, ("_weight_scale",), ("F8_E4M3",)),
    ParameterFormat(Role.FACTOR, ("_weight_scale_2",), ("F32",)),
)
_FP8 = (ParameterFormat(Role.SCALE, ("_scale_inv", "_scale", "_weight_scale"), (*FLOATS, *EXPONENTS)),)
_FP8_OF_MODULE = (ParameterFormat(Role.SCALE, (".scale", ".qscale_weight", ".scale_weight"), (*FLOATS, *EXPONENTS)),)
_AWQ = (
    ParameterFormat(Role.SCALE, (".scales",), FLOATS),
    ParameterFormat(Role.ZERO, (".qzeros",), ("I32",)),
)
_GPTQ = (*_AWQ, ParameterFormat(Role.GROUP, (".g_idx",), ("I32",), required=False))
_BLOCKWISE = (ParameterFormat(Role.SCALE, (".weight.absmax",), ("F32",)), _VALUES)
_NESTED = (
    ParameterFormat(Role.SCALE, (".weight.absmax",), ("U8",)),
    _VALUES,
    ParameterFormat(Role.SCALE_VALUES, (".weight.nested_quant_map",), ("F32",)),
    ParameterFormat(Role.FACTOR, (".weight.nested_absmax",), ("F32",)),
)
_OF_MODULE = (ParameterFormat(Role.SCALE, (".scale",), ("F8_E8M0",)),)
_EXPERTS = (ParameterFormat(Role.SCALE, ("_scales",), ("U8",)),)
_SCB = (ParameterFormat(Role.SCALE, (".SCB",), ("F32",)),)
_AFFINE = (ParameterFormat(Role.SCALE, (".scales",), FLOATS), ParameterFormat(Role.BIAS, (".biases",), FLOATS))
_GEMMA = (ParameterFormat(Role.SCALE, (".weight_scale",), ("F32",)),)
_GEMMA_EMBEDDING = (ParameterFormat(Role.SCALE, (".embedding_scale",), ("F32",)),)
_MLX_EXPONENT = (ParameterFormat(Role.SCALE, (".scales",), ("U8",)),)
_MLX_FP8_SCALE = (
    ParameterFormat(Role.SCALE, (".scales",), ("U8",), meaning="F8_E4M3"),
    ParameterFormat(Role.FACTOR, (".global_scale",), ("F32",), required=False, divided=448 * 6),
)

FORMATS = (
    # compressed-tensors, as llm-compressor writes it.
    Format("int{bits}", ".weight_packed", ".weight", ("I32",), "offset{bits}", None, _PACKED, facts=_PACKED_FACTS),
    Format("NVFP4", ".weight_packed", ".weight", ("U8",), "F4", 4, _WITH_DIVISOR, facts=_PACKED_FACTS, group=16),
    Format("MXFP4", ".weight_packed", ".weight", ("U8",), "doubled F4", 4, (_EXPONENT,), facts=_PACKED_FACTS, group=32),
    Format("int8", ".weight", ".weight", ("I8",), "int8", 8, _BYTES),
    # NVIDIA ModelOpt, AMD Quark, DeepSeek-V4, gpt-oss.
    Format("NVFP4", ".weight", ".weight", ("U8",), "F4", 4, _WITH_FACTOR, group=16),
    Format("NVFP4", "", "", ("U8",), "F4", 4, _FUSED, CodeLayout.EXPERTS, group=16),
    Format("MXFP4", ".weight", ".weight", ("U8",), "doubled F4", 4, (_EXPONENT,), group=32),
    Format("MXFP4", ".weight", ".weight", ("I8",), "F4", 4, _OF_MODULE, group=32),
    Format("MXFP4", "_blocks", "", ("U8",), "doubled F4", 4, _EXPERTS, CodeLayout.BLOCKS, group=32),
    Format("fp8", "", "", ("F8_E4M3",), "F8_E4M3", 8, _FP8, sharded=(".qkv_proj.weight",)),
    Format("fp8", ".weight", ".weight", ("F8_E4M3",), "F8_E4M3", 8, _FP8_OF_MODULE),
    Format(
        "AWQ", ".qweight", ".weight", ("I32",), "unsigned4", 4, _AWQ, CodeLayout.INPUTS, Order.EVEN_FIRST, method="awq"
    ),
    Format(
        "GPTQ {bits} bits",
        ".qweight",
        ".weight",
        ("I32",),
        "unsigned{bits}",
        None,
        _GPTQ,
        CodeLayout.INPUT_WORDS,
        method="gptq",
    ),
    # bitsandbytes.
    Format(
        "bitsandbytes 4 bits",
        ".weight",
        ".weight",
        ("U8",),
        "F4",
        4,
        _NESTED,
        CodeLayout.FLAT,
        Order.HIGH_FIRST,
        _STATES,
    ),
    Format(
        "bitsandbytes 4 bits",
        ".weight",
        ".weight",
        ("U8",),
        "F4",
        4,
        _BLOCKWISE,
        CodeLayout.FLAT,
        Order.HIGH_FIRST,
        _STATES,
    ),
    Format(
        "bitsandbytes int8", ".weight", ".weight", ("I8",), "int8", 8, _SCB, facts=(".weight_format",), final=1 / 127
    ),
    # Gemma's own. Only the config tells 2 bits from 4.
    Format("Gemma {bits} bits", ".weight", ".weight", ("U8",), "offset{bits}", None, _GEMMA, method="gemma"),
    Format(
        "Gemma {bits} bits",
        ".embedding_quantized",
        ".weight",
        ("U8",),
        "offset{bits}",
        None,
        _GEMMA_EMBEDDING,
        method="gemma",
    ),
    Format("Gemma 8 bits", ".embedding_quantized", ".weight", ("I8",), "int8", 8, _GEMMA_EMBEDDING, method="gemma"),
    # MLX. Words of 32 bits are bytes in order, and a stream of codes that runs over the ends of both.
    Format("MLX {bits} bits", ".weight", ".weight", ("U32",), "unsigned{bits}", None, _AFFINE, method="mlx"),
    Format("MXFP4", ".weight", ".weight", ("U32",), "doubled F4", 4, _MLX_EXPONENT, group=32, method="mlx"),
    Format("NVFP4", ".weight", ".weight", ("U32",), "F4", 4, _MLX_FP8_SCALE, group=16, method="mlx"),
    Format("MXFP8", ".weight", ".weight", ("U32",), "F8_E4M3", 8, _MLX_EXPONENT, group=32, method="mlx"),
)
