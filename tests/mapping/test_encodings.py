"""Random tensors of every format, seen through random views, beside the values that their formulas give."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.geometry import coalesce
from orbax_safetensors.geometry.coalesce import plan_encoded_reads
from tests.support import quantized, views
from tests.support.quantized import as_bytes, box_of
from tests.support.quantized_formats import FORMATS, found_in
from tests.support.strategies import examples

FLOAT32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
every_format = pytest.mark.parametrize("name", FORMATS)


def whole(sample, dtype=FLOAT32):
    tensor = found_in(sample.config, sample.stored)
    box = tuple((0, size) for size in tensor.shape)
    parameters = [sample.stored[each] for each in tensor.parameters]
    view = tensor.view(FLOAT32)
    return box_of(tensor.encoding, sample.stored[tensor.codes], parameters, box, view=view, dtype=dtype)


@every_format
@examples(300)
@given(data=st.data())
def test_a_whole_tensor_has_the_values_of_its_formula(name, data):
    sample = data.draw(FORMATS[name])
    assert sample.values.dtype == FLOAT32
    np.testing.assert_array_equal(whole(sample), sample.values)
    np.testing.assert_array_equal(whole(sample, BF16).view(np.uint16), rounded(sample.values))


def rounded(values):
    return values.astype(BF16).view(np.uint16)


@every_format
@examples(200)
@given(
    data=st.data(),
    max_gap_bytes=st.sampled_from([0, 1, 4, 16, 1000]),
    staged_bytes=st.sampled_from([512, 2048, 2**20]),
)
def test_boxes_of_views_are_those_of_the_decoded_array(name, data, max_gap_bytes, staged_bytes):
    """Boxes that cut words, groups and blocks, in windows of any size."""
    sample = data.draw(FORMATS[name])
    tensor = found_in(sample.config, sample.stored)
    copies, destinations, expected = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        view, array = data.draw(views.seen(tensor.view(FLOAT32), sample.values))
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
    stored = [as_bytes(sample.stored[each]) for each in tensor.parameters]
    asked = quantized.execute(plan, as_bytes(sample.stored[tensor.codes]), stored, destinations)
    for destination, array in expected:
        np.testing.assert_array_equal(destination, array)
    quantized.check_counts(plan, asked, tensor.encoding, copies, staged_bytes)
