"""A checkpoint of three tensors, and how its leaves are described and compared."""

import jax
import ml_dtypes
import numpy as np
from etils import epath

import orbax_safetensors as ost
from tests.support.files import random_bits

RNG = np.random.default_rng(0)
W = random_bits(RNG, (16, 8), np.dtype("f4"))
B = random_bits(RNG, (8,), np.dtype(ml_dtypes.bfloat16))
STEP = np.array(7, np.int32)
TENSORS = {"layer.w": W, "layer.b": B, "step": STEP}


def struct(array, sharding=None, **changes):
    shape, dtype = changes.get("shape", array.shape), changes.get("dtype", array.dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def assert_same_bits(found, expected):
    assert np.asarray(found).dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.asarray(found).tobytes() == expected.tobytes()


def names_of(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def restore_alone(directory, item, **kwargs):
    """Without a checkpointer around it, which has threads and descriptors of its own."""
    args = ost.SafetensorsRestore(item=item, **kwargs)
    return ost.SafetensorsHandler().restore(epath.Path(directory), args)
