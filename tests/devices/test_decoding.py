"""Devices decode what the host does: the same bits, of every format, from exactly the bytes that a box needs."""

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from orbax_safetensors.geometry.code_box import decoding_of
from tests.support import views
from tests.support.device_decoding import assert_same, on_device, on_host
from tests.support.quantized import every_source
from tests.support.quantized_formats import FORMATS, found_in
from tests.support.strategies import examples

FLOAT32 = np.dtype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
@examples(60)
@given(data=st.data())
def test_boxes_of_views_are_those_that_the_host_decodes(name, data):
    sample = data.draw(FORMATS[name])
    tensor = found_in(sample.config, sample.stored)
    codes, parameters = sample.stored[tensor.codes], [sample.stored[each] for each in tensor.parameters]
    view, array = data.draw(views.seen(tensor.view(FLOAT32), sample.values))
    box = data.draw(views.boxes(array.shape))
    for _, copy, _ in view.copies(box, [stop - start for start, stop in box]):
        known = decoding_of(copy, tensor.encoding)
        if isinstance(known, str):
            event(known)
            continue
        event("on the device")
        elements, subnormal = on_host(tensor.encoding, codes, parameters)
        found = on_device(tensor.encoding, *known, codes, parameters)
        source = np.sort(every_source(copy))
        assert_same(found, elements[source], subnormal[source])
