"""Quantised checkpoints that vendors' libraries wrote restore to the values that their own dequantisers give."""

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.quantized import quantized_tensors
from orbax_safetensors.mapping import Family, tensor
from tests.support.compare import names_of
from tests.support.roots import TESTDATA

QUANTIZED = TESTDATA / "quantized"
NAMES = sorted(path.name for path in QUANTIZED.iterdir() if path.is_dir())
BF16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
# Their tables have +0 for the code of -0.
UNSIGNED_ZEROS = {"deepseek-v4-fp4-experts", "modelopt-nvfp4-kv", "modelopt-nvfp4-mlp-hfquant"}
# Every checkpoint is sharded over both dimensions, and four of different formats over each and with either dtype.
FOUR = ["awq-g128", "ct-fp8-block", "ct-int4-g32-g_idx", "modelopt-nvfp4-kv"]
SHARDED = [
    *((name, ("y", "x"), FLOAT32) for name in NAMES),
    *((name, spec, BF16) for name in FOUR for spec in [("x",), (None, "x"), (None, ("y", "x"))]),
]


def family_of(directory):
    """A family whose leaves are all tensors under their names without quantisation."""
    checkpoint = ost.open_checkpoint(directory)
    found = quantized_tensors(checkpoint, read_config(checkpoint))
    taken = found.unused | {name for each in found.tensors.values() for name in each.stored}
    shapes = {name: stored.shape for name, stored in checkpoint.tensors.items() if name not in taken}
    shapes |= {name: each.shape for name, each in found.tensors.items()}
    return Family("stored", (), lambda config: {name: tensor(name, shape) for name, shape in shapes.items()})


def values_of(name):
    with np.load(QUANTIZED / name / "values.npz") as file:
        return {key: value.view(BF16) if value.dtype == np.uint16 else value for key, value in file.items()}


def assert_values(name, found, values):
    assert found.keys() == values.keys()
    for key, expected in values.items():
        array = np.asarray(found[key])
        wanted = expected.astype(array.dtype)
        if expected.dtype == BF16:  # rounded once, so that nothing more is known of float32
            array, wanted = array.astype(BF16), expected
        np.testing.assert_array_equal(array, wanted, err_msg=key)
        if name not in UNSIGNED_ZEROS:
            np.testing.assert_array_equal(np.signbit(array), np.signbit(wanted), err_msg=key)


@pytest.mark.parametrize(("name", "spec", "dtype"), SHARDED, ids=str)
def test_shards_and_their_plan(name, spec, dtype, scalars):
    directory, values = QUANTIZED / name, values_of(name)
    family = family_of(directory)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    structs = {key: jax.ShapeDtypeStruct(value.shape, dtype, sharding=sharding) for key, value in values.items()}
    item = ocp.tree.from_flat_dict(structs, sep=".")
    (plan,) = ost.plan_restore(directory, item, family=family).processes
    args = ost.SafetensorsRestore(item=item, partial_restore=True)
    restored = ocp.Checkpointer(ost.SafetensorsHandler(family=family)).restore(directory, args=args)
    assert_values(name, names_of(restored), values)
    assert all(leaf.sharding == sharding for leaf in names_of(restored).values())
    assert scalars["/jax/orbax/read/safetensors/bytes_read"] == plan.read_bytes
    assert scalars["/jax/orbax/read/safetensors/storage_reads"] == plan.num_requests
    decoded = sum(value.size for value in values.values()) * 4
    assert plan.needed_bytes <= plan.read_bytes < decoded  # of codes, not of values


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_tree_has_every_tensor_and_nothing_of_the_quantisation(name):
    restored = names_of(ost.load(QUANTIZED / name, family=family_of(QUANTIZED / name)))
    values = values_of(name)
    assert_values(name, {key: restored[key] for key in values}, values)
    assert all(key in values or key.endswith(("norm.weight", "norm_weight")) for key in restored), sorted(restored)
