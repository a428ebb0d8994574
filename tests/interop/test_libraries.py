"""What is saved opens in the `safetensors` package, for every framework that it has, with equal bits."""

import json

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.flax
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.support.compare import assert_same_arrays
from tests.support.files import DTYPES, random_bits

SHAPES = {"matrix": (8, 24), "vector": (24,), "odd": (3, 1, 5), "scalar": (), "empty": (0, 4)}
# The `safetensors` package does not read these as NumPy arrays, which its arrays for Flax are made of.
NOT_FOR_NUMPY = {name for name in DTYPES if name.startswith("F8_")}


def arrays_of(dtypes):
    rng = np.random.default_rng(0)
    return {
        f"{dtype}.{name}": random_bits(rng, shape, DTYPES[dtype])
        for dtype in sorted(dtypes)
        for name, shape in SHAPES.items()
    }


def placed(arrays, mesh):
    """The same arrays sharded over the mesh, where JAX has their dtype without x64."""
    specs = {"matrix": P("x", "y"), "vector": P(("y", "x")), "odd": P(), "scalar": P(), "empty": P(None, "y")}
    return {
        name: jax.device_put(array, NamedSharding(mesh, specs[name.partition(".")[2]]))
        if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype
        else array
        for name, array in arrays.items()
    }


def save(directory, arrays, **kwargs):
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.save(directory, args=ost.SafetensorsSave(arrays, **kwargs))


def load_all(directory, load):
    return {name: array for path in directory.glob("*.safetensors") for name, array in load(path).items()}


@pytest.mark.parametrize("files", ["one", "several"])
def test_numpy(tmp_path, mesh, files):
    arrays = arrays_of(DTYPES.keys() - NOT_FOR_NUMPY)
    save(tmp_path / "saved", placed(arrays, mesh), max_file_bytes={"one": 10**9, "several": 300}[files])
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (files == "several")
    assert_same_arrays(load_all(tmp_path / "saved", safetensors.numpy.load_file), arrays)


def test_torch(tmp_path, mesh):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from safetensors.torch import load_file

    from tests.support.torch_bits import to_numpy

    arrays = arrays_of(DTYPES)
    save(tmp_path / "saved", placed(arrays, mesh), max_file_bytes=300)
    found = load_all(tmp_path / "saved", load_file)
    assert_same_arrays({name: to_numpy(tensor) for name, tensor in found.items()}, arrays)


def test_flax(tmp_path, mesh):
    arrays = arrays_of(DTYPES.keys() - NOT_FOR_NUMPY)
    save(tmp_path / "saved", placed(arrays, mesh), max_file_bytes=300)
    with jax.enable_x64(True):
        found = load_all(tmp_path / "saved", safetensors.flax.load_file)
        assert all(isinstance(array, jax.Array) for array in found.values())
        assert_same_arrays({name: np.asarray(array) for name, array in found.items()}, arrays)


def test_slices_metadata_and_index_as_the_reference_reads_them(tmp_path, mesh):
    rng = np.random.default_rng(0)
    arrays = {name: random_bits(rng, (16, 8), np.dtype(ml_dtypes.bfloat16)) for name in ("a.w", "b.w", "c.w")}
    sharded = {name: jax.device_put(array, NamedSharding(mesh, P("y", "x"))) for name, array in arrays.items()}
    save(tmp_path / "saved", sharded, max_file_bytes=2 * arrays["a.w"].nbytes, metadata={"note": "é"})
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "saved" / file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt", "note": "é"}
            found = opened.get_slice(name)[3:9, 2:]
        assert found.tobytes() == arrays[name][3:9, 2:].tobytes()
