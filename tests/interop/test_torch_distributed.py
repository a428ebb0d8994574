"""`torch.distributed.checkpoint`: its Hugging Face reader loads what is saved here, what its writer writes is restored.

Its sharded files are written by two real processes, each with its own pieces of every tensor.
"""

import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.support.compare import assert_same_arrays
from tests.support.files import DTYPES, random_bits

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed.checkpoint as dcp  # noqa: E402 - needs PyTorch

from tests.interop import dcp_writer  # noqa: E402 - needs PyTorch
from tests.support.torch_bits import quietly, to_numpy  # noqa: E402

pytestmark = pytest.mark.process

TIMEOUT_SECONDS = 120


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The directory that the two processes have written into."""
    directory = tmp_path_factory.mktemp("written")
    command = [sys.executable, dcp_writer.__file__, directory]
    with open(directory / "errors", "w") as errors:
        running = [subprocess.Popen([*command, str(rank)], stderr=errors) for rank in range(dcp_writer.PROCESSES)]
    try:
        codes = [process.wait(TIMEOUT_SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert not any(codes), (directory / "errors").read_text()[-4000:]
    return directory


@pytest.fixture
def whole():
    return {name: to_numpy(tensor) for name, tensor in dcp_writer.tensors().items()}


def assert_restores(directory, whole, mesh):
    """As NumPy arrays, and as arrays over the mesh, by either of their dimensions where they divide."""
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        assert_same_arrays(checkpointer.restore(directory), whole)
        metadata = checkpointer.metadata(directory).item_metadata
        assert {name: metadata[name].shape for name in whole} == {name: array.shape for name, array in whole.items()}
        for axis in (0, -1):
            item = {}
            for name, array in whole.items():
                spec = [None] * array.ndim
                if array.ndim and array.shape[axis] % 2 == 0:
                    spec[axis] = "x"
                sharding = NamedSharding(mesh, P(*spec))
                dtype = jax.dtypes.canonicalize_dtype(array.dtype)
                item[name] = jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)
            item.pop("step", None)  # any 64 bits, which JAX has no place for
            restored = checkpointer.restore(directory, args=ost.SafetensorsRestore(item=item, partial_restore=True))
            assert_same_arrays(restored, {name: whole[name] for name in item})
            assert any(not array.is_fully_replicated for array in restored.values())
    assert ost.verify(directory) == []


@pytest.mark.parametrize("files", ["one", "several"])
def test_files_of_pieces_are_restored_as_whole_tensors(written, whole, mesh, files):
    names = sorted(path.name for path in (written / f"sharded-{files}").iterdir())
    assert len(names) == {"one": 2, "several": 4}[files]
    assert all(name.startswith("shard-0000") for name in names)
    assert_restores(written / f"sharded-{files}", whole, mesh)


@pytest.mark.parametrize("files", ["one", "several"])
def test_consolidated_files_are_restored(written, whole, mesh, files):
    floats = {name: whole[name] for name, tensor in dcp_writer.tensors().items() if tensor.is_floating_point()}
    directory = written / f"consolidated-{files}"
    assert (directory / "sharded").is_dir()
    assert_restores(directory, floats, mesh)
    assert_restores(directory / "sharded", floats, mesh)


@pytest.mark.parametrize("files", [None, dcp_writer.FILES], ids=["one", "several"])
def test_files_of_one_process_are_restored(tmp_path, whole, mesh, files):
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "plain"), fqn_to_index_mapping=files)
    quietly(dcp.save, dcp_writer.tensors(), storage_writer=writer)
    assert (tmp_path / "plain" / "model.safetensors.index.json").exists()
    assert_restores(tmp_path / "plain", whole, mesh)


def save(directory, arrays, max_file_bytes):
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.save(directory, args=ost.SafetensorsSave(arrays, max_file_bytes=max_file_bytes))


def load(directory, state):
    quietly(dcp.load, state, storage_reader=dcp.HuggingFaceStorageReader(str(directory)))
    return {name: to_numpy(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("limit", [10**9, 200], ids=["one file", "several files"])
def test_the_reader_loads_what_is_saved(tmp_path, whole, mesh, limit):
    shardings = {"layers.0.rows": P("x"), "layers.1.last": P(None, None, ("y", "x")), "replicated": P()}
    arrays = whole | {name: jax.device_put(whole[name], NamedSharding(mesh, shardings[name])) for name in shardings}
    save(tmp_path / "saved", arrays, limit)
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (limit == 200)
    empty = {name: torch.zeros_like(tensor) for name, tensor in dcp_writer.tensors().items()}
    assert_same_arrays(load(tmp_path / "saved", empty), whole)


def test_the_reader_loads_every_dtype_that_pytorch_reads(tmp_path):
    from safetensors.torch import _TYPES

    names = sorted(DTYPES.keys() & _TYPES.keys())
    assert len(names) > 12
    arrays = {name: random_bits(np.random.default_rng(0), (4, 6), DTYPES[name]) for name in names}
    save(tmp_path / "saved", arrays, 10**9)
    assert_same_arrays(
        load(tmp_path / "saved", {name: torch.zeros(4, 6, dtype=_TYPES[name]) for name in names}), arrays
    )
