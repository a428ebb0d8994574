"""JSON of strangers: the verdict of `json`, and what is refused beyond it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.format.strict_json import parse

scalars = st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))
documents = st.recursive(
    scalars | texts, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3)
)


@given(documents, st.sampled_from([None, 1]), st.booleans())
def test_what_json_writes_comes_back(document: Any, indent: int | None, ascii_only: bool) -> None:
    assert parse(json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()) == document


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", r"'' at character 0"),
        (b"[1,]", r"at character [23]"),
        (b"{} {}", r"'{}' at character 3"),
        (b"\xef\xbb\xbf{}", "character 0"),
        (b"\xff", "invalid start byte"),
        (b'{"a":[{"b":1,"c":2,"b":1}]}', "'b' twice in one object"),
        (b"NaN", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"1e999", "a number out of the range of a double: 1e999"),
        (b"9" * 400, "out of the range"),
        (b"9" * 5000, "out of the range"),
        (b"[" * 50_000, "too many levels"),
        (b"[" + b"[],[]," * 20_000 + b"1]", "40001$"),
        (b"[" + b"{}," * 40_000 + b"1]", "40001$"),
    ],
)
def test_what_is_refused(text: bytes, found: str) -> None:
    with pytest.raises(ValueError, match=rf"^expected .*JSON.* found.*{found}") as caught:
        parse(text)
    assert len(str(caught.value)) < 300


def test_integers_of_the_reference_are_integers() -> None:
    largest = 2**64 - 1
    values = parse(f"[{largest},{largest}0,-0]".encode())
    assert values == [largest, largest * 10.0, 0]
    assert list(map(type, values)) == [int, float, float]
