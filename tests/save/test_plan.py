"""What a save is said to cost is what each of its processes finds that it has to write."""

import json
import shutil
from math import prod

import jax
import numpy as np
import obstore
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import SaveArgs

import orbax_safetensors as ost
from orbax_safetensors.checkpoint import family as mapped
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.leaf import leaves_of
from orbax_safetensors.checkpoint.model_files import ModelFiles
from orbax_safetensors.checkpoint.open import open_checkpoint
from orbax_safetensors.devices import sharding as arrays
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.format.layout import file_names
from orbax_safetensors.mapping import registry
from orbax_safetensors.save import writers
from orbax_safetensors.save.contents import Contents
from orbax_safetensors.storage import upload
from orbax_safetensors.transfer.plan import Block, locations, transfer_plan
from tests.support.roots import TESTDATA

QWEN3 = TESTDATA / "qwen3"
SIZES, AXES = (2, 4), ("data", "model")


def leading(shape):
    return ["model"] if shape and shape[0] % 4 == 0 else []


def inner(shape):
    return [None] * (len(shape) - 1) + ["model"] if shape and shape[-1] % 4 == 0 else []


def both(shape):
    return ["data", "model"] if len(shape) > 1 and shape[0] % 2 == 0 and shape[1] % 4 == 0 else []


def replicated(shape):
    return []


def planned(partition, process_count, path=QWEN3, family=None, variant=None, **more):
    """What saving the tree of a checkpoint beside it costs, and the checkpoint."""
    checkpoint = open_checkpoint(path, family=family, variant=variant)
    mesh = AbstractMesh(SIZES, AXES)
    target = {
        name: jax.ShapeDtypeStruct(
            view.shape, view.dtype, sharding=NamedSharding(mesh, PartitionSpec(*partition(view.shape)))
        )
        for name, view in checkpoint.leaves.items()
    }
    more |= {"family": family, "variant": variant, "config": read_config(checkpoint), "process_count": process_count}
    return ost.plan_save(path, target, **more), checkpoint


def real_writes(monkeypatch, checkpoint, partition, process, process_count, max_file_bytes, family, variant):
    """Bytes and requests of one of several processes, as it plans its own part of a save of arrays on devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(SIZES), AXES)

    def holders(sharding, shape, process, _):
        """As if the devices were dealt to processes evenly."""
        return arrays.holders(sharding, shape, process, process_count)

    tree = {
        name: jax.device_put(
            np.zeros(view.shape, view.dtype), NamedSharding(mesh, PartitionSpec(*partition(view.shape)))
        )
        for name, view in checkpoint.leaves.items()
    }
    config = read_config(checkpoint)
    given, tensors = mapped.stored_leaves(leaves_of(tree, None), registry.find(family, config), variant, config)
    layout = Contents(given, tensors, {"format": "pt"}, ModelFiles()).layout(max_file_bytes, 64)
    with monkeypatch.context() as patched:
        patched.setattr(writers, "holders", holders)
        patched.setattr(jax, "process_index", lambda: process)
        owned = [one for group in writers.written_here(writers.grouped(given), ActiveProcesses.all()) for one in group]
    blocks = [Block(source.view, box, box.shape, source.value.dtype) for source, boxes in owned for box in boxes]
    plan = transfer_plan(blocks, locations(layout).__getitem__, max_gap_bytes=0)
    return plan.moved_bytes, plan.num_requests


@pytest.mark.parametrize(
    ("partition", "process_count", "family"),
    [
        (leading, 1, None),
        (leading, 4, "maxtext"),
        (inner, 2, "maxtext"),
        (inner, 4, None),
        (both, 2, None),
        (both, 4, "maxtext"),
        (replicated, 4, None),
    ],
)
def test_each_process_would_write_what_the_plan_says(monkeypatch, family, partition, process_count):
    variant = None if family is None else {"scan_layers": True}
    plan, checkpoint = planned(partition, process_count, family=family, variant=variant, max_file_bytes=40_000)
    assert len(plan.processes) == process_count
    for process, cost in enumerate(plan.processes):
        real = real_writes(monkeypatch, checkpoint, partition, process, process_count, 40_000, family, variant)
        assert (cost.written_bytes, cost.num_requests) == real
        assert cost.written_bytes == sum(file.written_bytes for file in cost.files)
        assert cost.num_requests == sum(file.num_requests for file in cost.files)
    # Every byte once, and each process a fair part.
    written = [cost.written_bytes for cost in plan.processes]
    nbytes = [prod(view.shape) * view.dtype.itemsize for view in checkpoint.leaves.values()]
    whole = sum(nbytes)
    assert sum(written) == whole
    assert max(written) <= whole / process_count + max(nbytes)
    assert len(plan.files) > 1
    assert 0 < sum(file.nbytes for file in plan.files) - whole < 8192 * len(plan.files)


@pytest.fixture
def stored(gcs, monkeypatch):
    """The checkpoint on an object store."""
    for name, value in gcs.environment.items():
        monkeypatch.setenv(name, value)
    for path in QWEN3.iterdir():
        obstore.put(gcs.store(), f"x/{path.name}", path.read_bytes())
    return gcs


def test_to_an_object_store_in_parts(stored, monkeypatch):
    """What one process is said to ask the store for is what it asks it for."""
    monkeypatch.setattr(upload, "PART_BYTES", 2**20)
    url = f"{stored.url}/x"
    tree = {"big": np.zeros(3 * 2**20, np.uint8), "small": np.ones(5, np.float32)}
    ost.SafetensorsHandler().save(f"{stored.url}/y", ost.SafetensorsSave(tree))
    for own, max_file_bytes in ((url, 40_000), (f"{stored.url}/y", 5 * 10**9)):
        item = ost.SafetensorsHandler().restore(own)
        mesh = AbstractMesh((1,), ("x",))
        target = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
            for name, leaf in item.items()
        }
        plan = ost.plan_save(f"{own}/new", target, max_file_bytes=max_file_bytes)
        stored.server.clear()
        ost.SafetensorsHandler().save(f"{own}/new", ost.SafetensorsSave(item, max_file_bytes=max_file_bytes))
        put = [one for one in stored.server.log if one.method == "PUT" and one.path.endswith(".safetensors")]
        (cost,) = plan.processes
        assert cost.num_requests == len(put)
        assert sum(file.nbytes for file in plan.files) == sum(one.received for one in put)
        assert {file.file for file in plan.files} == {one.path.rpartition("/")[2] for one in put}
        assert cost.written_bytes == sum(leaf.nbytes for leaf in item.values())
    assert cost.num_requests == 4


@pytest.mark.parametrize(("partition", "family"), [(leading, None), (both, "maxtext"), (replicated, None)])
def test_to_an_object_store_by_several_processes(stored, family, partition):
    """In files that one process each writes."""
    count, variant = 4, None if family is None else {"scan_layers": True}
    local, _ = planned(partition, count, family=family, variant=variant)
    plan, _ = planned(partition, count, f"{stored.url}/x", family=family, variant=variant, max_file_bytes=5_000)
    assert sum(cost.written_bytes for cost in plan.processes) == sum(cost.written_bytes for cost in local.processes)
    written = [file.file for cost in plan.processes for file in cost.files]
    assert sorted(written) == [file.file for file in plan.files] == file_names(len(written))
    assert len(written) > count
    lengths = [cost.written_bytes for cost in plan.processes]
    assert max(lengths) - min(lengths) <= max(file.nbytes for file in plan.files)
    for cost in plan.processes:
        assert cost.num_requests == len(cost.files)  # they are short


def test_to_files_where_a_server_takes_none(web):
    shutil.copytree(QWEN3, web.root / "x")
    plans = [planned(leading, 2, path)[0] for path in (f"{web.url}/x", QWEN3)]
    assert plans[0] == plans[1]


def test_json():
    plan, _ = planned(leading, 2)
    found = json.loads(plan.to_json())
    assert [file["file"] for file in found["files"]] == ["model.safetensors"]
    assert [process["written_bytes"] for process in found["processes"]] == [
        cost.written_bytes for cost in plan.processes
    ]


def test_a_printed_plan_has_its_main_figures():
    mesh = AbstractMesh((2,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    plan = ost.plan_save("/new", {"a": jax.ShapeDtypeStruct((4, 256), np.float32, sharding=sharding)}, process_count=2)
    assert str(plan).splitlines() == [
        f"save of {human_bytes(plan.files[0].nbytes)}: files 1, processes 2",
        "process 0 writes most: 2.0 KiB, requests 1, files 1",
    ]


def test_a_tree_without_a_checkpoint(tmp_path, mesh):
    """Of arrays, descriptions of arrays, NumPy's and scalars, to a directory that is not there."""
    sharded = NamedSharding(AbstractMesh((2, 4), ("x", "y")), PartitionSpec("x"))
    shared = jax.device_put(np.zeros((8, 4), np.float32), NamedSharding(mesh, PartitionSpec("x")))
    tree = {
        "abstract": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharded),
        "wide": jax.ShapeDtypeStruct((8,), np.int64, sharding=sharded),
        "array": shared,
        "numpy": np.zeros(3, np.int64),
        "step": 7,
        "placed by JAX": jax.ShapeDtypeStruct((2,), np.float32),
    }
    plan = ost.plan_save(tmp_path / "new", tree, process_count=2, save_args={"abstract": SaveArgs(dtype=np.float16)})
    assert not (tmp_path / "new").exists()
    # What all processes have, the one writes that has least to write; what has no sharding is the first's.
    assert [cost.written_bytes for cost in plan.processes] == [32 + 16 + 64 + 24 + 8, 32 + 16 + 64 + 8]
    (alone,) = ost.plan_save(tmp_path / "new", tree).processes
    assert alone.written_bytes == 128 + 32 + 128 + 24 + 8 + 8


@pytest.mark.parametrize(
    ("item", "more", "error", "why"),
    [
        ({}, {}, ost.TensorMismatchError, "has no leaves"),
        ({"a": "text"}, {}, ost.TensorMismatchError, "'a': a leaf of type str"),
        ({"a": 1}, {"process_count": 0}, ost.SafetensorsError, "process_count is 0"),
        ({"a": 1}, {"max_file_bytes": 0}, ost.SafetensorsError, "max_file_bytes is 0"),
        ({"a": 1}, {"metadata": ["x"]}, ost.SafetensorsError, "metadata is"),
        ({"a": 1}, {"variant": {"scan_layers": True}}, ost.MappingError, "is for a family"),
    ],
)
def test_trees_that_cannot_be_saved(tmp_path, item, more, error, why):
    with pytest.raises(error, match=why):
        ost.plan_save(tmp_path, item, **more)
