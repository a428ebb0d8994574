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
from orbax_safetensors.geometry.encoding import Role
from orbax_safetensors.mapping.encodings import quantized as encoded
from orbax_safetensors.mapping.formats import FORMATS, CodeLayout, Format
from orbax_safetensors.mapping.quantization_config import Settings, settings_of
from orbax_safetensors.mapping.quantized_tensor import Quantized
from orbax_safetensors.mapping.stored_codes import Read, StoredTypes, ended
from orbax_safetensors.mapping.unknown_codes import COUNTS, INTEGER_CODES, is_known, looks_coded, pairs, refusal

# What quantised activations and caches need, and a model without quantisation does not have.
_UNUSED = re.compile(
    r"(?:[qkv]|kv|prob|(?:\w+_)?(?:input|activation|output))(?:_cache)?(?:_global)?_(?:scale|zero_point)(?:_ub)?"
    "|qscale_act|scale_input|scaled_fp8"
)


@dataclass(frozen=True)
class Quantization:
    """The tensors of a checkpoint that are not plain.

    Attributes:
      tensors: quantised tensors by their names without quantisation. The codes of an fp8 tensor have the same name.
      unused: names of stored tensors that only quantised computation needs, or that describe codes.
      fault: what is wrong with the config of a checkpoint whose tensors are all plain.
    """

    tensors: Mapping[str, Quantized]
    unused: frozenset[str] = frozenset()
    fault: str = ""


def quantization(config: Mapping[str, Any] | None, stored: StoredTypes, read: Read | None = None) -> Quantization:
    """Return the quantised tensors among all stored tensors of a checkpoint.

    `config` is the checkpoint's `quantization_config`, or None if it has none; `read` returns the data of a tensor. It
    is called for the few formats whose shapes leave something open. Raises `MappingError` if there are codes of an
    unknown method or format, and if codes, what is beside them and the config do not fit each other.
    """
    try:
        settings = settings_of(config)
    except MappingError as error:
        _check_all_plain(stored, error)
        return Quantization({}, fault=str(error))
    tensors: dict[str, Quantized] = {}
    taken: set[str] = set()
    unused: set[str] = set()
    alike: dict[object, Quantized] = {}  # of tens of thousands of tensors, few differ in more than their names
    descriptions_read: list[str] = []

    def read_description(name: str) -> bytes:
        descriptions_read.append(name)
        return read(name) if read else b""

    for codes, (_, dtype) in stored.items():
        for row in _BY_DTYPE.get(dtype, ()):
            names = _names(row, codes, stored) if codes.endswith(row.codes) and codes not in taken else None
            if names is None:
                continue
            own = settings.of_module(ended(codes, row.codes, ""))
            if not _is_meant(row, own, codes, names, stored):
                continue
            name = ended(codes, row.codes, row.tensor)
            if name in stored and name != codes:
                raise MappingError(f"{name!r}: expected it either plain or as {codes!r}, found both")
            parameters = tuple([stored[parameter] for parameter in names.values()])
            key = row, id(own), stored[codes], tuple(names), parameters
            if key in alike:
                tensor = alike[key].renamed(name, codes, names)
            else:
                descriptions_read.clear()
                tensor = encoded(row, name, codes, names, stored, own, read_description)
                if not descriptions_read:
                    alike[key] = tensor
            tensors[name] = tensor
            taken.update(tensor.stored, names.values())
            unused.update(fact for end in row.facts if (fact := ended(codes, row.codes, end)) in stored)
    if settings.method is not None or tensors:
        unused.update(filter(_is_unused, stored))
    left = [name for name, (shape, _) in stored.items() if name not in taken and name not in unused and 0 not in shape]
    suspects = pairs(stored, left, tensors.values())
    if foreign := [pair for pair in suspects if not (is_known(pair) or _is_unused(pair.beside))]:
        raise MappingError(refusal(foreign[0], stored))
    if settings.method is not None or tensors or suspects or any(name.endswith(_CODES) for name in left):
        for name in sorted(left, key=lambda name: looks_coded(name, stored)):  # parameters say more than codes do
            _check_plain(name, stored)
    if suspects:
        raise MappingError(refusal(suspects[0], stored))
    return Quantization(tensors, frozenset(unused | (taken - {n for q in tensors.values() for n in q.stored})))


_BY_DTYPE: dict[str, list[Format]] = {}
for _row in FORMATS:
    for _dtype in _row.dtypes:
        _BY_DTYPE.setdefault(_dtype, []).append(_row)
_OF_ANYTHING = ("", ".weight")  # endings of codes and of other tensors
_CODES = tuple({row.codes for row in FORMATS if row.codes.startswith(".")} - {*_OF_ANYTHING})  # of nothing but codes
CODE_DTYPES = frozenset(_BY_DTYPE)  # a checkpoint without any of these has no quantised tensors


def _is_unused(name: str) -> bool:
    return _UNUSED.fullmatch(name.rpartition(".")[2]) is not None


def _check_all_plain(stored: StoredTypes, error: MappingError) -> None:
    """Raise `MappingError` if some stored tensors are codes, of a checkpoint whose config is not understood."""
    left = [name for name, (shape, _) in stored.items() if 0 not in shape and not _is_unused(name)]
    if suspects := pairs(stored, left, ()):
        raise MappingError(f"{refusal(suspects[0], stored)}; {error}") from error
    for name in left:
        shape, dtype = stored[name]
        is_packed = dtype in INTEGER_CODES and len(shape) > 1 and COUNTS.search(name) is None
        if is_packed or looks_coded(name, stored):
            raise MappingError(f"{name!r}: expected plain values, found {dtype} of shape {shape}; {error}") from error


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
    if row.method == "gemma":
        return settings.method == "gemma"
    if row.method == "mlx":
        if row.bits is None or row.group is None:  # the only one with biases
            return True
        if said := [(scheme.bits, scheme.group) for scheme in settings.schemes if scheme.kind == "float"]:
            return (row.bits, row.group) in said
        words, groups = stored[codes][0][-1:], stored[names[Role.SCALE]][0][-1:]
        return words == tuple([size * row.group * row.bits // 32 for size in groups])
    if settings.method in ("awq", "gptq"):
        return settings.method == row.method
    outputs_in_words = stored[codes][0][-1:] != stored[names[Role.SCALE]][0][-1:]
    return outputs_in_words == (row.layout is CodeLayout.INPUTS)


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
    return (
        row.codes != ""
        or codes.endswith(".weight")
        or (codes in stored and (stored[codes][1].startswith("F8_") or stored[codes][1] in row.dtypes))
    )


def _check_codes(codes: str, stored: StoredTypes) -> None:
    """Raise `MappingError` if a stored tensor is codes of which something is missing, or has another dtype."""
    dtype = stored[codes][1]
    rows = [row for row in _BY_DTYPE.get(dtype, ()) if codes.endswith(row.codes)]
    ends = {row: [*row.facts, *(ending for each in row.parameters for ending in each.endings)] for row in rows}
    counts = {row: sum(ended(codes, row.codes, ending) in stored for ending in ends[row]) for row in rows}
    row = max(rows, key=lambda row: (counts[row], row.codes not in _OF_ANYTHING), default=None)
    if row is None or (not counts[row] and row.codes in _OF_ANYTHING and dtype != "F8_E4M3"):
        if dtype.startswith("F8_"):
            raise MappingError(f"{codes!r}: expected codes in F8_E4M3, found {dtype}")
        if looks_coded(codes, stored):
            raise MappingError(f"{codes!r} is {dtype}: expected plain values, or its scales, found no such tensor")
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
