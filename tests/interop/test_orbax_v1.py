"""What is saved loads with Orbax's own reader of safetensors, in its experimental interface v1, with equal bits."""

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental import v1

import orbax_safetensors as ost
from tests.support.compare import assert_same_arrays
from tests.support.files import random_bits

RNG = np.random.default_rng(0)
ARRAYS = {
    "decoder.0.kernel": random_bits(RNG, (16, 8), np.dtype(ml_dtypes.bfloat16)),
    "decoder.1.kernel": random_bits(RNG, (16, 8), np.dtype("f4")),
    "decoder.1.mask": random_bits(RNG, (8,), np.dtype(bool)),
    "step": np.array(7, np.int32),
}
SPECS = {"decoder.0.kernel": P("x", "y"), "decoder.1.kernel": P(None, "x"), "decoder.1.mask": P("y"), "step": P()}


@pytest.fixture(params=["one file", "several files"])
def saved(request, tmp_path, mesh):
    """A checkpoint of `ARRAYS`, saved from the nested tree that their names are the key paths of."""
    tree: dict = {}
    for name, array in ARRAYS.items():
        *path, last = name.split(".")
        inner = tree
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = jax.device_put(array, NamedSharding(mesh, SPECS[name]))
    limit = {"one file": 10**9, "several files": 300}[request.param]
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree, max_file_bytes=limit))
    files = sorted(path.name for path in (tmp_path / "saved").glob("model*"))
    assert len(files) == {"one file": 1, "several files": 4}[request.param]  # three and an index
    return tmp_path / "saved"


@pytest.fixture
def context():
    context = v1.Context()
    context.checkpoint_layout = v1.options.CheckpointLayout.SAFETENSORS
    with context:
        yield context


@pytest.mark.usefixtures("context")
def test_without_saying_what_is_wanted(saved):
    assert_same_arrays(v1.load(saved), ARRAYS)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("way", ["as saved", "other shardings"])
def test_into_sharded_arrays(saved, mesh, way):
    specs = SPECS if way == "as saved" else {name: P(*reversed(spec)) for name, spec in SPECS.items()}
    wanted = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, array in ARRAYS.items()
    }
    found = v1.load(saved, wanted)
    assert_same_arrays(found, ARRAYS)
    for name, array in found.items():
        assert array.sharding.is_equivalent_to(wanted[name].sharding, array.ndim)


@pytest.mark.usefixtures("context")
def test_metadata(saved):
    found = v1.metadata(saved).metadata
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in found.items()} == {
        name: (array.shape, array.dtype) for name, array in ARRAYS.items()
    }


@pytest.mark.usefixtures("context")
def test_file_by_file(saved):
    """v1 knows nothing of indexes: of a directory it loads all files, and each can be loaded alone."""
    found = {}
    for path in saved.glob("*.safetensors"):
        found |= v1.load(path)
    assert_same_arrays(found, ARRAYS)
