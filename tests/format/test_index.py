"""The index of a directory: what is taken, what is refused, and the bytes that are written."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.errors import IndexFileError
from orbax_safetensors.format.index import INDEX_SUFFIX, Index, check_file_name
from tests.support.strategies import texts

FILE = f"model{INDEX_SUFFIX}"
SHARD = "model-00001-of-00002.safetensors"

file_names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1).map("{}.safetensors".format)


def parse(document: Any) -> Index:
    return Index.parse(json.dumps(document).encode(), file=FILE)


def test_parse() -> None:
    index = parse(
        {
            "weight_map": {"b": "y.safetensors", "a": "x.safetensors", "c": "x.safetensors"},
            "metadata": {"total_size": 7},
        }
    )
    assert index.weight_map["c"] == "x.safetensors"
    assert index.files == ("x.safetensors", "y.safetensors")
    assert index.metadata == {"total_size": 7}


@pytest.mark.parametrize("metadata", [{}, {"total_size": 0}, {"total_size": 2**70}, {"total_size": 16e9, "x": []}])
def test_metadata(metadata: dict[str, Any]) -> None:
    assert parse({"weight_map": {}, "metadata": metadata}).metadata == metadata


def test_metadata_may_be_absent() -> None:
    index = parse({"weight_map": {"a": SHARD}, "other": 1})
    assert dict(index.metadata) == {}


@pytest.mark.parametrize("size", [1.5, -1, True, None, "7", [7]], ids=repr)
def test_total_size_may_be_anything(size: Any) -> None:
    """Nothing depends on it."""
    index = parse({"weight_map": {"a": SHARD}, "metadata": {"total_size": size}})
    assert (index.files, index.metadata) == ((SHARD,), {"total_size": size})


@pytest.mark.parametrize("metadata", [None, [], "7"], ids=repr)
def test_metadata_that_is_not_an_object_is_left_out(metadata: Any) -> None:
    assert parse({"weight_map": {"a": SHARD}, "metadata": metadata}) == parse({"weight_map": {"a": SHARD}})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map":null}',
        b'{"weight_map":[]}',
        b'{"weight_map":{"a":1}}',
        b'{"weight_map":{"a":["x.safetensors"]}}',
        b'{"weight_map":{"a":null}}',
        b'{"weight_map":{},"weight_map":{}}',
        b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}',
        b'{"weight_map":{},"metadata":{"total_size":1e999}}',
        b'{"weight_map":{},"metadata":{"total_size":NaN}}',
        b'{"weight_map":{},"metadata":{"total_size":%s}}' % (b"9" * 5000),
        b'{"weight_map":{}}x',
        b"\xef\xbb\xbf" + b'{"weight_map":{}}',
        b'{"weight_map":{"\xff":"x.safetensors"}}',
        b'{"weight_map":' + b"[" * 100_000,
    ],
    ids=lambda text: ascii(text[:60]),
)
def test_what_is_not_an_index(text: bytes) -> None:
    with pytest.raises(IndexFileError, match=f"(?s)^{FILE}: .*expected .*found"):
        Index.parse(text, file=FILE)


@pytest.mark.parametrize("name", [SHARD, "x.safetensors", "model (1) é.safetensors", "a.b-c_d~.safetensors"])
def test_plain_file_names(name: str) -> None:
    check_file_name(name, file=FILE)
    assert parse({"weight_map": {"a": name}}).files == (name,)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "x.bin",
        "x.SAFETENSORS",
        "x.safetensors ",
        ".safetensors",
        ".hidden.safetensors",
        "a/x.safetensors",
        "./x.safetensors",
        "../x.safetensors",
        "/x.safetensors",
        "a\\x.safetensors",
        "..\\x.safetensors",
        "x..safetensors",
        "C:x.safetensors",
        "gs://bucket/x.safetensors",
        "file:x.safetensors",
        "x\0.safetensors",
        "\ud800.safetensors",
        "line\nbreak.safetensors",
        "\x1b[31mred.safetensors",
        "\u202efdp.safetensors",
        "\u200bx.safetensors",
        "../" * 1000 + "x.safetensors",
    ],
    ids=lambda name: ascii(name[:40]),
)
def test_names_that_are_not_plain_file_names(name: str) -> None:
    with pytest.raises(IndexFileError, match=f"^{FILE}: expected one plain file name"):
        check_file_name(name, file=FILE)
    with pytest.raises(
        IndexFileError, match=f"^{FILE}: weight_map: tensor 'a': expected one plain file name"
    ) as caught:
        parse({"weight_map": {"z": SHARD, "a": name}})
    assert len(str(caught.value)) < 500


def test_an_invalid_index_cannot_be_built() -> None:
    with pytest.raises(IndexFileError, match="tensor 'a'"):
        Index({"a": "../x.safetensors"}, {})


def test_an_index_stays_as_it_was_checked() -> None:
    weight_map = {"a": SHARD}
    index = Index(weight_map, {})
    weight_map["b"] = "../x"
    assert dict(index.weight_map) == {"a": SHARD}


def test_encode_is_the_form_of_save_pretrained() -> None:
    index = Index({"b": SHARD, "é": SHARD}, {"total_size": 7, "k": [1]})
    assert index.encode() == (
        b'{\n  "metadata": {\n    "k": [\n      1\n    ],\n    "total_size": 7\n  },\n'
        b'  "weight_map": {\n    "b": "%s",\n    "\\u00e9": "%s"\n  }\n}\n' % (SHARD.encode(), SHARD.encode())
    )


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}], ids=["object", "nan", "set"])
def test_encode_refuses_metadata_that_is_not_json(value: object) -> None:
    with pytest.raises(IndexFileError, match=r"^metadata: "):
        Index({}, {"k": value}).encode()


@given(st.dictionaries(texts, file_names), st.none() | st.integers(0, 2**63))
def test_an_index_comes_back_as_it_was_written(weight_map: dict[str, str], size: int | None) -> None:
    index = Index(weight_map, {} if size is None else {"total_size": size})
    assert Index.parse(index.encode(), file=FILE) == index
