"""What is read for a box that a device decodes: each byte that it needs, once, and words that find their elements."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry.code_box import Decoding, decoding_of, group_order
from orbax_safetensors.geometry.encoding import Encoding, Order, Parameter, Role
from tests.support.device_decoding import copies_of_codes, view_of
from tests.support.quantized import every_source, scaled
from tests.support.strategies import examples

F32, F16, U8, I32 = (DTYPES[name] for name in ("F32", "F16", "U8", "I32"))


def packed(runs):
    """The offset of each byte, in the order in which they are packed."""
    return np.concatenate([np.arange(begin, begin + length) for begin, length in runs.pieces(0, runs.nbytes)])


def words_of(encoding, parameter, elements):
    """The number of the word that each element finds its entry in, and of the entry in it."""
    rows, columns = encoding.shape[-2:]
    (height, width), (down, across), (high, wide) = parameter.block, parameter.per_word, parameter.words
    row, column = elements // columns % rows // height, elements % columns // width
    word = (elements // columns // rows * high + row // down) * wide + column // across
    return word, row % down + column % across


def found_words(spread):
    """For each element, the packed number of its word, and of the entry in it, by the definition of a spread."""
    outer, row, _, column = np.indices((spread.outer, spread.rows.size, spread.inner, spread.columns.size)).reshape(
        4, -1
    )
    places = []
    for span, at in ((spread.rows, row), (spread.columns, column)):
        places.append(span.start + at * span.step)
    blocks = [place // span.block for place, span in zip(places, (spread.rows, spread.columns), strict=True)]
    word = (outer * spread.rows.blocks + blocks[0]) * spread.columns.blocks + blocks[1]
    entry = np.zeros_like(word)
    for place, span, count in zip(places, (spread.rows, spread.columns), spread.parameter.per_word, strict=True):
        entry += place // (span.block // count) % count if count > 1 else 0
    return word, entry


def grids(encoding_shape, block):
    return -(-encoding_shape[-2] // block[0]), -(-encoding_shape[-1] // block[1])


@st.composite
def encodings(draw):
    """Codes with scales and zero points for blocks of any size, the zero points in words of a row or of a column."""
    leading = draw(st.sampled_from([(), (), (3,)]))
    shape = (*leading, draw(st.sampled_from([1, 5, 24, 36, 48, 96])), 8 * draw(st.integers(1, 5)))
    blocks = st.tuples(st.sampled_from([1, 1, 2, 3, 4, 6, 8, 12, 24, 96]), st.sampled_from([1, 2, 8, 12, 40]))
    scales, zeros = draw(blocks), draw(blocks)
    order = draw(st.sampled_from([Order.LOW_FIRST, Order.EVEN_FIRST]))
    parameters = (
        Parameter(Role.SCALE, draw(st.sampled_from([F32, F16, U8])), grids(shape, scales), scales),
        Parameter(Role.ZERO, I32, grids(shape, zeros), zeros, 4, order, draw(st.booleans())),
    )
    return Encoding(shape, draw(st.sampled_from([4, 8])), "unsigned4", parameters)


@examples(1000)
@given(data=st.data())
def test_words_are_for_the_elements_of_the_box_and_no_byte_is_read_in_vain(data):
    encoding = data.draw(encodings())
    copy = data.draw(copies_of_codes(encoding))
    known = decoding_of(copy, encoding)
    event("on the host: " + known if isinstance(known, str) else "on the device")
    if isinstance(known, str):
        return
    decoding, (codes, *parameters) = known
    elements = np.sort(every_source(copy))
    assert decoding.rows * decoding.width == elements.size
    taken = elements * encoding.bits // 8
    np.testing.assert_array_equal(packed(codes), taken if encoding.bits == 8 else np.unique(taken))
    for spread, runs in zip(decoding.parameters, parameters, strict=True):
        size = spread.parameter.word_bytes
        held = packed(runs)[::size] // size
        words, entries = words_of(encoding, spread.parameter, elements)
        np.testing.assert_array_equal(held, np.unique(words))
        assert runs.nbytes == held.size * size
        word, entry = found_words(spread)
        np.testing.assert_array_equal(held[word], words)
        if spread.parameter.bits:
            np.testing.assert_array_equal(entry, entries)
    for (shape, dtype), runs in zip(decoding.inputs, (codes, *parameters), strict=True):
        assert math.prod(shape) * dtype.itemsize == runs.nbytes


FP8 = scaled((2, 512, 768), 8, "F8_E4M3", F32, (128, 128))
INT4 = scaled((512, 768), 4, "offset4", F16, (1, 128))
GPTQ = Encoding(
    (64, 256 * 8),
    4,
    "unsigned4",
    (
        Parameter(Role.SCALE, F16, (4, 256), (16, 8)),
        Parameter(Role.ZERO, I32, (4, 256), (16, 8), 4),
        Parameter(Role.GROUP, I32, (64, 8), (1, 0)),
    ),
    rows_in_word=8,
)
ASYMMETRIC = Encoding(
    (512, 768),
    4,
    "unsigned4",
    (
        Parameter(Role.SCALE, F16, (512, 6), (1, 128)),
        Parameter(Role.ZERO, I32, (512, 6), (1, 128), 4, down=True),
    ),
)
AWQ = Encoding(
    (512, 256),
    4,
    "unsigned4",
    (
        Parameter(Role.SCALE, F16, (4, 256), (128, 1)),
        Parameter(Role.ZERO, I32, (4, 256), (128, 1), 4, Order.EVEN_FIRST),
    ),
    Order.EVEN_FIRST,
)

MXFP8 = scaled((2, 512, 768), 8, "F8_E4M3", U8, (1, 32))
THREES = Encoding(
    (48, 96),
    4,
    "unsigned4",
    (
        Parameter(Role.SCALE, F16, (48, 1), (1, 96)),
        Parameter(Role.ZERO, I32, (16, 1), (3, 96), 4, down=True),
    ),
)


def shards(encoding, parts):
    """The copies of all shards of a tensor that is cut into so many parts along each axis of its codes."""
    view = view_of(encoding)
    lengths = [size // count for size, count in zip(encoding.shape, parts, strict=True)]
    for at in np.ndindex(*parts):
        box = tuple((n * length, (n + 1) * length) for n, length in zip(at, lengths, strict=True))
        (cut,) = view.cuts(box, lengths)
        yield cut.copy


@pytest.mark.parametrize(
    ("encoding", "parts"),
    [
        (FP8, (2, 1, 1)),
        (FP8, (1, 4, 1)),
        (FP8, (1, 8, 1)),  # two shards to a block
        (FP8, (1, 1, 6)),
        (FP8, (2, 2, 12)),
        (INT4, (8, 6)),
        (ASYMMETRIC, (64, 3)),
        (AWQ, (8, 32)),
        (GPTQ, (8, 32)),
    ],
)
def test_one_decoding_serves_all_shards(encoding, parts):
    decodings, reads = zip(*[decoding_of(copy, encoding) for copy in shards(encoding, parts)], strict=True)
    assert len({*decodings}) == 1
    assert sum(codes.nbytes for codes, *_ in reads) == encoding.nbytes


ACROSS = "rows and columns that lie across blocks"


def rows_of(encoding, taken, shape=None, *slices):
    """Some rows of each matrix, perhaps in a shape of which some are taken."""
    view = view_of(encoding).slice(slice(0, 2), taken)
    if shape:
        view = view.reshape((2, *shape, view.shape[-1])).slice(slice(0, 2), *slices)
    return view


def reason(encoding, view):
    (cut,) = view.cuts(tuple((0, size) for size in view.shape), view.shape)
    known = decoding_of(cut.copy, encoding)
    return known if isinstance(known, str) else known[0]


@pytest.mark.parametrize(
    ("encoding", "view", "wanted"),
    [
        (INT4, view_of(INT4).slice(slice(0, 4), slice(1, 5)), "a shard that cuts through words"),
        (GPTQ, view_of(GPTQ).slice(slice(0, 4), slice(0, 4)), "a shard that cuts through words"),
        (AWQ, view_of(AWQ).slice(slice(0, 4), slice(2, 10)), "a shard that cuts through words"),
        (INT4, view_of(INT4).slice(slice(0, 4), slice(0, 768, 2)), "columns that are not neighbours"),
        (INT4, view_of(INT4).reshape((512 * 768,)).slice(slice(700, 800)), "elements that run over the ends of rows"),
        (
            INT4,
            view_of(INT4).reshape((512 * 768,)).slice(slice(700, 700 + 768)),
            "elements that run over the ends of rows",
        ),
        (INT4, view_of(INT4).reshape((512 * 768,)).slice(slice(0, 1000)), "elements that run over the ends of rows"),
        (FP8, rows_of(FP8, slice(0, 512, 3)), ACROSS),
        (FP8, rows_of(FP8, slice(0, 512), (8, 64), slice(1, 8, 3)), ACROSS),
        # Where 40, 10 or 100 rows of every 64 or 128 begin, some of them are in another block of 128 than the others.
        (FP8, rows_of(FP8, slice(100, 228), (2, 64), slice(0, 2), slice(0, 40)), ACROSS),
        (FP8, rows_of(FP8, slice(60, 316), (4, 64), slice(0, 4), slice(0, 10)), ACROSS),
        (FP8, rows_of(FP8, slice(100, 356), (2, 128), slice(0, 2), slice(0, 100)), ACROSS),
        # Every third row of all matrices: the rows of the second matrix are others than those of the first.
        (MXFP8, view_of(MXFP8).reshape((1024, 768)).slice(slice(0, 1020, 3)), ACROSS),
        # Two rows of every eight, if three share a zero point.
        (THREES, view_of(THREES).reshape((6, 8, 96)).slice(slice(0, 6), slice(0, 2)), ACROSS),
    ],
)
def test_what_the_host_decodes_has_a_reason(encoding, view, wanted):
    assert reason(encoding, view) == wanted


def with_parameters(encoding, *parameters):
    return Encoding(encoding.shape, encoding.bits, encoding.values, parameters)


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        (
            (Parameter(Role.SCALE, F16, (512, 6), (1, 0)), Parameter(Role.GROUP, I32, (1, 768), (512, 1))),
            "group index of act-order",
        ),
        (
            (Parameter(Role.SCALE, F32, (512, 1), (1, 768)), Parameter(Role.VALUES, F32, (1, 16), (512, 0))),
            "blocks that run over the ends of rows",
        ),
        ((), "codes without scales"),
        (
            (Parameter(Role.SCALE, F32, (512, 6), (1, 128)), Parameter(Role.BIAS, F32, (512, 6), (1, 128))),
            "products that are rounded before a sum",
        ),
        (
            (
                Parameter(Role.SCALE, F16, (512, 6), (1, 128)),
                Parameter(Role.FACTOR, F32, (1, 1), (512, 768), divided=2),
            ),
            "scales that are divided",
        ),
        (
            (Parameter(Role.SCALE, F16, (512, 6), (1, 128)), Parameter(Role.FACTOR, F32, (1, 1), (512, 768))),
            "second scales of several matrices",
        ),
    ],
)
def test_formats_that_the_host_decodes(parameters, wanted):
    encoding = with_parameters(INT4, *parameters)
    if "several" in wanted:
        encoding = replace(encoding, shape=(2, *encoding.shape))
    assert reason(encoding, view_of(encoding)) == wanted


@pytest.mark.parametrize(
    "view",
    [
        view_of(FP8).slice(slice(1, 2)).transpose((0, 2, 1)),
        view_of(FP8).slice(slice(0, 2), slice(0, 512, 2)),
        view_of(FP8).slice(slice(0, 2), slice(1, 512, 4), slice(3, 700)),
        view_of(FP8).reshape((2, 4, 2, 64, 768)).transpose((0, 2, 1, 3, 4)),
        view_of(FP8).reshape((2, 8, 64, 768)).slice(slice(0, 2), slice(1, 8, 2)),
        view_of(FP8).slice(slice(0, 2), slice(5, 6)),
        view_of(FP8).slice(slice(1, 2), slice(100, 300), slice(100, 101)),
    ],
)
def test_rows_of_many_orders_are_decoded_by_devices(view):
    assert isinstance(reason(FP8, view), Decoding)


def test_a_group_index_is_checked_where_the_box_is():
    for copy in shards(GPTQ, (4, 2)):
        runs, groups = group_order(copy, GPTQ)
        rows = packed(runs)[::4] // 4 // 8
        np.testing.assert_array_equal(groups, rows // 16)
        assert groups.dtype == np.int32
        assert rows.size == 64 // 4 * 8
    assert group_order(next(shards(AWQ, (1, 1))), AWQ) is None
