"""Hypothesis strategies for `.safetensors` files, valid and almost valid.

Not for oracles or checks: a strategy here only says what there is.
"""

import json
import math
import struct
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from orbax_safetensors.format.dtypes import DTYPES, DType
from tests.support import tiers


def examples(count: int) -> settings:
    """As many examples, or a tenth of them in the fast tier."""
    return settings(max_examples=max(10, count // 10) if tiers.only_fast else count)


type_names = st.sampled_from(sorted(DTYPES))

# All that UTF-8 can hold: names are keys and never paths.
texts = st.one_of(
    st.sampled_from(["", "../x", "a/b", "\0", 'quote"\\', "dtype", "shape", "data_offsets", "é\x7f\u2028😀"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
tensor_names = texts.filter(lambda name: name != "__metadata__")

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def _fills_bytes(tensor: tuple[DType, tuple[int, ...]]) -> bool:
    dtype, shape = tensor
    return math.prod(shape) * dtype.bits % 8 == 0


stored = st.tuples(type_names.map(DTYPES.__getitem__), shapes).filter(_fills_bytes)

tensor_lists = st.dictionaries(tensor_names, stored, max_size=5).map(
    lambda tensors: [(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


_unknown_fields = st.tuples(texts.filter(lambda key: key not in ("dtype", "shape", "data_offsets")), json_values)


def file_of(text: str | bytes, data: bytes = b"") -> bytes:
    """A file with this JSON and this data, right or wrong."""
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded + data


@st.composite
def documents(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A valid header as a JSON object, its keys in any order, and the size of its data section in bytes."""
    entries: list[tuple[str, Any]] = []
    position = 0
    for name, dtype, shape in draw(tensor_lists):
        end = position + math.prod(shape) * dtype.bits // 8
        fields: dict[str, Any] = {"dtype": dtype.name, "shape": list(shape), "data_offsets": [position, end]}
        extra = draw(st.none() | _unknown_fields)
        if extra is not None:
            fields[extra[0]] = extra[1]
        entries.append((name, fields))
        position = end
    if draw(st.booleans()):
        entries.append(("__metadata__", draw(st.none() | st.dictionaries(texts, texts, max_size=2))))
    return dict(draw(st.permutations(entries))), position


def _dumps(draw: st.DrawFn, document: Any) -> str:
    text = json.dumps(document, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
    return draw(st.sampled_from(["", " ", "\n\t"])) + text + draw(st.sampled_from(["", " \r\n"]))


@st.composite
def valid_files(draw: st.DrawFn) -> bytes:
    """Every byte of a valid file, spelled as any writer might."""
    document, data_bytes = draw(documents())
    return file_of(_dumps(draw, document), bytes(data_bytes))


_hostile_numbers: st.SearchStrategy[Any] = st.sampled_from(
    [-1, 0, 1, 2, 1.0, 1e2, -0.0, True, "1", None, [], {}, 2**32, 2**63, 2**64 - 1, 2**64]
)
_hostile_fields: dict[str, st.SearchStrategy[Any]] = {
    "dtype": type_names | st.sampled_from(["f32", "F6", "", None, 4, ["U8"], {"U8": None}, {"U8": 1}, {"a": {}}]),
    "shape": st.lists(_hostile_numbers, max_size=3) | json_values,
    "data_offsets": st.lists(_hostile_numbers, max_size=3) | json_values,
}


@st.composite
def files_with_a_wrong_field(draw: st.DrawFn) -> bytes:
    """A valid file in which one field of one tensor is replaced or removed; by chance it may be valid still."""
    document, data_bytes = draw(documents().filter(lambda drawn: any(name != "__metadata__" for name in drawn[0])))
    name = draw(st.sampled_from([name for name in document if name != "__metadata__"]))
    field = draw(st.sampled_from(sorted(_hostile_fields)))
    match draw(st.sampled_from(["replace", "nudge", "remove", "list", "whole"])):
        case "replace":
            document[name][field] = draw(_hostile_fields[field])
        case "nudge" if document[name]["shape"]:
            document[name]["shape"][-1] += draw(st.sampled_from([-1, 1]))
        case "remove":
            del document[name][field]
        case "list":
            document[name] = [document[name][key] for key in ("dtype", "shape", "data_offsets")]
        case _:
            document[name] = draw(json_values)
    return file_of(_dumps(draw, document), bytes(data_bytes))


@st.composite
def files_with_wrong_bytes(draw: st.DrawFn) -> bytes:
    """A valid file in which a few bytes, most often of the header, are replaced, removed or added."""
    content = bytearray(draw(valid_files()))
    (length,) = struct.unpack_from("<Q", content)
    # Each change moves the end of the header, unless `N` is to be wrong.
    keeps_length = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.integers(8 if keeps_length else 0, len(content)))
        count = draw(st.integers(0, 1))
        new = draw(
            st.binary(max_size=2) | st.sampled_from(list(b'"{}[],:\\0-1.e \n\xef')).map(lambda byte: bytes([byte]))
        )
        removed = len(content[where : where + count])
        content[where : where + count] = new
        if keeps_length and where < 8 + length:
            length += len(new) - removed
            struct.pack_into("<Q", content, 0, max(length, 0))
    return bytes(content)
