"""Finds tensors that look like codes, and what is stored beside them under a name that no row of `mapping.formats` has.

Their values are not what a model computes with, so nothing is better than returning them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import combinations, takewhile
from math import prod
from typing import NamedTuple

from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.mapping.formats import EXPONENTS, FLOATS, FORMATS
from orbax_safetensors.mapping.quantized_tensor import Quantized
from orbax_safetensors.mapping.stored_codes import StoredTypes

FLOAT_CODES = frozenset(name for name, dtype in DTYPES.items() if name[0] == "F" and dtype.bits < 16) - {"F8_E8M0"}
# Positions, tables of tokens and counters of models are I64 or BOOL.
INTEGER_CODES = frozenset({"I8", "U8", "I16", "U16", "I32", "U32"})
_NUMBERS = frozenset({*FLOATS, *EXPONENTS, "F64", "F8_E4M3"})  # of scales, whatever they are called

_WEIGHT = re.compile(r"(?:q_?)?weight|W_q$|trellis$")
_SCALE = re.compile(r"sca?l(?!ar)|zero|absmax|codebook|g_idx")  # codes do not have such names
_PARAMETER = re.compile(
    rf"{_SCALE.pattern}|zp|quant|amax|lut|table|perm|smooth|hadamard|biases|inv(?!_freq)|factor|mult|offset|shift|(?:^|[._])s$"
)
_PLAIN = re.compile(r"bias(?!es)|embed")  # what layers also have beside their weights
# Integers that models also have without quantisation.
COUNTS = re.compile(r"(?:mask|ids?|index|indices|bias|table|tokens?|positions?)$")
_LAYER = 16  # tensors, of which a layer has fewer
_WORDS = 32  # of a name, which has fewer


class Pair(NamedTuple):
    """Codes, and a tensor beside them that says something of them."""

    codes: str
    beside: str


def is_weight(name: str) -> bool:
    """Return whether a name is one that layers give to their weights, or to codes of these."""
    return _WEIGHT.search(_leaf(name)) is not None or _leaf(name) in ("codes", "bitmask") or ".experts." in name


def looks_coded(name: str, stored: StoredTypes) -> bool:
    """Return whether a tensor would hold codes in a quantised checkpoint, whatever is stored beside it."""
    shape, dtype = stored[name]
    if _SCALE.search(_leaf(name)):
        return False
    return dtype in FLOAT_CODES or (dtype in INTEGER_CODES and len(shape) > 1 and is_weight(name))


def pairs(stored: StoredTypes, left: Iterable[str], tensors: Iterable[Quantized]) -> list[Pair]:
    """Return codes among the tensors that are `left`, or those of `tensors`, each with what is left and belongs to it.

    What belongs to `tensors`, which have all that they need, says so by its name. Pairs with scales are the first.
    """
    names = sorted(left)
    out: list[Pair] = []
    for tensor in tensors:
        for name in dict.fromkeys((tensor.codes, tensor.name)):
            out += [Pair(tensor.codes, beside) for beside in _beside(name, names, stored, frozenset())]
    elsewhere = _scales_elsewhere(names, stored)
    for name in names:
        shape, dtype = stored[name]
        if dtype not in FLOAT_CODES | INTEGER_CODES or prod(shape) < 2 or _SCALE.search(_leaf(name)):
            continue
        for beside in (*_beside(name, names, stored), *_groups_beside(name, names, stored), *elsewhere.get(name, ())):
            count = prod(stored[beside][0])
            if {dtype, stored[beside][1]} <= FLOAT_CODES:  # a model that is all in fp8
                continue
            if count < prod(shape) or (count == prod(shape) and _PARAMETER.search(_leaf(beside))):
                out.append(Pair(name, beside))
    return sorted(out, key=lambda pair: _SCALE.search(_leaf(pair.beside)) is None)


def is_known(pair: Pair) -> bool:
    """Return whether some format gives the second of a pair such a name."""
    return any(
        pair.codes.endswith(row.codes) and pair.beside == pair.codes[: len(pair.codes) - len(row.codes)] + ending
        for row in FORMATS
        for ending in (*row.facts, *(ending for each in row.parameters for ending in each.endings))
    )


def refusal(pair: Pair, stored: StoredTypes) -> str:
    """Return why the first of a pair has no values."""
    codes, beside = (f"{name!r} ({stored[name][1]}, shape {stored[name][0]})" for name in pair)
    return (
        f"{codes} and {beside} beside it: expected plain values, or a known format of quantised tensors, found neither"
        "; without a family, and with dequantize=False, tensors come as they are stored"
    )


def _beside(name: str, names: Sequence[str], stored: StoredTypes, dtypes: Set[str] = _NUMBERS) -> Iterator[str]:
    """Yield those of the sorted `names` that can only be of a layer's weight `name`, or begin with its name.

    Only those of `dtypes` may have any names.
    """
    weight = _WEIGHT.search(name, len(name) - len(_leaf(name)))
    stem = name[: weight.start()] if weight else name
    for beside in _with_prefix(stem, names):
        rest = beside[len(stem) :]
        if beside == name or _PLAIN.search(rest) or stored[beside][1] == "BOOL":
            continue
        says = _PARAMETER.search(rest) is not None
        if beside.startswith((f"{name}.", f"{name}:")):
            related = says or (weight and stored[beside][1] in dtypes)
        elif weight and stem:
            is_its = "." not in rest or rest.startswith("weight.")
            related = is_its and (says or stored[beside][1] in dtypes)
        else:
            related = "." not in rest and rest.startswith("_") and says
        if related:
            yield beside


def _groups_beside(name: str, names: Sequence[str], stored: StoredTypes) -> Iterator[str]:
    """Yield tensors of the same module that have a row for each row of `name`, and are named as parameters are.

    Beside integers, the names of floating tensors do not matter if only one dimension differs, and is divided.
    """
    module = name.rpartition(".")[0]
    shape, dtype = stored[name]
    is_integer = dtype in INTEGER_CODES and not COUNTS.search(name)
    for beside in (*_with_prefix(f"{module}.", names), *_with_prefix(f"{module}_", names)) if module else ():
        rest, found = beside[len(module) + 1 :], stored[beside][0]
        if beside == name or "." in rest or _PLAIN.search(rest) or min(len(found), len(shape) - 1) < 1:
            continue
        is_parameter = _PARAMETER.search(rest) is not None and found[0] == shape[0]
        if len(found) == 1:
            related = is_parameter and is_integer and _SCALE.search(rest) is not None
        else:
            related = is_parameter and (len(found) == len(shape) or is_weight(name))
        if related:
            yield beside
        elif is_integer and stored[beside][1] in FLOATS and len(found) == len(shape):
            remainders = [size % groups for size, groups in zip(shape, found, strict=True) if size != groups]
            if remainders == [0]:
                yield beside


def _scales_elsewhere(names: Sequence[str], stored: StoredTypes) -> Mapping[str, Sequence[str]]:
    """Return the scales whose names have the name of the module of codes in them, by the name of the codes.

    A dot is an underscore. The name of scales of several modules, as `qkv_scale`, has the beginnings of theirs.
    """
    modules: dict[str, list[str]] = defaultdict(list)
    together: dict[str, dict[str, str]] = defaultdict(dict)  # by the parent of modules, and how their names begin
    for name in names:
        if looks_coded(name, stored):
            weight = _WEIGHT.search(name, len(name) - len(_leaf(name)))
            parent, _, module = (name[: weight.start()] if weight else name).rstrip("._").rpartition(".")
            modules["_".join(_words(f"{parent}.{module}".lstrip(".")))].append(name)
            if module[:1].isalpha():  # experts have numbers
                together["_".join(_words(parent))][_words(module)[0]] = name
    out: dict[str, list[str]] = defaultdict(list)
    for beside in names if modules else ():
        words = _words(beside)
        if "scale" not in beside or len(words) > _WORDS:
            continue
        for begin, end in combinations(range(len(words) + 1), 2):
            of = modules.get("_".join(words[begin:end]), ())
            for name in of if any("scale" in word for word in words[:begin] + words[end:]) else ():
                out[name].append(beside)
        for end in range(len(words)):
            shared = "".join(word for word in words[end:] if "scale" not in word and word not in ("weight", "inv"))
            codes = together.get("_".join(words[:end]), {})
            for first, name in codes.items():
                others = shared[len(first) :] if shared.startswith(first) else ""
                if others and any(other in others or other.endswith(others) for other in codes.keys() - {first}):
                    out[name].append(beside)
    return out


def _words(name: str) -> list[str]:
    return re.split("[._]", name)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _with_prefix(prefix: str, names: Sequence[str]) -> Iterator[str]:
    """Yield those of the sorted `names` that begin with `prefix`, up to as many as a layer may have."""
    begin = bisect_left(names, prefix)
    yield from takewhile(lambda name: name.startswith(prefix), names[begin : begin + _LAYER])
