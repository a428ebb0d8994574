"""How tensors and trees are compared: by names, shapes, dtypes and bits."""

import jax
import numpy as np


def names_of(tree):
    """The leaves of a tree by their key paths, joined by dots."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_same_bits(found, expected, name=""):
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    assert found.tobytes() == expected.tobytes(), name


def assert_same_arrays(found, expected):
    """The arrays of two trees, or of dicts by such names, are the same."""
    found, expected = names_of(found), names_of(expected)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert_same_bits(found[name], array, name)
