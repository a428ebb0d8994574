"""A checkpoint of three tensors, and how its leaves are described."""

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


def restore_alone(directory, item, **kwargs):
    """Without a checkpointer around it, which has threads and descriptors of its own."""
    args = ost.SafetensorsRestore(item=item, **kwargs)
    return ost.SafetensorsHandler().restore(epath.Path(directory), args)
