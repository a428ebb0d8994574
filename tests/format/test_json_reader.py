"""The reader of JSON that skips: the verdict of `json` on random texts, and little memory for what it skips."""

import json
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.format.json_reader import MAX_DEPTH, JsonReader

scalars = st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))
documents = st.recursive(
    scalars | texts, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3)
)


def skips(text: str) -> bool:
    try:
        reader = JsonReader(text.encode())
        reader.skip(1)
        reader.end()
    except ValueError:
        return False
    return True


def finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number


@given(documents, st.sampled_from([None, 1]), st.booleans())
def test_what_json_writes_is_skipped(document: object, indent: int | None, ascii_only: bool) -> None:
    assert skips(json.dumps(document, indent=indent, ensure_ascii=ascii_only))


@given(documents, st.data())
def test_same_verdict_as_json_on_texts_with_a_wrong_character(document: object, data: st.DataObject) -> None:
    text = json.dumps(document, ensure_ascii=False)  # no escaped surrogates, which are not for `json` to judge
    at = data.draw(st.integers(0, len(text)))
    wrong = text[:at] + data.draw(st.sampled_from(list(',:[]{}"\\ 0.-e'))) + text[at + data.draw(st.integers(0, 1)) :]
    has_duplicates: list[bool] = []
    try:
        json.loads(
            wrong,
            object_pairs_hook=lambda pairs: has_duplicates.append(len(dict(pairs)) < len(pairs)),
            parse_float=finite,
        )
    except ValueError:
        assert not skips(wrong)
    else:
        assert skips(wrong) != any(has_duplicates)


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_nesting_has_a_limit(brackets: str) -> None:
    opening = brackets[0] if brackets == "[]" else '{"":'
    closing = brackets[1]
    assert skips(opening * (MAX_DEPTH - 1) + brackets + closing * (MAX_DEPTH - 1))
    assert not skips(opening * MAX_DEPTH + brackets + closing * MAX_DEPTH)
    assert not skips(opening * 1_000_000)


@pytest.mark.memory
@pytest.mark.parametrize(
    "item",
    [
        "[]",
        "{}",
        "[[],[[]]]",
        "[ ]",
        '""',
        '"ab"',
        "0",
        "1.5",
        "-1e3",
        '{"a":1}',
        '{"a":[1,{"b":[]}]}',
        "[" * 6 + "]" * 6,
    ],
)
def test_what_is_skipped_takes_no_memory(item: str) -> None:
    text = f"[{','.join([item] * (400_000 // len(item)))}]"
    reader = JsonReader(text.encode())
    tracemalloc.start()
    try:
        reader.skip(1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    reader.end()
    assert peak < len(text) // 4  # with what a thread of pytest-xdist has received meanwhile


@pytest.mark.memory
def test_integers_take_a_small_multiple_of_their_text() -> None:
    text = f"[{','.join(['1000'] * 100_000)}]".encode()
    reader = JsonReader(text)
    tracemalloc.start()
    try:
        assert reader.integers() == (1000,) * 100_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * len(text)
