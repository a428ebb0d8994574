"""Quantised tensors against a plain decoder: what is asked of storage holds all that the boxes need, and is counted."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry import coalesce
from orbax_safetensors.geometry.coalesce import gather_encoded
from orbax_safetensors.geometry.encoding import Encoding
from orbax_safetensors.geometry.view import View
from tests.support import quantized, views
from tests.support.strategies import examples

F8, F4, F32, BF16, U8 = (DTYPES[name] for name in ("F8_E4M3", "F4", "F32", "BF16", "U8"))
FLOAT32 = np.dtype(np.float32)


class Tensor:
    """A quantised tensor: its bytes, and all that it decodes to."""

    def __init__(self, encoding, rng):
        self.encoding = encoding
        elements = math.prod(encoding.shape)
        if encoding.codes is F8:
            self.codes = rng.integers(0, 0x7F, elements, np.uint8)
            values = self.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            self.codes = rng.integers(0, 256, elements // 2, np.uint8)
            nibbles = np.stack([self.codes & 15, self.codes >> 4], axis=-1).reshape(-1)
            values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        grid = (*encoding.shape[:-2], *encoding.grid)
        scales = rng.integers(1, 200, grid).astype(encoding.scales.numpy)
        self.scales = scales.reshape(-1).view(np.uint8)
        factors = np.ldexp(np.float32(1), scales.astype(int) - 127) if encoding.scales is U8 else scales
        (rows, columns), (height, width) = encoding.shape[-2:], encoding.block
        each = factors.astype(np.float32).repeat(height, -2)[..., :rows, :].repeat(width, -1)[..., :columns]
        self.decoded = values.reshape(encoding.shape) * each

    def scale_at(self, element):
        *matrix, row, column = np.unravel_index(element, self.encoding.shape)
        (height, width), grid = self.encoding.block, self.encoding.grid
        return int(np.ravel_multi_index((*matrix, row // height, column // width), (*self.encoding.shape[:-2], *grid)))


@st.composite
def encodings(draw):
    leading = tuple(draw(st.lists(st.integers(1, 3), max_size=1)))
    if draw(st.booleans()):
        columns = 32 * draw(st.integers(1, 3))
        return Encoding((*leading, draw(st.integers(1, 6)), columns), (1, 32), F4, U8)
    rows, columns = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    block = draw(
        st.sampled_from([(rows, columns), (1, columns), (rows, 1)]) | st.tuples(st.integers(1, 5), st.integers(1, 5))
    )
    return Encoding((*leading, rows, columns), block, F8, draw(st.sampled_from([F32, BF16])))


@st.composite
def seen(draw, tensor):
    """A view of the decoded tensor and the same of the array."""
    view, array = View.tensor("t", tensor.encoding.shape, FLOAT32), tensor.decoded
    for word in draw(st.lists(st.sampled_from(["transpose", "reshape", "slice"]), max_size=4)):
        if word == "transpose":
            axes = draw(st.permutations(range(array.ndim)))
            view, array = view.transpose(axes), array.transpose(axes)
        elif word == "reshape" and array.size:
            shape = views._factors(draw, array.size)
            try:
                view, array = view.reshape(shape), array.reshape(shape)
            except MappingError:
                continue
        elif word == "slice":
            taken = []
            for size in array.shape[: draw(st.integers(0, array.ndim))]:
                start, stop = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
                taken.append(slice(start, stop, draw(st.sampled_from([1, 2, 3]))))
            view, array = view.slice(*taken), array[tuple(taken)]
    return view, array


@examples(600)
@given(st.data(), st.sampled_from([0, 1, 4, 16, 1000]), st.sampled_from([256, 1024, 2**20]))
def test_boxes_of_views_are_those_of_the_decoded_array(data, max_gap_bytes, staged_bytes):
    tensor = Tensor(data.draw(encodings()), np.random.default_rng(data.draw(st.integers(0, 3))))
    copies, destinations, expected = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        view, array = data.draw(seen(tensor))
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
        gathered = gather_encoded.__wrapped__(tuple((copy, False) for copy in copies), tensor.encoding, max_gap_bytes)
    asked = quantized.execute(gathered, tensor.codes, tensor.scales, destinations)
    for destination, array in expected:
        np.testing.assert_array_equal(destination, array)
    assert not gathered.ranges
    assert gathered.read_bytes == sum(length for _, length in (*asked.codes, *asked.scales))
    assert gathered.num_requests == len(asked.codes) + len(asked.scales)
    assert gathered.window_bytes == max(asked.memory)
    longest = coalesce._TALLEST * staged_bytes
    assert all(access.pitch * 4 * access.encoding.elements_per_byte <= longest for access in gathered.windowed)
    codes = [begin + at for begin, length in asked.codes for at in range(length)]
    assert len(codes) == len(set(codes))
    assert gathered.needed_bytes <= gathered.read_bytes
    assert needed(tensor, copies) <= gathered.needed_bytes


def needed(tensor, copies):
    """Bytes of all units and scales that some element is in, one element after the other."""
    elements = {element for copy in copies for element in every_source(copy)}
    unit, per_byte = tensor.encoding.unit, tensor.encoding.elements_per_byte
    units = {element // unit for element in elements}
    scales = {tensor.scale_at(element) for element in elements}
    return len(units) * unit // per_byte + len(scales) * tensor.encoding.scale_bytes


def every_source(copy):
    out = np.array([copy.source])
    for size, stride, _ in copy.modes:
        out = (out[:, None] + np.arange(size) * stride).reshape(-1)
    return out.tolist()


def copies_of(tensor, *wanted):
    view = View.tensor("t", tensor.encoding.shape, FLOAT32)
    return [copy for box in wanted for _, copy, _ in view.copies(box, [stop - start for start, stop in box])]


def gathered_of(tensor, *wanted, max_gap_bytes=0):
    return gather_encoded(tuple((copy, False) for copy in copies_of(tensor, *wanted)), tensor.encoding, max_gap_bytes)


@examples(200)
@given(st.data())
def test_a_box_needs_its_units_and_their_scales_and_nothing_else_is_read(data):
    tensor = Tensor(data.draw(encodings()), np.random.default_rng(0))
    box = data.draw(views.boxes(tensor.encoding.shape))
    copies = copies_of(tensor, box)
    if copies:
        gathered = gathered_of(tensor, box)
        assert gathered.needed_bytes == gathered.read_bytes == needed(tensor, copies)


def tensor_of(shape, block, codes=F8, scales=F32):
    return Tensor(Encoding(shape, block, codes, scales), np.random.default_rng(0))


def test_rows_of_blocks_are_read_in_one_request_for_each_tensor():
    tensor = tensor_of((512, 384), (128, 128))
    gathered = gathered_of(tensor, ((128, 256), (0, 384)))
    (access,) = gathered.windowed
    assert (access.runs.begin, access.runs.length, access.runs.modes) == (128 * 384, 128 * 384, ())
    assert access.scales(0, 128 * 384).ranges == ((3 * 4, 3 * 4),)
    assert gathered.num_requests == 2


def test_the_scales_that_many_rows_share_are_read_once_for_a_window():
    tensor = tensor_of((512, 384), (128, 128))
    gathered = gathered_of(tensor, ((0, 512), (128, 256)))
    assert gathered.num_requests == 512 + 4
    assert gathered.read_bytes == gathered.needed_bytes == 512 * 128 + 4 * 4
    # Gaps of 8 bytes between the scales of the four rows of blocks are read, those of 256 between codes are not.
    nearer = gathered_of(tensor, ((0, 512), (128, 256)), max_gap_bytes=8)
    assert nearer.num_requests == 512 + 1
    assert nearer.read_bytes == 512 * 128 + 10 * 4


def test_shards_that_cut_units_share_them():
    """Two shards of 48 columns of 32 to a unit: the unit in the middle is needed by both and read once."""
    tensor = tensor_of((4, 96), (1, 32), F4, U8)
    gathered = gathered_of(tensor, ((0, 4), (0, 48)), ((0, 4), (48, 96)))
    (access,) = gathered.windowed
    assert len(access.uses) == 2
    assert gathered.needed_bytes == gathered.read_bytes == 4 * 3 * (16 + 1)
    assert gathered.num_requests == 2


def test_large_tensors_are_planned_without_decoding_them_in_one_piece():
    tensor_shape = (18432, 7168)
    encoding = Encoding(tensor_shape, (128, 128), F8, F32)
    copy = View.tensor("t", tensor_shape, FLOAT32).transpose().copies(((0, 7168), (0, 18432)), (7168, 18432))[0].copy
    gathered = gather_encoded(((copy, False),), encoding, 0)
    (access,) = gathered.windowed
    assert access.pitch % 7168 == 0
    assert access.pitch == coalesce._TRANSPOSED_ROWS * 7168  # runs of the destination are long
    assert gathered.window_bytes < 1.3 * coalesce._TALLEST * coalesce.MAX_STAGED_BYTES
    assert gathered.needed_bytes == 18432 * 7168 + 144 * 56 * 4
