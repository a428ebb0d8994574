"""Scales of views of quantised tensors, against scales that NumPy has spread over all elements."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry.scales import scales_view
from orbax_safetensors.geometry.view import View
from tests.support.evaluate import evaluate
from tests.support.quantized import scaled
from tests.support.strategies import examples
from tests.support.views import compositions

INT = np.dtype(np.int32)


class Model:
    """Stored tensors of these shapes, all in blocks of one size, and the number of the scale of each element."""

    def __init__(self, shapes, block):
        self.encodings = {name: scaled(shape, 8, "F8_E4M3", DTYPES["F32"], block) for name, shape in shapes.items()}
        self.scales, self.spread = {}, {}
        for number, (name, encoding) in enumerate(self.encodings.items()):
            grid = (*encoding.shape[:-2], *encoding.parameters[0].grid)
            scales = np.arange(math.prod(grid), dtype=INT).reshape(grid) + 100_000 * number
            (rows, columns), (height, width) = encoding.shape[-2:], block
            self.scales[f"{name}_scale"] = scales
            spread = scales.repeat(height, -2)[..., :rows, :].repeat(width, -1)[..., :columns]
            self.spread[name] = np.ascontiguousarray(spread)

    def tensor(self, name):
        return View.tensor(name, self.encodings[name].shape, INT)

    def scales_of(self, view):
        described = {
            name: (f"{name}_scale", encoding.parameters[0], encoding.shape) for name, encoding in self.encodings.items()
        }
        return scales_view(view, described, INT)

    def check(self, view):
        """Each element of the view has the scale of its tile."""
        scales = self.scales_of(view)
        found = evaluate(scales, self.scales)
        assert len(scales.shape) == len(view.shape)
        for axis, (size, parts) in enumerate(zip(view.shape, scales.shape, strict=True)):
            assert size % parts == 0
            found = found.repeat(size // parts, axis)
        np.testing.assert_array_equal(found, evaluate(view, self.spread))
        return scales


@given(compositions(matrices=True), st.tuples(st.integers(1, 4), st.integers(1, 4)))
@examples(150)
def test_any_view(composition, block):
    Model({name: array.shape for name, array in composition.stored.items()}, block).check(composition.view)


@pytest.mark.parametrize(
    ("shape", "block", "words", "expected"),
    [
        ((256, 384), (128, 128), lambda t: t, (2, 3)),
        ((256, 384), (128, 128), lambda t: t.T, (3, 2)),
        ((256, 384), (1, 384), lambda t: t.T, (1, 256)),
        ((256, 384), (256, 384), lambda t: t.T, (1, 1)),
        ((4, 256, 384), (128, 128), lambda t: t.transpose((0, 2, 1)), (4, 3, 2)),
        ((512, 384), (128, 128), lambda t: t.T.reshape((384, 4, 128)), (3, 4, 1)),
        ((512, 384), (128, 128), lambda t: t.T.reshape((384, 8, 64)), (3, 4, 1)),  # two heads share a scale
        ((512, 384), (128, 128), lambda t: t.T.reshape((384, 2, 256)), (3, 2, 2)),
        ((512, 384), (512, 384), lambda t: t.T.reshape((384, 2, 256)), (1, 1, 1)),
        ((768, 384), (128, 128), lambda t: t.T.reshape((384, 4, 192)), (3, 4, 3)),  # blocks end within heads
        ((512, 384), (128, 128), lambda t: t.slice(slice(128, 384)), (2, 3)),
        ((512, 384), (128, 128), lambda t: t.slice(slice(64, 256)), (3, 3)),  # and within slices
        ((576, 384), (128, 128), lambda t: t, (9, 3)),  # the last block is smaller
        ((256, 384), (128, 128), lambda t: t.reshape((-1,)), (768,)),
        ((256, 384), (128, 384), lambda t: t.reshape((-1,)), (2,)),
    ],
)
def test_tiles_are_as_large_as_they_can_be(shape, block, words, expected):
    model = Model({"w": shape}, block)
    assert model.check(words(model.tensor("w"))).shape == expected


def test_layers_and_experts():
    model = Model({f"{layer}.{expert}": (256, 384) for layer in range(2) for expert in range(3)}, (128, 128))
    experts = [[model.tensor(f"{layer}.{expert}").T for expert in range(3)] for layer in range(2)]
    stacked = View.stack([View.stack(of_layer) for of_layer in experts], 1)
    assert stacked.shape == (3, 2, 384, 256)
    scales = model.check(stacked)
    assert scales.shape == (3, 2, 3, 2)
    assert len(scales.pieces) == 6
