"""The quantised tensors of a checkpoint: which row of `mapping.formats` each has, and its `Encoding`.

Names, dtypes and shapes decide: lists of excluded modules in configs are not always right. A config is asked for what
they leave open, above all the sizes of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.header import shown
from orbax_safetensors.geometry.encoding import Role
from orbax_safetensors.mapping.encodings import Read, Settings, StoredTypes, ended
from orbax_safetensors.mapping.encodings import quantized as encoded
from orbax_safetensors.mapping.formats import FORMATS, Format, Layout
from orbax_safetensors.mapping.quantized_tensor import Quantized

_METHODS = (
    "fp8",
    "fbgemm_fp8",
    "mxfp8",
    "mxfp4",
    "compressed-tensors",
    "modelopt",
    "quark",
    "awq",
    "gptq",
    "bitsandbytes",
)
# Methods with versions that store codes in other ways: the key of the version, and those that are known.
_VERSIONS = {"awq": ("version", ("gemm",)), "gptq": ("checkpoint_format", ("gptq", "gptq_v2"))}
# Scales of quantised activations and caches, which a model without quantisation does not have.
_UNUSED = re.compile(r"(?:[qkv]|kv|prob|(?:\w+_)?(?:input|activation|output))(?:_global)?_scale(?:_ub)?|qscale_act")
_SQUARE = (128, 128)  # the blocks of ModelOpt, whose configs do not say it


@dataclass(frozen=True)
class Quantization:
    """The tensors of a checkpoint that are not plain.

    Attributes:
      tensors: quantised tensors by their names without quantisation. The codes of an fp8 tensor have the same name.
      unused: names of stored tensors that only quantised computation needs, or that describe codes.
    """

    tensors: Mapping[str, Quantized]
    unused: frozenset[str] = frozenset()


def quantization(config: Mapping[str, Any] | None, stored: StoredTypes, read: Read | None = None) -> Quantization:
    """Return the quantised tensors among all stored tensors of a checkpoint.

    `config` is the checkpoint's `quantization_config`, or None if it has none; `read` returns the data of a tensor. It
    is called for the few formats whose shapes leave something open. Raises `MappingError` if the method is unknown, or
    if codes and what is beside them do not fit each other.
    """
    settings = _settings(config)
    tensors: dict[str, Quantized] = {}
    taken: set[str] = set()
    unused: set[str] = set()
    alike: dict[object, Quantized] = {}  # of tens of thousands of tensors, few differ in more than their names
    described: list[str] = []

    def read_description(name: str) -> bytes:
        described.append(name)
        return read(name) if read else b""

    for codes, (_, dtype) in stored.items():
        for row in _BY_DTYPE.get(dtype, ()):
            names = _names(row, codes, stored) if codes.endswith(row.codes) and codes not in taken else None
            if names is None or not _is_meant(row, settings, codes, names, stored):
                continue
            name = ended(codes, row.codes, row.tensor)
            if name in stored and name != codes:
                raise MappingError(f"{name!r}: expected it either plain or as {codes!r}, found both")
            key = row, stored[codes], tuple(names), tuple([stored[parameter] for parameter in names.values()])
            if key in alike:
                tensor = alike[key].renamed(name, codes, names)
            else:
                described.clear()
                tensor = encoded(row, name, codes, names, stored, settings, read_description)
                if not described:
                    alike[key] = tensor
            tensors[name] = tensor
            taken.update(tensor.stored, names.values())
            unused.update(fact for end in row.facts if (fact := ended(codes, row.codes, end)) in stored)
    if settings.method is not None or tensors:
        unused.update(name for name in stored if _UNUSED.fullmatch(name.rpartition(".")[2]))
    if settings.method is not None:
        for name in stored:
            if name not in taken and name not in unused:
                _check_plain(name, stored)
    return Quantization(tensors, frozenset(unused | (taken - {n for q in tensors.values() for n in q.stored})))


_BY_DTYPE: dict[str, list[Format]] = {}
for _row in FORMATS:
    for _dtype in _row.dtypes:
        _BY_DTYPE.setdefault(_dtype, []).append(_row)
CODE_DTYPES = frozenset(_BY_DTYPE)  # a checkpoint without any of these has no quantised tensors


def _settings(config: Mapping[str, Any] | None) -> Settings:
    if config is None:
        return Settings()
    if not isinstance(config, Mapping):
        raise MappingError(f"quantization_config: expected an object, found {shown(config)}")
    method = config.get("quant_method")
    if method not in _METHODS:
        raise MappingError(f"quantization_config: expected quant_method {', '.join(_METHODS)}, found {shown(method)}")
    block, schemes = config.get("weight_block_size"), []
    if method == "compressed-tensors":
        try:
            weights = [group["weights"] for group in config["config_groups"].values() if group.get("weights")]
            blocks = [weight["block_structure"] for weight in weights if weight.get("block_structure")]
            schemes = [(each["num_bits"], each.get("group_size") or -1) for each in weights if each["type"] == "int"]
        except (AttributeError, KeyError, TypeError) as error:
            raise MappingError(f"quantization_config: is not valid for compressed-tensors: {error!r}") from error
        if any(found != blocks[0] for found in blocks):
            raise MappingError(f"quantization_config: expected one block_structure, found {shown(blocks)}")
        block = blocks[0] if blocks else None
    elif method in ("awq", "gptq"):
        schemes = [(config.get("bits", 4), config.get("group_size", -1))]
    if not all(type(number) is int for scheme in schemes for number in scheme):
        raise MappingError(f"quantization_config: expected integers as bits and group_size, found {shown(schemes)}")
    if method == "modelopt" and block is None:
        block = _SQUARE
    version = _checked_version(method, config)
    order = config.get("desc_act")
    return Settings(
        method, _checked_block(block), frozenset(schemes), version != "gptq_v2", None if order is None else not order
    )


def _checked_version(method: str, config: Mapping[str, Any]) -> str | None:
    """Return the version of a format that a config names; raise `MappingError` if it stores codes in another way."""
    key, known = _VERSIONS.get(method, ("", ()))
    version = config.get(key)
    if version is not None and not (isinstance(version, str) and version.lower() in known):
        raise MappingError(f"quantization_config: expected {key} {' or '.join(known)}, found {shown(version)}")
    return None if version is None else version.lower()


def _checked_block(block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise MappingError(f"quantization_config: expected a block size of two positive integers, found {shown(block)}")
    return block[0], block[1]


def _names(row: Format, codes: str, stored: StoredTypes) -> dict[Role, str] | None:
    """Return the names of a format's parameters for `codes`; None if one that it requires is not stored."""
    out = {}
    for parameter in row.parameters:
        names = [name for ending in parameter.endings if (name := ended(codes, row.codes, ending)) in stored]
        if len(names) > 1:
            raise MappingError(
                f"{codes!r}: expected one tensor of scales, found {' and '.join(map(repr, sorted(names)))}"
            )
        if names and stored[names[0]][1] in parameter.dtypes:
            out[parameter.role] = names[0]
        elif names or parameter.required:
            return None
    return out


def _is_meant(row: Format, settings: Settings, codes: str, names: Mapping[Role, str], stored: StoredTypes) -> bool:
    """Return whether a format is that of `codes`, if another one stores tensors with the same names and dtypes."""
    if row.method is None:
        return True
    if settings.method in ("awq", "gptq"):
        return settings.method == row.method
    outputs_in_words = stored[codes][0][-1:] != stored[names[Role.SCALE]][0][-1:]
    return outputs_in_words == (row.layout is Layout.INPUTS)


def _check_plain(name: str, stored: StoredTypes) -> None:
    """Raise `MappingError` if a stored tensor that belongs to no quantised one is codes, or is stored beside codes."""
    dtype = stored[name][1]
    codes_of: dict[str, list[str]] = {}  # the dtypes that codes may have, by their name
    for row in FORMATS:
        for parameter in row.parameters:
            for ending in parameter.endings if dtype in parameter.dtypes else ():
                if name.endswith(ending) and _has_codes(codes := ended(name, ending, row.codes), row, ending, stored):
                    codes_of.setdefault(codes, []).extend(row.dtypes)
    for codes in [each for each in codes_of if each in stored] or list(codes_of)[:1]:
        found = stored[codes][1] if codes in stored else "no such tensor"
        dtypes = " or ".join(dict.fromkeys(codes_of[codes]))
        if found not in codes_of[codes]:
            raise MappingError(f"{codes!r}: expected the codes of {name!r} in {dtypes}, found {found}")
        _check_codes(codes, stored)
        raise MappingError(f"{name!r}: does not fit {codes!r}, whose codes are {found}, and what is stored beside them")
    _check_codes(name, stored)


def _has_codes(codes: str, row: Format, ending: str, stored: StoredTypes) -> bool:
    """Return whether a tensor with this ending says that there are codes: other tensors may have the same ending."""
    if ending == ".scale":
        return False
    return row.codes != "" or codes.endswith(".weight") or (codes in stored and stored[codes][1].startswith("F8_"))


def _check_codes(codes: str, stored: StoredTypes) -> None:
    """Raise `MappingError` if a stored tensor is codes of which something is missing, or has another dtype."""
    dtype = stored[codes][1]
    rows = [row for row in _BY_DTYPE.get(dtype, ()) if codes.endswith(row.codes)]
    ends = {row: [*row.facts, *(ending for each in row.parameters for ending in each.endings)] for row in rows}
    counts = {row: sum(ended(codes, row.codes, ending) in stored for ending in ends[row]) for row in rows}
    row = max(rows, key=lambda row: (counts[row], row.codes != ".weight"), default=None)
    if row is None or (not counts[row] and row.codes == ".weight"):
        if dtype.startswith("F8_"):
            raise MappingError(f"{codes!r}: expected codes in F8_E4M3, found {dtype}")
        return
    for parameter in row.parameters:
        names = [ended(codes, row.codes, ending) for ending in parameter.endings]
        found = [name for name in names if name in stored]
        if not found and parameter.required:
            what = "its scales " if parameter.role is Role.SCALE else ""
            raise MappingError(f"{codes!r} is {dtype}: expected {what}{_any(names)}, found no such tensor")
        if found and stored[found[0]][1] not in parameter.dtypes:
            raise MappingError(
                f"{found[0]!r}: expected {' or '.join(parameter.dtypes)} beside {codes!r} of {dtype}, "
                f"found {stored[found[0]][1]}"
            )


def _any(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))
