"""Quantised tensors against a plain decoder: what is asked of storage holds all that the boxes need, and is counted."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry import coalesce
from orbax_safetensors.geometry.coalesce import plan_encoded_reads
from orbax_safetensors.geometry.encoding import fields_apart
from orbax_safetensors.geometry.strided import Copy, Runs
from orbax_safetensors.geometry.view import View
from tests.support import quantized, views
from tests.support.quantized import needed, scaled
from tests.support.strategies import examples

F32, BF16, U8 = (DTYPES[name] for name in ("F32", "BF16", "U8"))
FLOAT32 = np.dtype(np.float32)


class Tensor:
    """A quantised tensor: its bytes, and all that it decodes to."""

    def __init__(self, encoding, rng):
        self.encoding = encoding
        (parameter,) = encoding.parameters
        elements = math.prod(encoding.shape)
        if encoding.bits == 8:
            self.codes = rng.integers(0, 0x7F, elements, np.uint8)
            values = self.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            self.codes = rng.integers(0, 256, elements // 2, np.uint8)
            nibbles = np.stack([self.codes & 15, self.codes >> 4], axis=-1).reshape(-1)
            values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        grid = (*encoding.shape[:-2], *parameter.grid)
        scales = rng.integers(1, 200, grid).astype(parameter.dtype.numpy)
        self.scales = scales.reshape(-1).view(np.uint8)
        factors = np.ldexp(np.float32(1), scales.astype(int) - 127) if parameter.dtype is U8 else scales
        (rows, columns), (height, width) = encoding.shape[-2:], parameter.block
        each = factors.astype(np.float32).repeat(height, -2)[..., :rows, :].repeat(width, -1)[..., :columns]
        self.decoded = values.reshape(encoding.shape) * each


def fp8(shape, block, scales=F32):
    return scaled(shape, 8, "F8_E4M3", scales, block)


def mxfp4(shape):
    return scaled(shape, 4, "F4", U8, (1, 32))


@st.composite
def encodings(draw):
    leading = tuple(draw(st.lists(st.integers(1, 3), max_size=1)))
    if draw(st.booleans()):
        columns = 32 * draw(st.integers(1, 3))
        return mxfp4((*leading, draw(st.integers(1, 6)), columns))
    rows, columns = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    block = draw(
        st.sampled_from([(rows, columns), (1, columns), (rows, 1)]) | st.tuples(st.integers(1, 5), st.integers(1, 5))
    )
    return fp8((*leading, rows, columns), block, draw(st.sampled_from([F32, BF16])))


@examples(200)
@given(st.data(), st.sampled_from([0, 1, 4, 16, 1000]), st.sampled_from([256, 1024, 2**20]))
def test_boxes_of_views_are_those_of_the_decoded_array(data, max_gap_bytes, staged_bytes):
    tensor = Tensor(data.draw(encodings()), np.random.default_rng(data.draw(st.integers(0, 3))))
    copies, destinations, expected = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        view = View.tensor("t", tensor.encoding.shape, FLOAT32)
        view, array = data.draw(views.seen(view, tensor.decoded))
        box = data.draw(views.boxes(array.shape))
        shape = [stop - start for start, stop in box]
        destination = np.full(shape, np.nan, np.float32)
        taken = view.copies(box, shape)
        copies += [copy for _, copy, _ in taken]
        destinations += [destination] * len(taken)
        if taken:
            expected.append((destination, array[tuple(slice(start, stop) for start, stop in box)]))
    if not copies:
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(coalesce, "MAX_STAGED_BYTES", staged_bytes)
        plan = plan_encoded_reads.__wrapped__(tuple((copy, False) for copy in copies), tensor.encoding, max_gap_bytes)
    asked = quantized.execute(plan, tensor.codes, [tensor.scales], destinations)
    for destination, array in expected:
        np.testing.assert_array_equal(destination, array)
    quantized.check_counts(plan, asked, tensor.encoding, copies, staged_bytes)


def copies_of(tensor, *wanted):
    view = View.tensor("t", tensor.encoding.shape, FLOAT32)
    return [copy for box in wanted for _, copy, _ in view.copies(box, [stop - start for start, stop in box])]


def plan_of(tensor, *wanted, max_gap_bytes=0):
    return plan_encoded_reads(
        tuple((copy, False) for copy in copies_of(tensor, *wanted)), tensor.encoding, max_gap_bytes
    )


@examples(200)
@given(st.data())
def test_a_box_needs_its_units_and_their_scales_and_nothing_else_is_read(data):
    tensor = Tensor(data.draw(encodings()), np.random.default_rng(0))
    box = data.draw(views.boxes(tensor.encoding.shape))
    copies = copies_of(tensor, box)
    if copies:
        plan = plan_of(tensor, box)
        assert plan.needed_bytes == plan.read_bytes == needed(tensor.encoding, copies)


@examples(200)
@given(st.data(), st.integers(1, 6), st.integers(1, 3), st.sampled_from([128, 1024]))
def test_windows_of_six_bit_codes_begin_and_end_with_whole_bytes(data, rows, groups, staged_bytes):
    encoding = scaled((rows, 32 * groups), 6, "F6_E3M2", U8, (1, 32))
    box = data.draw(views.boxes(encoding.shape))
    copies = [copy for _, copy, _ in View.tensor("t", encoding.shape, FLOAT32).copies(box, [b - a for a, b in box])]
    if not copies:
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(coalesce, "MAX_STAGED_BYTES", staged_bytes)
        plan = plan_encoded_reads.__wrapped__(tuple((copy, False) for copy in copies), encoding, 0)
    assert plan.needed_bytes == needed(encoding, copies)
    elements = []
    for access in plan.windowed:
        for low in range(0, access.runs.nbytes, access.pitch):
            high = min(low + access.pitch, access.runs.nbytes)
            window = [
                row * encoding.shape[-1] + column
                for area in encoding.areas(access.runs, low, high)
                for row in area.rows.tolist()
                for stretch in area.columns
                for column in range(*stretch)
            ]
            assert encoding.bytes_of(len(window)) == high - low
            elements += window
    wanted = {unit * 32 + at for copy in copies for unit in quantized.every_source(copy) // 32 for at in range(32)}
    assert sorted(elements) == sorted(wanted)


def tensor_of(encoding):
    return Tensor(encoding, np.random.default_rng(0))


def test_rows_of_blocks_are_read_in_one_request_for_each_tensor():
    tensor = tensor_of(fp8((512, 384), (128, 128)))
    plan = plan_of(tensor, ((128, 256), (0, 384)))
    (access,) = plan.windowed
    assert (access.runs.begin, access.runs.length, access.runs.modes) == (128 * 384, 128 * 384, ())
    (area,) = access.encoding.areas(access.runs, 0, 128 * 384)
    assert (area.rows[0], area.rows[-1], area.columns) == (128, 255, ((0, 384),))
    (patch,) = (access.shared | access.patches([area])).values()
    assert patch.ranges == ((3 * 4, 3 * 4),)
    assert plan.num_requests == 2


def test_the_scales_that_many_rows_share_are_read_once_for_a_window():
    tensor = tensor_of(fp8((512, 384), (128, 128)))
    plan = plan_of(tensor, ((0, 512), (128, 256)))
    assert plan.num_requests == 512 + 4
    assert plan.read_bytes == plan.needed_bytes == 512 * 128 + 4 * 4
    # Gaps of 8 bytes between the scales of the four rows of blocks are read, those of 256 between codes are not.
    nearer = plan_of(tensor, ((0, 512), (128, 256)), max_gap_bytes=8)
    assert nearer.num_requests == 512 + 1
    assert nearer.read_bytes == 512 * 128 + 10 * 4


def test_shards_that_cut_units_share_them():
    """Two shards of 48 columns of 32 to a unit: the unit in the middle is needed by both and read once."""
    tensor = tensor_of(mxfp4((4, 96)))
    plan = plan_of(tensor, ((0, 4), (0, 48)), ((0, 4), (48, 96)))
    (access,) = plan.windowed
    assert len(access.uses) == 2
    assert plan.needed_bytes == plan.read_bytes == 4 * 3 * (16 + 1)
    assert plan.num_requests == 2


def test_large_tensors_are_planned_without_decoding_them_in_one_piece():
    tensor_shape = (18432, 7168)
    encoding = fp8(tensor_shape, (128, 128))
    copy = View.tensor("t", tensor_shape, FLOAT32).transpose().copies(((0, 7168), (0, 18432)), (7168, 18432))[0].copy
    plan = plan_encoded_reads(((copy, False),), encoding, 0)
    (access,) = plan.windowed
    assert access.pitch % 7168 == 0
    assert access.pitch == coalesce._TRANSPOSED_ROWS * 7168  # runs of the destination are long
    assert plan.window_bytes < 1.3 * coalesce._TALLEST * coalesce.MAX_STAGED_BYTES
    assert plan.needed_bytes == 18432 * 7168 + 144 * 56 * 4


@given(columns=st.integers(1, 12), begin=st.integers(0, 40), length=st.integers(1, 60))
def test_areas_of_one_range_have_all_of_its_elements_in_order(columns, begin, length):
    encoding = fp8((100, columns), (1, columns))
    areas = list(encoding.areas(Runs(begin, length, ()), 0, length))
    elements = [
        int(row) * columns + column
        for area in areas
        for row in area.rows
        for stretch in area.columns
        for column in range(*stretch)
    ]
    assert elements == list(range(begin, begin + length))
    assert len(areas) <= 3


def read(copy, source):
    """The elements that a copy reads, in the order of its modes."""
    at = np.array(copy.source)
    for size, stride, _ in copy.modes:
        at = np.add.outer(at, np.arange(size) * stride)
    return source[at.reshape(-1)]


@st.composite
def copies_of_words(draw, rows, width, fields):
    """A box of rows, words and fields, in any order, as a copy from `rows` of `width` words."""
    modes, source = [], 0
    for size, stride in ((rows, width * fields), (width, fields), (fields, 1)):
        first = draw(st.integers(0, size - 1))
        step = draw(st.integers(1, size))
        count = draw(st.integers(1, (size - 1 - first) // step + 1))
        source += first * stride
        modes += [(count, step * stride)] if count > 1 else []
    return Copy(source, 0, tuple([(size, stride, 1) for size, stride in draw(st.permutations(modes))]))


@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.sampled_from([4, 8]))
def test_copies_from_fields_that_lie_apart_read_the_same(data, rows, width, fields):
    copy = data.draw(copies_of_words(rows, width, fields))
    elements = np.arange(rows * width * fields)
    apart = fields_apart(copy, fields, width)
    assert apart is not None
    by_field = elements.reshape(rows, width, fields).swapaxes(1, 2).reshape(-1)
    assert read(apart, by_field).tolist() == read(copy, elements).tolist()


@pytest.mark.parametrize("modes", [((9, 1, 1),), ((6, 8, 1),)], ids=["from word to word", "from row to row"])
def test_copies_over_the_ends_of_words_or_rows_have_no_fields_apart(modes):
    assert fields_apart(Copy(0, 0, modes), 8, 5) is None
