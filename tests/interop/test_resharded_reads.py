"""What is stored as a mesh will load it is read chunk by chunk, each once: by stock Orbax, counted by TensorStore."""

from contextlib import contextmanager
from math import prod

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import orbax_safetensors as ost
from tests.support.files import random_bits

RNG = np.random.default_rng(0)
ARRAYS = {
    "embedding": random_bits(RNG, (64, 128), np.dtype(ml_dtypes.bfloat16)),
    "layers.kernel": random_bits(RNG, (32, 3, 64), np.dtype("f4")),
    "layers.scale": random_bits(RNG, (16,), np.dtype("i4")),
}
LEADING = {name: P("x") for name in ARRAYS}
INNER = {"embedding": P(None, "x"), "layers.kernel": P(None, None, "x"), "layers.scale": P("x")}
FORMATS = pytest.mark.parametrize(("ocdbt", "zarr3"), [(True, True), (False, False)], ids=str)
BYTES_READ, REQUESTS = (f"/jax/orbax/read/safetensors/{name}" for name in ("bytes_read", "storage_reads"))


def line(count=8):
    return Mesh(np.array(jax.devices()[:count]), ("x",))


def spec_of(specs):
    """As `reshard` takes it."""
    return {f"^{name}$": tuple(spec) for name, spec in specs.items()}


@pytest.fixture
def save(tmp_path):
    """A function that saves with stock Orbax, sharded on the leading dimension; it returns the directory of steps."""

    def save(ocdbt=True, zarr3=True):
        arrays = {name: jax.device_put(array, NamedSharding(line(), P("x"))) for name, array in ARRAYS.items()}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)) as checkpointer:
            checkpointer.save(tmp_path / "leading/0/items", args=ocp.args.PyTreeSave(arrays))
        return tmp_path / "leading"

    return save


@contextmanager
def counted_reads():
    """How often chunks are read inside, in a list that is filled at the end."""
    metric = "/tensorstore/cache/chunk_cache/reads"

    def count():
        found = tensorstore.experimental_collect_matching_metrics(metric)
        return sum(value["value"] for one in found if one["name"] == metric for value in one["values"])

    before, out = count(), []
    yield out
    out.append(count() - before)


def restore(steps, mesh, specs):
    """Restores with stock Orbax, checks every shard, and returns how often chunks were read."""
    restore_args = {name: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, spec)) for name, spec in specs.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer, counted_reads() as reads:
        restored = checkpointer.restore(steps / "0/items", ocp.args.PyTreeRestore(restore_args=restore_args))
    assert restored.keys() == ARRAYS.keys()
    for name, array in restored.items():
        assert (array.shape, array.dtype) == (ARRAYS[name].shape, ARRAYS[name].dtype), name
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == ARRAYS[name][shard.index].tobytes(), name
    return reads[0]


def opened(steps, ocdbt=True, zarr3=True):
    """The stored arrays, by TensorStore, which has none of their chunks."""
    out = {}
    for name in ARRAYS:
        place = f"{steps}/0/items/"
        kvstore = (
            {"driver": "ocdbt", "base": f"file://{place}", "path": f"{name}/"} if ocdbt else f"file://{place}{name}/"
        )
        out[name] = tensorstore.open({"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore}, read=True).result()
    return out


def chunks(steps, ocdbt=True, zarr3=True):
    """How many chunks each array is stored in."""
    grids = {name: (one.shape, one.chunk_layout.read_chunk.shape) for name, one in opened(steps, ocdbt, zarr3).items()}
    return {name: prod(-(-size // chunk) for size, chunk in zip(*grid, strict=True)) for name, grid in grids.items()}


@FORMATS
def test_a_restore_reads_each_chunk_once(save, tmp_path, ocdbt, zarr3):
    leading, inner = save(ocdbt, zarr3), tmp_path / "inner"
    ost.reshard(leading, inner, mesh={"x": 8}, spec=spec_of(INNER))
    assert chunks(inner, ocdbt, zarr3) == dict.fromkeys(ARRAYS, 8)
    assert restore(inner, line(), INNER) == 24
    # Before, every shard touched every chunk, but of vectors.
    assert restore(leading, line(), INNER) == 64 + 64 + 8
    assert restore(leading, line(), LEADING) == 24


@FORMATS
def test_each_device_alone_reads_only_its_chunks(save, tmp_path, ocdbt, zarr3):
    """As processes of one device each would."""
    leading, inner = save(ocdbt, zarr3), tmp_path / "inner"
    ost.reshard(leading, inner, mesh={"x": 8}, spec=spec_of(INNER))
    for steps, expected in ((inner, [3] * 8), (leading, [8 + 8 + 1] * 8)):
        found = []
        for device in jax.devices():
            stored = opened(steps, ocdbt, zarr3)
            with counted_reads() as reads:
                for name, spec in INNER.items():
                    box = NamedSharding(line(), spec).devices_indices_map(ARRAYS[name].shape)[device]
                    assert stored[name][box].read().result().tobytes() == ARRAYS[name][box].tobytes()
            found += reads
        assert found == expected


def test_both_dimensions(save, tmp_path):
    specs = {"embedding": P("x", "y"), "layers.kernel": P("y", None, "x"), "layers.scale": P(("x", "y"))}
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    ost.reshard(save(), tmp_path / "both", mesh={"x": 2, "y": 4}, spec=spec_of(specs))
    assert chunks(tmp_path / "both") == dict.fromkeys(ARRAYS, 8)
    assert restore(tmp_path / "both", mesh, specs) == 24


def test_devices_with_copies_read_their_chunk_together(save, tmp_path):
    specs = {"embedding": P(None, "x"), "layers.kernel": P(None, None, "y"), "layers.scale": P()}
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    ost.reshard(save(), tmp_path / "copies", mesh={"x": 2, "y": 4}, spec=spec_of(specs))
    assert chunks(tmp_path / "copies") == {"embedding": 2, "layers.kernel": 4, "layers.scale": 1}
    assert restore(tmp_path / "copies", mesh, specs) == 2 + 4 + 1


def test_shards_that_memory_cuts_into_chunks(save, tmp_path):
    ost.reshard(save(), tmp_path / "inner", mesh={"x": 2}, spec=spec_of(INNER), memory_bytes=2**15)
    stored = chunks(tmp_path / "inner")
    assert stored["layers.kernel"] > stored["layers.scale"] == 2
    assert restore(tmp_path / "inner", line(2), INNER) == sum(stored.values())


def test_converted_for_a_mesh(tmp_path):
    save_file(ARRAYS, tmp_path / "model.safetensors")
    ost.convert(tmp_path / "model.safetensors", tmp_path / "inner", to="orbax", mesh={"x": 8}, spec=spec_of(INNER))
    assert restore(tmp_path / "inner", line(), INNER) == sum(chunks(tmp_path / "inner").values()) == 24


def test_safetensors_a_request_for_each_file(tmp_path, scalars):
    """A process of one device reads one file, and nothing else of any other."""
    (tmp_path / "whole").mkdir()
    save_file(ARRAYS, tmp_path / "whole" / "model.safetensors")
    ost.reshard(tmp_path / "whole", tmp_path / "pieces", mesh={"x": 8}, spec=spec_of(INNER))
    arrays = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(line(), INNER[name]))
        for name, array in ARRAYS.items()
    }
    for count in (1, 8):
        plan = ost.plan_restore(tmp_path / "pieces", arrays, process_count=count)
        for cost in plan.processes:
            assert cost.num_requests == 8 // count
            assert cost.read_bytes == cost.needed_bytes == sum(array.nbytes for array in ARRAYS.values()) // count
    whole = ost.plan_restore(
        tmp_path / "whole", arrays, process_count=8, options=ost.SafetensorsOptions(max_gap_bytes=0)
    )
    assert min(cost.num_requests for cost in whole.processes) > 100
    restore_args = {name: ocp.ArrayRestoreArgs(sharding=array.sharding) for name, array in arrays.items()}
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        restored = checkpointer.restore(tmp_path / "pieces", args=ost.SafetensorsRestore(restore_args=restore_args))
    assert (scalars[REQUESTS], scalars[BYTES_READ]) == (8, sum(array.nbytes for array in ARRAYS.values()))
    for name, array in restored.items():
        assert np.asarray(array).tobytes() == ARRAYS[name].tobytes()
