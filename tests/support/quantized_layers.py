"""A quantised model of two layers of experts, and its family."""

import ml_dtypes
import numpy as np

from orbax_safetensors.mapping import Family, stack, tensor
from tests.support.files import random_bits

BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
LAYERS, EXPERTS, WIDTH, HIDDEN = 2, 3, 200, 72
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 48]}


def tree(config):
    layers = range(LAYERS)
    up = [stack([tensor(f"{n}.experts.{e}.weight", (HIDDEN, WIDTH)).T for e in range(EXPERTS)]) for n in layers]
    return {
        "layers.up": stack(up, axis=1),
        "layers.norm": stack([tensor(f"{n}.norm.weight", (WIDTH,)) for n in layers], axis=1),
    }


FAMILY = Family("toy.moe", (), tree)


def in_tree(tensors):
    """What `tree` means, in NumPy."""
    up = [[tensors[f"{n}.experts.{e}.weight"].T for n in range(LAYERS)] for e in range(EXPERTS)]
    return {"layers": {"up": np.array(up), "norm": np.stack([tensors[f"{n}.norm.weight"] for n in range(LAYERS)], 1)}}


def quantized(rng, scale_shape, expand):
    """Codes, scales, and the product of both in float32, as any number of weights."""
    stored, plain = {}, {}
    for n in range(LAYERS):
        for e in range(EXPERTS):
            name = f"{n}.experts.{e}.weight"
            codes = random_bits(rng, (HIDDEN, WIDTH), F8)
            scales = rng.standard_normal(scale_shape).astype(np.float32)
            stored |= {name: codes, f"{name}_scale_inv": scales}
            plain[name] = codes.astype(np.float32) * expand(scales)
        plain[f"{n}.norm.weight"] = stored[f"{n}.norm.weight"] = random_bits(rng, (WIDTH,), BF16)
    return stored, plain


def of_blocks(scales):
    height, width = FP8["weight_block_size"]
    return np.repeat(np.repeat(scales, height, 0), width, 1)[:HIDDEN, :WIDTH]


GRIDS = {
    "blocks": ((3, 5), of_blocks),
    "rows": ((HIDDEN, 1), lambda scales: scales),
    "tensor": ((1,), lambda scales: scales),
}


def config_of(grid):
    return FP8 if grid == "blocks" else FP8 | {"weight_block_size": None}


def same(found, wanted):
    """Equal bits; any NaN is as good as another, since decoders do not agree on its sign."""
    found = np.asarray(found)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    with np.errstate(invalid="ignore"):
        where = np.isnan(wanted)
        np.testing.assert_array_equal(np.isnan(found), where)
    bits = []
    for array in (found, wanted):  # not by `np.where`, which NumPy 2.0.0 crashes in if there are no elements
        bits.append(np.array(array))
        bits[-1][where] = 0
    assert bits[0].tobytes() == bits[1].tobytes()
