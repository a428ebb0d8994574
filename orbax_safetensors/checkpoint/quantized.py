"""The quantised tensors of a checkpoint, and leaves that are made of them as codes and scales."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.config import quantization_beside, quantization_config, read_config
from orbax_safetensors.devices.bits import is_float
from orbax_safetensors.devices.casts import Casts
from orbax_safetensors.errors import MappingError, TensorMismatchError
from orbax_safetensors.format.dtypes import DTYPES, from_numpy
from orbax_safetensors.geometry.encoding import Encoding, Role
from orbax_safetensors.geometry.scales import scales_view
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.coverage import CODES_END
from orbax_safetensors.mapping.formats import EXPONENTS
from orbax_safetensors.mapping.quantization import CODE_DTYPES, Quantization, quantization
from orbax_safetensors.mapping.quantized_tensor import Quantized
from orbax_safetensors.options import Dequantize

logger = logging.getLogger(__name__)

_LONGEST_READ = 2**16  # of a tensor that describes another
# In the metadata of ComfyUI's files. Their names, dtypes and shapes are those of ModelOpt's NVFP4 and of MXFP8, but the
# high half of a byte is the first code, and scales are in the tiles that a GPU's kernel reads.
_COMFYUI_KEY = "_quantization_metadata"
# The dtypes of codes by what they mean.
_CODES = {
    "offset2": ml_dtypes.int2,
    "offset4": ml_dtypes.int4,
    "offset8": np.int8,
    "int8": np.int8,
    "unsigned2": ml_dtypes.uint2,
    "unsigned4": ml_dtypes.uint4,
    "unsigned8": np.uint8,
    "F4": ml_dtypes.float4_e2m1fn,
    "doubled F4": ml_dtypes.float4_e2m1fn,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
# The leaves of a quantised tensor that are not its codes, as `qwix.QArray` names them, by what they are.
_LEAVES = {Role.SCALE: "scale", Role.ZERO: "zero_point"}
_LONGEST_GROUP = 256  # of published models; rows of short codes with one scale are longer
_SECOND_LEVEL = {Role.FACTOR, Role.DIVISOR}
_DECODE = "decode it with SafetensorsOptions(dequantize=True)"


def quantized_tensors(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Quantization:
    """Return the quantised tensors of a checkpoint, according to its `config.json`, or to a file beside it.

    Raises `MappingError` if the method is unknown, if codes and scales do not fit each other, if they are in pieces,
    and if groups are in the order of ComfyUI.
    """
    facts = {name: (tensor.stored_shape, tensor.stored_dtype.name) for name, tensor in checkpoint.tensors.items()}
    settings = quantization_config(config)
    if settings is None and not CODE_DTYPES.isdisjoint({dtype for _, dtype in facts.values()}):
        settings = quantization_beside(checkpoint)

    def read(name: str) -> bytes:
        return checkpoint.read(name, _LONGEST_READ)

    encoded = quantization(settings, facts, read)
    if encoded.fault:
        logger.warning("%s: %s; it has no codes, and is read as a plain checkpoint", checkpoint.path, encoded.fault)
    is_of_comfyui = _COMFYUI_KEY in checkpoint.metadata
    for quantized in encoded.tensors.values():
        if is_of_comfyui and quantized.encoding.parameters[0].grid[1] > 1:
            raise MappingError(
                f"{quantized.codes!r} is {label(quantized)} in the order of ComfyUI, as {_COMFYUI_KEY!r} in the "
                "metadata says, which cannot be decoded"
            )
        for name in quantized.stored:
            if len(checkpoint[name].pieces) > 1:
                raise MappingError(f"{name!r} is quantised and in pieces, which cannot be decoded")
    return encoded


def stores_codes(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], config: Mapping[str, Any]) -> bool:
    """Return whether some of `tensors`, dtype and shape by name, are codes; most saves are of decoded tensors."""
    facts = {name: (shape, from_numpy(dtype).name) for name, (dtype, shape) in tensors.items()}
    try:
        return bool(quantization(quantization_config(config), facts).tensors)
    except MappingError:  # of a format that has no decoder here
        return any(not is_float(dtype) or dtype.itemsize == 1 for dtype, _ in tensors.values())


def check_casts(checkpoint: Checkpoint, casts: Casts, dequantize: Dequantize) -> None:
    """Raise `TensorMismatchError` if one dtype for all arrays would also be that of codes and scales."""
    if casts.everywhere is None or (checkpoint.mapped is not None and dequantize is True):
        return
    try:
        is_quantized = bool(quantized_tensors(checkpoint, read_config(checkpoint)).tensors)
    except MappingError:  # in a way that has no decoder here
        is_quantized = True
    if is_quantized:
        raise TensorMismatchError(
            f"{checkpoint.path}: is quantised, and {casts_codes(casts)}; family='dequantized' decodes them under the "
            "stored names"
        )


def casts_codes(casts: Casts) -> str:
    """Return what an error says of one dtype for all arrays if some are codes."""
    return (
        f"dtype={str(casts.everywhere)!r} would also cast codes and scales; dtype={{'norm': 'float32'}} casts the "
        "arrays whose names have 'norm' in them"
    )


def scales_beside(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the name of stored scales for a tensor, None if there are none."""
    return next((name + end for end in ("_scale_inv", "_scale") if name + end in checkpoint.tensors), None)


def label(tensor: Quantized) -> str:
    """Return the format of a tensor and which of its elements share a scale, as in `int4, group 32`."""
    encoding, scale = tensor.encoding, tensor.encoding.parameters[0]
    rows, columns = encoding.shape[-2:]
    height, width = scale.block[0] or -(-rows // scale.grid[0]), scale.block[1] or -(-columns // scale.grid[1])
    size = height * width
    if height >= rows and width >= columns:
        shared = "tensor"
    elif height > 1 and width > encoding.rows_in_word:
        shared = f"block {height} x {width}"
    elif (width >= columns if height == 1 else height >= rows) and (encoding.bits == 8 or size > _LONGEST_GROUP):
        shared = "channel"
    else:
        shared = f"group {size}"
    is_mx = encoding.values == "F8_E4M3" and scale.dtype.name in EXPONENTS and (height, width) == (1, 32)
    return f"{'MXFP8' if is_mx else tensor.format}, {shared}"


def codes_and_scales(checkpoint: Checkpoint, encoded: Quantization) -> Checkpoint:
    """Return `checkpoint` with codes, scales and zero points as JAX computes with them, in place of quantised tensors.

    Codes and zero points are of `_CODES`, or as they are stored; scales of two levels are one, and exponents are
    `float8_e8m0fnu`. Raises `MappingError` if a tensor is not codes times scales.
    """
    quantized: dict[str, Quantized] = {}
    tensors = dict(checkpoint.tensors)
    for name, tensor in encoded.tensors.items():
        tensor = _without_order(checkpoint, tensor)
        encoding = tensor.encoding
        scale, *others = encoding.parameters
        is_stored = encoding.values == checkpoint[tensor.codes].stored_dtype.name
        dtype = _CODES.get(encoding.values)
        roles = {each.role for each in others}
        is_scaled = roles <= ({Role.ZERO} if len(encoding.shape) > 2 else {*_SECOND_LEVEL, Role.ZERO})
        if encoding.final != 1 or encoding.padding or not is_scaled or not (is_stored or dtype):
            raise MappingError(
                f"{tensor.codes!r} is {label(tensor)}: expected int, AWQ, GPTQ or MXFP4 without group indexes, NVFP4 "
                "without pre_quant_scale, fp8 or MXFP8, which are codes, perhaps less zero points, times scales; "
                f"{_DECODE}"
            )
        if not is_stored:
            values = encoding.values.removeprefix("doubled ")
            codes = replace(encoding, values=values, parameters=())
            quantized[name] = tensor._replace(parameters=(), encoding=codes, dtype=np.dtype(dtype))
        meant = DTYPES["F8_E8M0"] if scale.dtype.name == "U8" else scale.dtype
        tensors[tensor.scales] = tensors[tensor.scales]._replace(stored_dtype=meant)
        for parameter, stored in zip(others, tensor.parameters[1:], strict=True):
            if parameter.role is Role.ZERO and parameter.bits:
                zeros = parameter.alone()
                quantized[stored] = _alone(tensor, stored, zeros, _CODES[zeros.values])
            elif parameter.role in _SECOND_LEVEL:
                (height, width), block = scale.block, parameter.block
                shared = -(-block[0] // height), -(-block[1] // width)  # scales that share a factor
                joint = Encoding(scale.grid, 8, "F8_E4M3", (replace(parameter, block=shared),))
                quantized[tensor.scales] = _alone(tensor, tensor.scales, joint, np.float32, (stored,))
    return replace(checkpoint, tensors=tensors, quantized=quantized)


def _without_order(checkpoint: Checkpoint, tensor: Quantized) -> Quantized:
    """Return a tensor without a group index that says what the groups' order says; raise `MappingError` if it does not.

    An index that selects groups stays.
    """
    encoding, scale = tensor.encoding, tensor.encoding.parameters[0]
    index = tensor.parameter(Role.GROUP)
    if index is None or 0 in scale.block:
        return tensor
    name, parameter = index
    stored = np.frombuffer(checkpoint.read(name, checkpoint[name].nbytes), parameter.dtype.numpy)
    if (stored.reshape(parameter.grid) != np.arange(parameter.grid[0])[:, None] // scale.block[0]).any():
        raise MappingError(f"{name!r}: permutes groups, and desc_act of quantization_config says that they are not")
    kept = tuple([each for each in encoding.parameters if each is not parameter])
    names = tuple([each for each in tensor.parameters if each != name])
    return tensor._replace(parameters=names, encoding=replace(encoding, parameters=kept))


def _alone(tensor: Quantized, name: str, encoding: Encoding, dtype: Any, parameters: tuple[str, ...] = ()) -> Quantized:
    """Return a parameter of a tensor as a tensor of its own, in the order of its codes."""
    shape = encoding.shape
    return Quantized(name, tensor.format, name, parameters, encoding, shape, shape, (0, 1), shape, np.dtype(dtype))


def split(checkpoint: Checkpoint, tree: Mapping[str, View], encoded: Quantization) -> dict[str, View]:
    """Return `tree` with `qvalue` and `scale`, and perhaps `zero_point`, in place of each leaf of quantised tensors.

    `tree` is of the stored codes. Raises `MappingError` if a leaf also has other tensors, or is computed.
    """
    leaves: dict[str, View] = {}
    for path, view in tree.items():
        if encoded.tensors.keys().isdisjoint(view.tensors):
            leaves[path] = view
            continue
        if any(piece.tensor not in encoded.tensors or piece.ops for piece in view.pieces):
            raise MappingError(f"{path!r} is not made of the codes of quantised tensors alone: {_DECODE}")
        leaves[f"{path}{CODES_END}"] = view
        for role, part in _LEAVES.items():
            found = {name: encoded.tensors[name].parameter(role) for name in view.tensors}
            described = {name: (*each, encoded.tensors[name].encoding.shape) for name, each in found.items() if each}
            if not described:
                continue
            dtypes = {checkpoint.view(name).dtype for name, *_ in described.values()}
            if len(dtypes) > 1:
                raise MappingError(f"{path!r} has {part}s of several dtypes, {sorted(map(str, dtypes))}: {_DECODE}")
            leaves[f"{path}.{part}"] = scales_view(view, described, dtypes.pop())
    return leaves
