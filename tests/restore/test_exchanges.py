"""Which leaves are exchanged, for processes that are not there: what is saved by the plan's own count decides."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.open import open_checkpoint
from orbax_safetensors.restore.plan import distribution
from orbax_safetensors.restore.target import leaf_request
from orbax_safetensors.storage import local, remote

SHAPES = {"big": (2**17, 8192), "bias": (8192,), "scalar": (), "stack.0": (4096, 4096), "stack.1": (4096, 4096)}
MESH = AbstractMesh((4, 2), ("process", "local"))
REMOTE = SimpleNamespace(cost=remote.COST, is_local=False)
MOUNTED = SimpleNamespace(cost=local.COST, is_local=True)


def write(directory, shapes):
    """A file of bfloat16 tensors that is holes but for its header."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, SHAPES)


def at(store, checkpoint, **more):
    """The checkpoint as if it were in a store."""
    path = checkpoint.path if store.is_local else f"gs://bucket{checkpoint.path}"
    return replace(checkpoint, store=store, path=path, **more)


def plan(path, specs, *, store=REMOTE, processes=4, mesh=MESH, cooperative=True, **options):
    checkpoint = at(store, open_checkpoint(path))
    target = {
        name: jax.ShapeDtypeStruct(SHAPES[name], "bfloat16", sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for name, spec in specs.items()
    }
    options = ost.SafetensorsOptions(cooperative=cooperative, **options)
    return distribution(checkpoint, target, processes, options).plan(compared=True)


BIG = 2**17 * 8192 * 2
INNER = {"big": (None, ("process", "local"))}


def test_a_replicated_leaf_is_read_once_by_all_together(path):
    found = plan(path, {"big": ()})
    together = found.cooperation
    assert together.num_arrays == 1
    assert [cost.read_bytes for cost in together.direct] == [BIG] * 4
    assert [cost.read_bytes for cost in together.cooperative] == [BIG // 4] * 4
    # Every device receives what the seven others have read.
    assert [cost.received_bytes for cost in together.cooperative] == [2 * BIG * 7 // 8] * 4
    assert [cost.read_bytes for cost in found.processes] == [BIG // 4] * 4
    assert [cost.destination_bytes for cost in found.processes] == [BIG] * 4
    assert json.loads(found.to_json())["cooperation"]["cooperative"][0]["read_bytes"] == BIG // 4


def test_an_inner_leaf_is_read_once_by_all_together(path):
    found = plan(path, INNER)
    assert [cost.read_bytes for cost in found.cooperation.direct] == [BIG - 8192 * 2 * 3 // 4] * 4
    assert [cost.read_bytes for cost in found.processes] == [BIG // 4] * 4
    assert [cost.received_bytes for cost in found.cooperation.cooperative] == [2 * (BIG // 8) * 7 // 8] * 4
    assert found.over_reads == ()


@pytest.mark.parametrize(
    ("specs", "kwargs", "num_arrays"),
    [
        (INNER, {"cooperative": False}, 1),
        (INNER, {"alias": True}, 1),
        ({"big": (("process", "local"),)}, {}, 0),
        ({"scalar": ()}, {}, 0),
    ],
)
def test_others_are_read_as_ever(path, specs, kwargs, num_arrays):
    found = plan(path, specs, **kwargs)
    assert found.cooperation.num_arrays == num_arrays
    assert [(cost.read_bytes, cost.num_requests) for cost in found.processes] == [
        (cost.read_bytes, cost.num_requests) for cost in found.cooperation.direct
    ]


def test_whoever_asks_gets_it_wherever_it_saves_bytes(path):
    for store in (MOUNTED, REMOTE):
        assert plan(path, INNER | {"bias": ()}, store=store).cooperation.num_arrays == 2
    found = plan(path, {"bias": ()})
    assert [cost.read_bytes for cost in found.processes] == [8192 * 2 // 4] * 4


def test_one_process_has_nobody_to_exchange_with(path):
    assert plan(path, INNER, processes=1).cooperation is None


def test_it_is_counted_only_for_those_who_ask(path):
    target = {"big": jax.ShapeDtypeStruct(SHAPES["big"], "bfloat16", sharding=NamedSharding(MESH, PartitionSpec()))}
    assert ost.plan_restore(path, target, process_count=4).cooperation is None
    options = ost.SafetensorsOptions(cooperative=True)
    assert ost.plan_restore(path, target, process_count=4, options=options).cooperation.num_arrays == 1


def test_leaves_of_which_only_some_processes_have_devices(path):
    checkpoint = at(REMOTE, open_checkpoint(path))
    # A device for two processes: they are dealt evenly, so a mesh of few devices is one of few processes.
    target = {"big": ocp.ArrayRestoreArgs(sharding=NamedSharding(MESH, PartitionSpec()))}
    found = distribution(checkpoint, target, 4, ost.SafetensorsOptions(cooperative=True))
    some = replace(found, owners=((0, 0, 1, 1, 2, 2, 2, 2),))
    assert [some.possible, some.chosen] == [[None], [None]]


def test_arrays_that_are_no_named_shardings_of_jax(path, mesh):
    named = NamedSharding(MESH, PartitionSpec())
    target = {
        "big": ocp.ArrayRestoreArgs(sharding=Format(Layout((1, 0)), NamedSharding(mesh, PartitionSpec()))),
        "bias": ocp.RestoreArgs(restore_type=np.ndarray),
        "stack.0": ocp.type_handlers.SingleReplicaArrayRestoreArgs(sharding=named),
    }
    checkpoint = at(REMOTE, open_checkpoint(path))
    found = distribution(checkpoint, target, 4, ost.SafetensorsOptions(cooperative=True))
    assert found.owners == (None, None, None)
    assert found.possible == [None] * 3


def test_leaves_of_one_tensor_are_exchanged_together_or_not_at_all(path):
    checkpoint = open_checkpoint(path)
    view = checkpoint.view("big")
    halves = {"upper": view.slice(slice(0, 2**16)), "lower": view.slice(slice(2**16, None))}
    checkpoint = at(REMOTE, checkpoint, mapped=halves)
    inner = NamedSharding(MESH, PartitionSpec(None, ("process", "local")))
    target = {name: jax.ShapeDtypeStruct((2**16, 8192), "bfloat16", sharding=inner) for name in halves}
    found = distribution(checkpoint, target, 4, ost.SafetensorsOptions(cooperative=True)).plan()
    assert found.cooperation.num_arrays == 2
    assert sum(cost.read_bytes for cost in found.processes) == BIG
    mixed = target | {"lower": np.zeros((2**16, 8192), "bfloat16")}
    found = distribution(checkpoint, mixed, 4, ost.SafetensorsOptions(cooperative=True)).plan()
    assert found.cooperation.num_arrays == 0


def test_stacks_and_transposes_are_cut_where_storage_is(path):
    checkpoint = open_checkpoint(path)
    views = [checkpoint.view(f"stack.{number}").T for number in range(2)]
    stacked = views[0].stack(views, axis=1)  # (4096, 2, 4096): the first dimension is innermost in storage
    checkpoint = at(REMOTE, checkpoint, mapped={"stack": stacked})
    sharding = NamedSharding(MESH, PartitionSpec(("process", "local")))
    target = {"stack": jax.ShapeDtypeStruct((4096, 2, 4096), "bfloat16", sharding=sharding)}
    found = distribution(checkpoint, target, 4, ost.SafetensorsOptions(cooperative=True))
    (one,) = found.chosen
    # Half of the processes read the first tensor, in blocks of its rows.
    assert one.exchange.parts == ((), (2,), (0, 1))
    assert [cost.read_bytes for cost in found.plan().processes] == [2 * 4096 * 4096 * 2 // 4] * 4


@pytest.mark.parametrize("value", ["auto", "on", None, 1])
def test_options_are_checked(value):
    with pytest.raises(ost.SafetensorsError, match=f"cooperative is {value!r}, must be True or False"):
        ost.SafetensorsOptions(cooperative=value)


def test_whose_devices_an_array_is_asked_for_on(mesh):
    """Before there is a checkpoint, of which ranks are not known; an abstract mesh stands for the one that is set."""
    abstract = NamedSharding(mesh.abstract_mesh, PartitionSpec())
    for args, found in (
        (ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, PartitionSpec())), {0}),
        (ocp.ArrayRestoreArgs(sharding=Format(Layout((1, 0)), NamedSharding(mesh, PartitionSpec()))), {0}),
        (ocp.ArrayRestoreArgs(sharding=abstract), set()),
        (ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, PartitionSpec()), restore_type=np.ndarray), set()),
    ):
        assert leaf_request(None, args).processes == found, args
    with jax.set_mesh(mesh):
        assert leaf_request(None, ocp.ArrayRestoreArgs(sharding=abstract)).processes == {0}
    assert leaf_request(None, ocp.ArrayRestoreArgs(sharding="x")) is None
