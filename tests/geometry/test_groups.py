"""Which views are moved together."""

import numpy as np

from orbax_safetensors.geometry.view import View, by_tensors


def of(*names):
    return View.concatenate([View.tensor(name, (2,), np.dtype("f4")) for name in names])


def test_views_that_share_no_tensor_stay_alone():
    assert by_tensors([of("a"), of("b", "c"), View.full((2,), 1)]) == [[0], [1], [2]]


def test_views_that_share_one_are_together_if_only_through_others():
    assert by_tensors([of("a"), of("b"), of("c"), of("a", "d"), of("d", "c")]) == [[1], [0, 2, 3, 4]]
