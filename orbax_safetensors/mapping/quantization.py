"""The stored codes and scales of quantised tensors, according to `quantization_config` of `config.json`.

This module knows names, shapes and dtypes only: `geometry.encoding` knows where elements lie, `transfer.decode` their
values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry.encoding import Encoding

Stored = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype as spelled in a header

# Scales of quantised activations and caches, which a model without quantisation does not have.
_UNUSED = re.compile(r"(?:[qkv]|kv|prob|(?:\w+_)?(?:input|activation|output))_scale(?:_ub)?")  # the name's last part
_FP8_SCALES = ("_scale_inv", "_scale")  # a code is multiplied by its scale under either name
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_MXFP4_BYTES = 16  # of the codes that share a scale


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised tensor: the names of its stored tensors, and how they encode it.

    The tensor has the dimensions of `encoding.shape` in the order of `axes`.
    """

    codes: str
    scales: str
    encoding: Encoding
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Quantization:
    """The tensors of a checkpoint that are not plain.

    Attributes:
      tensors: quantised tensors by their names without quantisation. The codes of an fp8 tensor have the same name.
      unused: names of stored tensors that only quantised computation needs.
    """

    tensors: Mapping[str, Quantized]
    unused: frozenset[str] = frozenset()


def quantization(config: Mapping[str, Any] | None, stored: Stored) -> Quantization:
    """Return the quantised tensors among all stored tensors of a checkpoint.

    `config` is the checkpoint's `quantization_config`, or None if nothing is quantised. The dtype shows which tensors
    are plain, such as those of `modules_to_not_convert`. Raises `MappingError` if the method is unknown, or if codes
    and scales do not fit each other.
    """
    if config is None:
        return Quantization({})
    if not isinstance(config, Mapping):
        raise MappingError(f"quantization_config: expected an object, found {config!r}")
    match config.get("quant_method"):
        case "mxfp4":
            return Quantization(_mxfp4(stored))
        case "fp8" | "fbgemm_fp8":
            block = config.get("weight_block_size")
        case "compressed-tensors":
            block = _compressed_block(config)
        case method:
            raise MappingError(
                f"quantization_config: expected quant_method fp8, fbgemm_fp8, compressed-tensors or mxfp4, "
                f"found {method!r}"
            )
    unused = frozenset(name for name in stored if _UNUSED.fullmatch(name.rpartition(".")[2]))
    return Quantization(_fp8(stored, _checked_block(block)), unused)


def _compressed_block(config: Mapping[str, Any]) -> Any:
    """Return the block size of `compressed-tensors`; None if it has scales for channels or whole tensors only."""
    try:
        weights = [group["weights"] for group in config["config_groups"].values()]
        kinds = {(config["format"], weight["type"], weight["num_bits"]) for weight in weights}
        blocks = [weight.get("block_structure") for weight in weights]
    except (AttributeError, KeyError, TypeError) as error:
        raise MappingError(f"quantization_config: is not valid for compressed-tensors: {error!r}") from error
    if kinds != {("float-quantized", "float", 8)}:
        raise MappingError(
            f"quantization_config: expected compressed-tensors of format 'float-quantized' and type 'float' with "
            f"num_bits 8, found {sorted(kinds, key=repr)}"
        )
    blocks = [block for block in blocks if block is not None]
    if any(block != blocks[0] for block in blocks):
        raise MappingError(f"quantization_config: expected one block_structure, found {blocks}")
    return blocks[0] if blocks else None


def _checked_block(block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise MappingError(f"quantization_config: expected a block size of two positive integers, found {block!r}")
    return block[0], block[1]


def _fp8(stored: Stored, block: tuple[int, int] | None) -> dict[str, Quantized]:
    """Return the tensors whose codes are `X` and whose scales are `X_scale_inv` or `X_scale`."""
    scales_of: dict[str, str] = {}
    for scales in stored:
        codes = scales.removesuffix("_inv").removesuffix("_scale")
        if not scales.endswith(_FP8_SCALES) or not (_is_fp8(stored, codes) or codes.endswith(".weight")):
            continue
        if codes in scales_of:
            raise MappingError(f"{codes!r}: expected one tensor of scales, found {scales_of[codes]!r} and {scales!r}")
        scales_of[codes] = scales
    kept = set(scales_of.values())
    for name in stored:
        if _is_fp8(stored, name) and name not in scales_of and name not in kept:
            raise MappingError(
                f"{name!r} is {stored[name][1]}: expected its scales {name + '_scale_inv'!r} or {name + '_scale'!r}, "
                "which are not stored"
            )
    out = {}
    for codes, scales in scales_of.items():
        shape = _checked(stored, codes, ("F8_E4M3",), f"the codes of {scales!r}")
        grid = _checked(stored, scales, _SCALE_DTYPES, f"the scales of {codes!r}")
        encoding = _encoding(shape, _fp8_block(codes, shape, scales, grid, block), "F8_E4M3", stored[scales][1])
        out[codes] = Quantized(codes, scales, encoding, tuple(range(len(shape))))
    return out


def _is_fp8(stored: Stored, name: str) -> bool:
    return name in stored and stored[name][1].startswith("F8_")


def _fp8_block(
    codes: str, shape: tuple[int, ...], scales: str, found: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int]:
    """Return how many rows and columns share a scale, according to the shape of the scales."""
    if len(shape) < 2:
        raise MappingError(f"{codes!r}: expected two dimensions or more, found shape {shape}")
    *leading, rows, columns = shape
    fitting: dict[str, tuple[tuple[int, int], list[tuple[int, ...]]]] = {}
    if block is not None:
        grid = (*leading, -(-rows // block[0]), -(-columns // block[1]))
        fitting[f"blocks of {block[0]} x {block[1]}"] = (block, [grid])
    fitting["rows"] = ((1, columns), [(*leading, rows, 1), (*leading, rows)])
    if not leading:
        fitting["the tensor"] = ((rows, columns), [(), (1,), (1, 1)])
    for size, shapes in fitting.values():
        if found in shapes:
            return size
    expected = ", ".join(f"{' or '.join(map(str, shapes))} for {what}" for what, (_, shapes) in fitting.items())
    missing = "; quantization_config has no block size" if block is None else ""
    raise MappingError(f"{scales!r}: expected {expected} of {codes!r} of shape {shape}, found shape {found}{missing}")


def _mxfp4(stored: Stored) -> dict[str, Quantized]:
    """Return the tensors whose codes are `X_blocks` and whose scales are `X_scales`, with rows and columns swapped."""
    out = {}
    for name in dict.fromkeys(name[: -len("_blocks")] for name in stored if name.endswith(("_blocks", "_scales"))):
        codes, scales = f"{name}_blocks", f"{name}_scales"
        found = _checked(stored, codes, ("U8",), f"the codes of {name!r}")
        grid = _checked(stored, scales, ("U8",), f"the scales of {name!r}")
        if len(found) < 4 or found[-1] != _MXFP4_BYTES:
            raise MappingError(f"{codes!r}: expected shape (experts, rows, groups, {_MXFP4_BYTES}), found {found}")
        if grid != found[:-1]:
            raise MappingError(f"{scales!r}: expected shape {found[:-1]} for {codes!r} of shape {found}, found {grid}")
        if name in stored:
            raise MappingError(f"{name!r}: expected it either plain or as {codes!r}, found both")
        *leading, groups, nbytes = found
        shape = (*leading, groups * nbytes * 2)
        axes = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
        out[name] = Quantized(codes, scales, _encoding(shape, (1, nbytes * 2), "F4", "U8"), axes)
    return out


def _checked(stored: Stored, name: str, dtypes: tuple[str, ...], what: str) -> tuple[int, ...]:
    """Return the shape of a stored tensor; `MappingError` if it is missing or has none of `dtypes`."""
    if name not in stored:
        raise MappingError(f"{name!r}: expected {what} in {' or '.join(dtypes)}, found no such tensor")
    shape, dtype = stored[name]
    if dtype not in dtypes:
        raise MappingError(f"{name!r}: expected {what} in {' or '.join(dtypes)}, found {dtype}")
    return shape


@lru_cache
def _encoding(shape: tuple[int, ...], block: tuple[int, int], codes: str, scales: str) -> Encoding:
    """Return an encoding: the same object for all tensors with equal arguments."""
    return Encoding(shape, block, DTYPES[codes], DTYPES[scales])
