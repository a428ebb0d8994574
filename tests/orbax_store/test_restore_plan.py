"""Plans of restores from Orbax checkpoints, with what stock Orbax asks TensorStore for as the oracle."""

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.serialization import serialization

import orbax_safetensors as ost
from orbax_safetensors.devices.partition import partition
from orbax_safetensors.orbax_store import open_orbax
from orbax_safetensors.orbax_store.restore_plan import plan_orbax_restore

SPEC = {"kernel": ("x", "y"), "stack": (None, None, "y"), "table": (("x", "y"),)}
SHAPES = {"kernel": (16, 32), "stack": (16, 6, 8), "table": (64, 2), "norm": (24,)}
MESH = {"x": 2, "y": 4}

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture
def saved(tmp_path, mesh):
    """Chunks of whole rows, and one array that is one chunk."""
    arrays = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in SHAPES.items()}
    specs = {"kernel": P("x"), "stack": P("y"), "table": P(("x", "y")), "norm": P()}
    tree = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "0" / "items", tree)
    return tmp_path


def asked_of_tensorstore(path, mesh, monkeypatch):
    """Bytes of the chunks that a restore of stock Orbax reads."""
    nbytes = []
    estimate = serialization.estimate_read_memory_footprint

    def counted(*arguments):
        nbytes.append(estimate(*arguments))
        return nbytes[-1]

    monkeypatch.setattr(serialization, "estimate_read_memory_footprint", counted)
    args = {name: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, P(*SPEC.get(name, ())))) for name in SHAPES}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path, restore_args=args)
    monkeypatch.undo()
    return sum(nbytes)


def test_what_is_planned_is_what_orbax_reads(saved, mesh, monkeypatch):
    sharding = partition(MESH, SPEC)
    plan = plan_orbax_restore(open_orbax(saved), sharding, 1)
    (cost,) = plan.processes
    assert cost.needed_bytes == plan.total_bytes == sum(4 * int(np.prod(shape)) for shape in SHAPES.values())
    assert cost.read_bytes == asked_of_tensorstore(saved / "0" / "items", mesh, monkeypatch) > cost.needed_bytes
    assert plan.file_bytes == sum(file.stat().st_size for file in (saved / "0" / "items").rglob("*") if file.is_file())
    over = {leaf.name: leaf for leaf in plan.over_reads}
    assert list(over) == ["stack", "kernel"]  # the most wasteful first
    # Rows are whole in a chunk, and four shards of columns touch each.
    assert {name: leaf.over_read for name, leaf in over.items()} == {"kernel": 4, "stack": 4}
    assert over["kernel"].chunk_shape[1] == 32
    assert over["kernel"].shard_shape == (8, 8)


def test_a_reshard_ends_it(saved, mesh, monkeypatch):
    ost.reshard(saved, saved / "to", mesh=MESH, spec=SPEC)
    plan = plan_orbax_restore(open_orbax(saved / "to"), partition(MESH, SPEC), 1)
    assert plan.over_reads == ()
    assert plan.processes[0].read_bytes == plan.processes[0].needed_bytes == plan.total_bytes
    assert asked_of_tensorstore(saved / "to" / "0" / "items", mesh, monkeypatch) == plan.total_bytes


def test_processes_have_the_shards_of_their_devices(saved):
    plan = plan_orbax_restore(open_orbax(saved), partition(MESH, SPEC), 2)
    nbytes = {name: 4 * int(np.prod(shape)) for name, shape in SHAPES.items()}
    # Half of what x shards; all of the rest.
    needed = nbytes["kernel"] // 2 + nbytes["stack"] + nbytes["table"] // 2 + nbytes["norm"]
    read = 4 * nbytes["kernel"] // 2 + 4 * nbytes["stack"] + nbytes["table"] // 2 + nbytes["norm"]
    assert [(cost.needed_bytes, cost.read_bytes) for cost in plan.processes] == [(needed, read)] * 2
    eight = plan_orbax_restore(open_orbax(saved), partition(MESH, SPEC), 8)
    all_need = nbytes["kernel"] + 2 * nbytes["stack"] + nbytes["table"] + 8 * nbytes["norm"]
    assert sum(cost.needed_bytes for cost in eight.processes) == all_need


@pytest.mark.parametrize("count", [1, 2, 4])
def test_chunks_are_counted(saved, mesh, count):
    """One by one, over the elements of each distinct shard of a process."""
    checkpoint = open_orbax(saved)
    chunks = np.zeros(count, int)
    for name, leaf in checkpoint.leaves.items():
        grid = np.indices(leaf.shape) // np.reshape(leaf.chunk_shape, (-1, *[1] * len(leaf.shape)))
        indices = NamedSharding(mesh, P(*SPEC.get(name, ()))).devices_indices_map(leaf.shape)
        for process, own in enumerate(np.split(mesh.devices.ravel(), count)):
            for index in {str(indices[device]): indices[device] for device in own}.values():
                touched = grid[(slice(None), *index)].reshape(len(leaf.shape), -1)
                chunks[process] += len(np.unique(touched, axis=1).T)
    plan = plan_orbax_restore(checkpoint, partition(MESH, SPEC), count)
    assert [cost.num_chunks for cost in plan.processes] == chunks.tolist()


def test_json(saved):
    plan = plan_orbax_restore(open_orbax(saved), partition(MESH, SPEC), 2)
    found = json.loads(plan.to_json())
    assert found["num_arrays"] == 4
    assert found["processes"][1]["over_read"] == plan.processes[1].over_read
    assert {leaf["name"] for leaf in found["over_reads"]} == {"stack", "kernel"}


def test_a_partition_that_does_not_fit(saved):
    for spec, message in (({"kernle": ("x",)}, "'kernle' is found in none"), ({"norm": ("z",)}, "no axis 'z'")):
        with pytest.raises(ost.TensorMismatchError, match=message):
            plan_orbax_restore(open_orbax(saved), partition(MESH, spec), 1)


def test_nothing_of_the_arrays_is_read(saved, monkeypatch):
    before = sorted(saved.rglob("*"))
    checkpoint = open_orbax(saved)
    monkeypatch.setattr(type(checkpoint), "read", lambda *_: pytest.fail("reads"))
    assert plan_orbax_restore(checkpoint, partition(MESH, SPEC), 4).num_arrays == 4
    assert sorted(saved.rglob("*")) == before
    assert Path(checkpoint.path) == saved / "0" / "items"
