"""Which files there are, what they are called and where tensors lie in them."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.errors import HeaderError
from orbax_safetensors.format.dtypes import DTYPES, nbytes
from orbax_safetensors.format.header import Header
from orbax_safetensors.format.index import Index
from orbax_safetensors.format.layout import INDEX_NAME, lay_out
from orbax_safetensors.transfer.plan import locations
from tests.support.strategies import tensor_lists, texts


def lay_out_bytes(sizes, max_file_bytes):
    """Tensors of these sizes in bytes, called 0, 1, ...; what each file holds."""
    tensors = [(str(number), DTYPES["U8"], (size,)) for number, size in enumerate(sizes)]
    layout = lay_out(tensors, {}, max_file_bytes=max_file_bytes, alignment=8)
    return layout, [list(header.tensors) for _, header in layout.files]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([10], [["0"]]),
        ([4, 6], [["0", "1"]]),
        ([4, 7], [["0"], ["1"]]),
        ([4, 4, 4, 4, 4], [["0", "1"], ["2", "3"], ["4"]]),
        ([25], [["0"]]),
        ([1, 25, 1], [["0"], ["1"], ["2"]]),
        ([9, 2, 8], [["0"], ["1", "2"]]),
        ([0, 10, 0], [["0", "1", "2"]]),
        ([11, 0], [["0"], ["1"]]),
    ],
    ids=str,
)
def test_files_are_filled_one_after_the_other(sizes, expected):
    layout, found = lay_out_bytes(sizes, 10)
    assert found == expected
    names = [name for name, _ in layout.files]
    if len(expected) == 1:
        assert names == ["model.safetensors"]
        assert layout.index is None
    else:
        assert names == [f"model-{number:05}-of-{len(expected):05}.safetensors" for number in range(1, len(names) + 1)]
        assert layout.index.metadata["total_size"] == sum(sizes)


def test_the_index_has_hugging_faces_name():
    assert INDEX_NAME == "model.safetensors.index.json"


def test_the_order_in_a_file_is_the_references():
    tensors = [
        ("b", DTYPES["F32"], (1,)), ("a", DTYPES["BOOL"], (1,)), ("é", DTYPES["F32"], ()),
        ("Z", DTYPES["F32"], (2,)), ("i", DTYPES["I64"], ()), ("h", DTYPES["BF16"], (1,)),
    ]  # fmt: skip
    layout = lay_out(tensors, {}, max_file_bytes=100, alignment=8)
    assert list(layout.files[0][1].tensors) == ["i", "Z", "b", "é", "h", "a"]


@given(
    tensor_lists.filter(bool), st.dictionaries(texts, texts, max_size=2), st.integers(1, 200), st.sampled_from([8, 64])
)
def test_every_tensor_has_one_place(tensors, metadata, max_file_bytes, alignment):
    layout = lay_out(tensors, metadata, max_file_bytes=max_file_bytes, alignment=alignment)
    places = {name: (place.file, place.begin) for name, place in locations(layout).items()}
    assert sorted(places) == sorted(name for name, _, _ in tensors)
    # In the order that was given, from file to file.
    assert [places[name][0] for name, _, _ in tensors] == sorted(number for number, _ in places.values())
    sizes = {name: nbytes(dtype, shape) for name, dtype, shape in tensors}
    for number, (_, header) in enumerate(layout.files):
        assert header.data_bytes <= max_file_bytes or max(sizes[name] for name in header.tensors) == header.data_bytes
        assert header.data_start % alignment == 0
        assert header.metadata == metadata
        own = sorted((places[name][1], sizes[name]) for name in header.tensors)
        assert own[0][0] == header.data_start
        assert all(begin + size == after for (begin, size), (after, _) in pairwise(own))
        text = header.encoded[8:]
        assert Header.parse(text, header.file_bytes, file="x") == header
        assert all(places[name][0] == number for name in header.tensors)
    for (_, before), (_, after) in pairwise(layout.files):
        following = next(name for name, _, _ in tensors if name in after.tensors)
        assert before.data_bytes + sizes[following] > max_file_bytes
    if layout.index is not None:
        assert layout.index.weight_map == {name: layout.files[number][0] for name, (number, _) in places.items()}
        assert json.loads(layout.index.encode())["metadata"] == {"total_size": sum(sizes.values())}
        assert Index.parse(layout.index.encode(), file="x") == layout.index


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ([("a", DTYPES["U8"], (1,))] * 2, {}, "once, found it twice"),
        ([("__metadata__", DTYPES["U8"], (1,))], {}, "__metadata__"),
        ([("\ud800", DTYPES["U8"], (1,))], {}, "surrogate"),
        ([("a", DTYPES["U8"], (2**64,))], {}, "u64"),
        ([("a", DTYPES["U8"], (1,))], {"a": 1}, "expected text, found 1"),
        ([("a", DTYPES["U8"], (1,))], {1: "a"}, "expected text"),
        ([("a", DTYPES["U8"], (1,))], {"a": "\ud800"}, "surrogate"),
    ],
)
def test_what_no_header_can_say(tensors, metadata, message):
    with pytest.raises(HeaderError, match=message):
        lay_out(tensors, metadata, max_file_bytes=100, alignment=8)
