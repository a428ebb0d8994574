"""The quantised tensors of a checkpoint, and leaves that are made of them as codes and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.config import quantization_config, without_quantization
from orbax_safetensors.devices.bits import is_float
from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.dtypes import from_numpy
from orbax_safetensors.geometry.encoding import Encoding
from orbax_safetensors.geometry.scales import scales_view
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.quantization import Quantization, quantization

_DECODE = "decode it with SafetensorsOptions(dequantize=True)"


def quantized_tensors(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Quantization:
    """Return the quantised tensors of a checkpoint, according to its `config.json`.

    Raises `MappingError` if the method is unknown, if codes and scales do not fit each other, and if they are in
    pieces.
    """
    facts = {name: (tensor.stored_shape, tensor.stored_dtype.name) for name, tensor in checkpoint.tensors.items()}
    encoded = quantization(quantization_config(config), facts)
    for quantized in encoded.tensors.values():
        for name in (quantized.codes, quantized.scales):
            if len(checkpoint[name].pieces) > 1:
                raise MappingError(f"{name!r} is quantised and in pieces, which cannot be decoded")
    return encoded


def config_for(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config to store with `tensors`, dtype and shape by name.

    It says how tensors are quantised only if some of these are: most saves are of tensors that were decoded.
    """
    facts = {name: (shape, from_numpy(dtype).name) for name, (dtype, shape) in tensors.items()}
    try:
        has_codes = bool(quantization(quantization_config(config), facts).tensors)
    except MappingError:  # of a method that has no decoder here
        has_codes = any(not is_float(dtype) or dtype.itemsize == 1 for dtype, _ in tensors.values())
    return config if has_codes else without_quantization(config)


def scales_beside(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the name of stored scales for a tensor, None if there are none."""
    return next((name + end for end in ("_scale_inv", "_scale") if name + end in checkpoint.tensors), None)


def check_splits(encoded: Quantization) -> frozenset[str]:
    """Return the names of all scales; `MappingError` if codes are packed, so that no view can take them apart."""
    for name, quantized in encoded.tensors.items():
        if quantized.codes != name:
            raise MappingError(f"{quantized.codes!r} has several codes in a byte, which cannot be kept: {_DECODE}")
    return frozenset(quantized.scales for quantized in encoded.tensors.values())


def split(checkpoint: Checkpoint, tree: Mapping[str, View], encoded: Quantization) -> dict[str, View]:
    """Return `tree` with two leaves, `qvalue` and `scale`, in place of each leaf of quantised tensors.

    `tree` is of the stored codes. Raises `MappingError` if a leaf also has other tensors, or is computed.
    """

    def encoding_of(name: str) -> tuple[str, Encoding]:
        quantized = encoded.tensors[name]
        return quantized.scales, quantized.encoding

    leaves: dict[str, View] = {}
    for path, view in tree.items():
        if encoded.tensors.keys().isdisjoint(view.tensors):
            leaves[path] = view
            continue
        if any(piece.tensor not in encoded.tensors or piece.ops for piece in view.pieces):
            raise MappingError(f"{path!r} is not made of the codes of quantised tensors alone: {_DECODE}")
        dtypes = {checkpoint[encoded.tensors[name].scales].dtype for name in view.tensors}
        if len(dtypes) > 1:
            raise MappingError(f"{path!r} has scales of several dtypes, {sorted(map(str, dtypes))}: {_DECODE}")
        leaves[f"{path}.qvalue"] = view
        leaves[f"{path}.scale"] = scales_view(view, encoding_of, dtypes.pop())
    return leaves
