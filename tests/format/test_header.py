"""Headers, against the verdicts, the facts and the bytes of the reference, on crafted files and on random ones."""

import itertools
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import SafetensorError, TensorSpec

from orbax_safetensors.errors import HeaderError
from orbax_safetensors.format.dtypes import DTYPES, DType
from orbax_safetensors.format.header import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Header,
    TensorEntry,
    header_length,
)
from tests.support.crafted import (
    ACCEPTED,
    DUPLICATES_THE_REFERENCE_ACCEPTS,
    DUPLICATES_THE_REFERENCE_REJECTS,
    REJECTED,
    Crafted,
)
from tests.support.strategies import (
    examples,
    file_of,
    files_with_a_wrong_field,
    files_with_wrong_bytes,
    tensor_lists,
    texts,
    valid_files,
)

FILE = "model.safetensors"
U8 = DTYPES["U8"]
Tensors = list[tuple[str, DType, tuple[int, ...]]]


def parse(content: bytes) -> Header:
    """As a reader of a whole file does it."""
    length = header_length(content[:PREFIX_BYTES], len(content), file=FILE)
    return Header.parse(content[PREFIX_BYTES : PREFIX_BYTES + length], len(content), file=FILE)


def reference_accepts(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except SafetensorError:
        return False
    return True


def reference_opens(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        with safetensors.safe_open(path, "np") as opened:
            opened.keys()
    except SafetensorError:
        return False
    return True


def cases(table: dict[str, Crafted]) -> Callable[[Any], Any]:
    return pytest.mark.parametrize("crafted", table.values(), ids=table.keys())


def assert_same_facts(header: Header, content: bytes) -> None:
    """`header` says of the valid file `content` what the reference says, and puts the tensors' bytes where it does."""
    stored = dict(safetensors.deserialize(content))
    assert header.tensors.keys() == stored.keys()
    for name, entry in header.tensors.items():
        assert [entry.name, entry.dtype.name, list(entry.shape)] == [name, stored[name]["dtype"], stored[name]["shape"]]
        data = content[header.data_start + entry.begin : header.data_start + entry.end]
        assert (len(data), data) == (entry.nbytes, bytes(stored[name]["data"]))
    places = [(entry.begin, entry.end) for entry in header.tensors.values()]
    assert places == sorted(places)
    assert header.file_bytes == header.data_start + header.data_bytes == len(content)


# Verdicts on files.


@cases(REJECTED)
def test_rejected(crafted: Crafted, tmp_path: Path) -> None:
    with pytest.raises(HeaderError) as caught:
        parse(crafted.content)
    message = str(caught.value)
    assert message.startswith(f"{FILE}: ")
    assert "expected" in message
    assert "found" in message
    assert len(message) < 1000
    if crafted.tensor is not None:
        assert f"tensor '{crafted.tensor}'" in message
    assert not reference_accepts(crafted.content)
    assert not reference_opens(tmp_path / FILE, crafted.content)


@cases(ACCEPTED)
def test_accepted(crafted: Crafted, tmp_path: Path) -> None:
    assert_same_facts(parse(crafted.content), crafted.content)
    assert reference_opens(tmp_path / FILE, crafted.content)


@cases(DUPLICATES_THE_REFERENCE_ACCEPTS)
def test_stricter_than_the_reference_on_duplicate_keys(crafted: Crafted) -> None:
    assert reference_accepts(crafted.content)
    with pytest.raises(HeaderError, match="twice in one object"):
        parse(crafted.content)


@cases(DUPLICATES_THE_REFERENCE_REJECTS)
def test_duplicate_keys(crafted: Crafted) -> None:
    assert not reference_accepts(crafted.content)
    with pytest.raises(HeaderError, match="twice in one object"):
        parse(crafted.content)


@given(valid_files())
def test_valid_files_say_what_they_say_to_the_reference(content: bytes) -> None:
    assert_same_facts(parse(content), content)


@examples(300)
@given(st.one_of(files_with_a_wrong_field(), files_with_wrong_bytes()))
def test_same_verdict_on_almost_valid_files(content: bytes) -> None:
    try:
        header = parse(content)
    except HeaderError as error:
        assume("twice in one object" not in str(error))
        assert not reference_accepts(content)
    else:
        assert_same_facts(header, content)


@pytest.mark.parametrize(
    "shape", ["[]", "[1]", "[1,1]", "[1, 1]", "[ 1]", "[1 ,1]", "[01]", "[1,]", "[,1]", "[1 1]", "[1,,1]", "[,]", "[ ]"]
)
def test_same_verdict_on_a_spelling_between_usual_ones(shape: str) -> None:
    entry = '"{}":{{"dtype":"U8","shape":{},"data_offsets":[{},{}]}}'
    names = ["b", "\u00e9", "a\U0010ffff b", "\\\\u0062"]
    for comma, other in itertools.product([",", " ,", ", ", "\n,\t"], names):
        places = [("x", "[1]"), ("y", "[1]"), (other, shape), ("z", "[1]")]
        entries = [entry.format(name, size, at, at + 1) for at, (name, size) in enumerate(places)]
        content = file_of("{" + comma.join(entries) + "}", b"abcd")
        try:
            header = parse(content)
        except HeaderError:
            assert not reference_accepts(content)
        else:
            assert_same_facts(header, content)


def test_metadata_is_what_the_reference_reads(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(file_of('{"__metadata__":{"b":"é","a":"\\u0000"}}'))
    with safetensors.safe_open(path, "np") as opened:
        assert dict(parse(path.read_bytes()).metadata) == opened.metadata()


# The prefix.


@pytest.mark.parametrize(
    ("length", "fault"), [(MAX_HEADER_BYTES, "invalid header length"), (MAX_HEADER_BYTES + 1, "too large")]
)
def test_limit_of_the_header_is_the_reference_s(length: int, fault: str) -> None:
    # A file that ends after the prefix is wrong in any case, but the reference looks at the limit first.
    with pytest.raises(SafetensorError, match=fault):
        safetensors.deserialize(struct.pack("<Q", length))


def test_header_length_at_the_limit() -> None:
    at_limit, over_limit = (struct.pack("<Q", MAX_HEADER_BYTES + more) for more in (0, 1))
    assert header_length(at_limit, 8 + MAX_HEADER_BYTES, file=FILE) == MAX_HEADER_BYTES
    with pytest.raises(HeaderError, match="at most 100000000"):
        header_length(over_limit, 2**40, file=FILE)


def test_header_length_within_the_file() -> None:
    prefix = struct.pack("<Q", 10)
    assert header_length(prefix, 18, file=FILE) == 10
    with pytest.raises(HeaderError, match=f"^{FILE}: expected 18 bytes up to the data, found a file of 17$"):
        header_length(prefix, 17, file=FILE)


@pytest.mark.parametrize("file_nbytes", [7, 100])
def test_header_length_of_a_short_prefix(file_nbytes: int) -> None:
    with pytest.raises(HeaderError, match="at least 8 bytes, found 7"):
        header_length(bytes(7), file_nbytes, file=FILE)


# What cannot be built.


def entry(**changes: Any) -> TensorEntry:
    return TensorEntry(**{"name": "a", "dtype": U8, "shape": (2,), "begin": 0, "end": 2, **changes})


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (True, 2)},
        {"shape": (np.int64(2),)},
        {"shape": (2.0,)},
        {"shape": (-2,)},
        {"shape": (0, 2**64), "end": 0},
        {"shape": (3,)},
        {"begin": False},
        {"end": 2.0},
        {"begin": 1, "end": 3},
        {"shape": (2**61,), "end": 2**61},
        {"dtype": DTYPES["F4"], "shape": (3,), "end": 1},
        {"name": "b"},
    ],
    ids=str,
)
def test_an_invalid_entry_cannot_be_in_a_header(wrong: dict[str, Any]) -> None:
    assert Header({"a": entry()}, {}, 8).data_bytes == 2
    with pytest.raises(HeaderError, match=r"tensor 'a': .*expected .*found "):
        Header({"a": entry(**wrong)}, {}, 8)


@pytest.mark.parametrize("metadata", [{"k": 1}, {"k": None}, {1: "v"}, {"k": "\ud800"}, {"\udfff": ""}, []], ids=ascii)
def test_invalid_metadata_cannot_be_in_a_header(metadata: Any) -> None:
    with pytest.raises(HeaderError, match=r"^__metadata__: expected"):
        Header({}, metadata, 8)


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"], ids=ascii)
def test_a_name_that_no_header_can_hold(name: str) -> None:
    with pytest.raises(HeaderError, match=r"^tensor '"):
        Header({name: entry(name=name)}, {}, 8)
    with pytest.raises(HeaderError, match=r"^tensor '"):
        Header.layout([(name, U8, (1,))])


@pytest.mark.parametrize("data_start", [7, 8 + MAX_HEADER_BYTES + 1])
def test_a_size_that_no_header_has(data_start: int) -> None:
    with pytest.raises(HeaderError, match="expected a header of 0 to 100000000 bytes"):
        Header({}, {}, data_start)


def test_a_header_is_in_file_order_and_stays_as_it_was_checked() -> None:
    tensors = {"b": entry(name="b", begin=2, end=4), "a": entry(), "0": entry(name="0", shape=(0,), begin=2, end=2)}
    metadata = {"k": "v"}
    header = Header(tensors, metadata, 16)
    assert list(header.tensors) == ["a", "0", "b"]
    tensors.clear()
    metadata.clear()
    assert len(header.tensors) == 3
    assert dict(header.metadata) == {"k": "v"}
    with pytest.raises(TypeError):
        header.tensors["c"] = entry()  # type: ignore[index]


# Writing.


def reference_file(tensors: Tensors, metadata: dict[str, str] | None) -> bytes:
    """What the reference writes for these tensors, all of them zeros."""
    data = np.zeros(4096, np.uint8)
    specs = {}
    for name, dtype, shape in tensors:
        if dtype.numpy is None:  # the reference is given the shape in bytes, of two F4 each
            spelling, shape = "float4_e2m1fn_x2", (*shape[:-1], shape[-1] // 2)
        else:
            spelling = dtype.numpy.name
        nbytes = math.prod(shape) * max(dtype.bits, 8) // 8
        specs[name] = TensorSpec(dtype=spelling, shape=shape, data_ptr=data.ctypes.data, data_len=nbytes)
    return bytes(safetensors.serialize(specs, metadata))


def reference_can_write(tensors: Tensors) -> bool:
    return all(dtype.numpy is not None or (dtype.name == "F4" and shape[-1] % 2 == 0) for _, dtype, shape in tensors)


@given(
    tensor_lists.filter(reference_can_write),
    st.one_of(st.none(), st.tuples(texts, texts).map(lambda pair: dict([pair]))),
)
def test_encode_writes_the_bytes_of_the_reference(tensors: Tensors, metadata: dict[str, str] | None) -> None:
    header = Header.layout(tensors, metadata or {}, alignment=8)
    assert header.encoded + bytes(header.data_bytes) == reference_file(tensors, metadata)


@given(tensor_lists, st.none() | st.dictionaries(texts, texts, max_size=3), st.sampled_from([8, 24, 64, 4096]))
def test_a_header_comes_back_as_it_was_written(
    tensors: Tensors, metadata: dict[str, str] | None, alignment: int
) -> None:
    header = Header.layout(tensors, metadata, alignment=alignment)
    encoded = header.encoded
    assert len(encoded) == header.data_start
    assert header.data_start % alignment == 0
    assert len(encoded.rstrip(b" ")) > header.data_start - alignment
    content = encoded + bytes(header.data_bytes)
    back = parse(content)
    assert back == header
    assert list(back.tensors) == list(header.tensors)
    assert back.encoded == encoded
    assert_same_facts(header, content)


def test_wider_types_come_first_then_names_ascend() -> None:
    header = Header.layout([("b", U8, (3,)), ("é", DTYPES["I64"], ()), ("a", U8, (1,)), ("z", DTYPES["I64"], (0,))])
    assert [(entry.name, entry.begin, entry.end) for entry in header.tensors.values()] == [
        ("z", 0, 0),
        ("é", 0, 8),
        ("a", 8, 9),
        ("b", 9, 12),
    ]


def test_metadata_is_written_first_sorted_and_pt_by_default() -> None:
    tensors: Tensors = [("a", U8, ())]
    assert dict(Header.layout(tensors).metadata) == {"format": "pt"}
    encoded = Header.layout(tensors, {"z": "1", "a": "2"}).encoded
    assert encoded[8:].startswith(b'{"__metadata__":{"a":"2","z":"1"},"a":{')
    assert b"__metadata__" not in Header.layout(tensors, {}).encoded


@pytest.mark.parametrize("alignment", [0, -8, 4, 12])
def test_layout_refuses_an_alignment_that_files_cannot_have(alignment: int) -> None:
    with pytest.raises(HeaderError, match=f"found {alignment}$"):
        Header.layout([], alignment=alignment)


@pytest.mark.parametrize(
    "tensors",
    [
        [("a", U8, (1,)), ("a", U8, (2,))],
        [("a", DTYPES["F4"], (3,))],
        [("a", U8, (-1,))],
        [("a", U8, (2**63, 2))],
        [(name, U8, (2**60,)) for name in "abcdefghijklmnopq"],
    ],
    ids=["twice", "part of a byte", "negative", "overflow", "overflow of the sum"],
)
def test_layout_refuses_tensors_that_files_cannot_hold(tensors: Tensors) -> None:
    with pytest.raises(HeaderError, match=r"^tensor '"):
        Header.layout(tensors)


def test_encode_refuses_json_that_does_not_fit() -> None:
    with pytest.raises(HeaderError, match="expected JSON of at most 2 bytes"):
        _ = Header({"a": entry()}, {}, 10).encoded
