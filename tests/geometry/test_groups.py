"""Which views are moved together."""

from orbax_safetensors.geometry.view import by_tensors


def test_views_that_share_no_tensor_stay_alone():
    assert by_tensors([("a",), ("b", "c"), ()]) == [[0], [1], [2]]


def test_views_that_share_one_are_together_if_only_through_others():
    assert by_tensors(["a", "b", "c", "ad", "dc"]) == [[1], [0, 2, 3, 4]]
