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
from orbax_safetensors.api import open_checkpoint
from orbax_safetensors.io import local, remote
from orbax_safetensors.leaves import asked
from orbax_safetensors.planning import planned

SHAPES = {"big": (2**17, 8192), "bias": (8192,), "scalar": (), "stack.0": (4096, 4096), "stack.1": (4096, 4096)}
MESH = AbstractMesh((4, 2), ("process", "local"))
REMOTE = SimpleNamespace(cost=remote.COST, maps=False)
MOUNTED = SimpleNamespace(cost=local.COST, maps=True)


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
    path = checkpoint.path if store.maps else f"gs://bucket{checkpoint.path}"
    return replace(checkpoint, store=store, path=path, **more)


def plan(path, specs, *, store=REMOTE, processes=4, mesh=MESH, **options):
    checkpoint = at(store, open_checkpoint(path))
    target = {
        name: jax.ShapeDtypeStruct(SHAPES[name], "bfloat16", sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for name, spec in specs.items()
    }
    found = planned(checkpoint, target, processes, ost.SafetensorsOptions(**options))
    return found.plan(compared=True)


def chosen(*args, **kwargs):
    return plan(*args, **kwargs).cooperation.chosen_arrays


BIG = 2**17 * 8192 * 2
INNER = {"big": (None, ("process", "local"))}


def test_a_replicated_leaf_is_read_once_by_all_together(path):
    found = plan(path, {"big": ()})
    together = found.cooperation
    assert (together.possible_arrays, together.chosen_arrays) == (1, 1)
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
    ("specs", "kwargs"),
    [
        (INNER, {"store": MOUNTED}),
        (INNER, {"cooperative": False}),
        (INNER, {"alias": True}),
        (INNER, {"cooperative": True, "alias": True}),
        ({"big": (("process", "local"),)}, {}),
        ({"big": (("process", "local"),)}, {"cooperative": True}),
        ({"bias": ()}, {}),  # a program to exchange it takes longer
        ({"scalar": ()}, {"cooperative": True}),
    ],
)
def test_others_are_read_as_ever(path, specs, kwargs):
    found = plan(path, specs, **kwargs)
    assert found.cooperation.chosen_arrays == 0
    assert [(cost.read_bytes, cost.num_requests) for cost in found.processes] == [
        (cost.read_bytes, cost.num_requests) for cost in found.cooperation.direct
    ]


def test_whoever_asks_gets_it_wherever_it_saves_bytes(path):
    assert chosen(path, INNER | {"bias": ()}, store=MOUNTED, cooperative=True) == 2
    found = plan(path, {"bias": ()}, cooperative=True)
    assert [cost.read_bytes for cost in found.processes] == [8192 * 2 // 4] * 4


def test_one_process_has_nobody_to_exchange_with(path):
    assert plan(path, INNER, processes=1, cooperative=True).cooperation is None


def test_of_mounted_files_it_is_counted_only_where_asked(path):
    target = {"big": jax.ShapeDtypeStruct(SHAPES["big"], "bfloat16", sharding=NamedSharding(MESH, PartitionSpec()))}
    assert ost.plan_restore(path, target, process_count=4).cooperation is None
    options = ost.SafetensorsOptions(cooperative=True)
    assert ost.plan_restore(path, target, process_count=4, options=options).cooperation.chosen_arrays == 1


def test_a_faster_store_needs_no_help(path):
    fast = SimpleNamespace(cost=replace(remote.COST, request_seconds=0.0, bytes_per_second=1e12), maps=False)
    assert chosen(path, {"big": ()}, store=fast) == 0
    assert chosen(path, {"big": ()}, store=fast, cooperative=True) == 1


@pytest.mark.parametrize(("shape", "spec"), [((17, 1000, 17), ()), ((17, 5, 3), (None, "local"))])
def test_hosts_with_other_cpus_choose_alike(tmp_path, shape, spec):
    checkpoint = open_checkpoint(write(tmp_path, {"a": shape}))
    sharding = NamedSharding(MESH, PartitionSpec(*spec))
    target = {"a": jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding)}
    found = []
    for requests in (2, 4, 16):
        store = SimpleNamespace(cost=replace(local.COST, requests=requests), maps=True)
        own = planned(at(store, checkpoint), target, 4, ost.SafetensorsOptions(cooperative=True))
        found.append(own.chosen[0].way.exchange)
    assert found == [found[0]] * 3


def test_many_leaves_are_worth_a_program_that_one_is_not(tmp_path):
    tensors = {f"{number:03}": (512, 4096) for number in range(400)}
    many = write(tmp_path, tensors)
    checkpoint = at(REMOTE, open_checkpoint(many))
    sharding = NamedSharding(AbstractMesh((64,), ("d",)), PartitionSpec(None, "d"))
    target = {name: jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding) for name, shape in tensors.items()}
    for names, expected in ((list(tensors)[:1], 0), (list(tensors), 400)):
        found = planned(checkpoint, {name: target[name] for name in names}, 64, ost.SafetensorsOptions())
        assert found.plan().cooperation.chosen_arrays == expected


def test_leaves_of_which_only_some_processes_have_devices(path):
    checkpoint = at(REMOTE, open_checkpoint(path))
    # A device for two processes: they are dealt evenly, so a mesh of few devices is one of few processes.
    target = {"big": ocp.ArrayRestoreArgs(sharding=NamedSharding(MESH, PartitionSpec()))}
    found = planned(checkpoint, target, 4, ost.SafetensorsOptions(cooperative=True))
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
    found = planned(checkpoint, target, 4, ost.SafetensorsOptions(cooperative=True))
    assert found.owners == (None, None, None)
    assert found.possible == [None] * 3


def test_leaves_of_one_tensor_are_exchanged_together_or_not_at_all(path):
    checkpoint = open_checkpoint(path)
    view = checkpoint.view("big")
    halves = {"upper": view.slice(slice(0, 2**16)), "lower": view.slice(slice(2**16, None))}
    checkpoint = at(REMOTE, checkpoint, mapped=halves)
    inner = NamedSharding(MESH, PartitionSpec(None, ("process", "local")))
    target = {name: jax.ShapeDtypeStruct((2**16, 8192), "bfloat16", sharding=inner) for name in halves}
    found = planned(checkpoint, target, 4, ost.SafetensorsOptions()).plan()
    assert found.cooperation.chosen_arrays == 2
    assert sum(cost.read_bytes for cost in found.processes) == BIG
    mixed = target | {"lower": np.zeros((2**16, 8192), "bfloat16")}
    assert planned(checkpoint, mixed, 4, ost.SafetensorsOptions()).plan().cooperation.possible_arrays == 0


def test_stacks_and_transposes_are_cut_where_storage_is(path):
    checkpoint = open_checkpoint(path)
    views = [checkpoint.view(f"stack.{number}").T for number in range(2)]
    stacked = views[0].stack(views, axis=1)  # (4096, 2, 4096): the first dimension is innermost in storage
    checkpoint = at(REMOTE, checkpoint, mapped={"stack": stacked})
    sharding = NamedSharding(MESH, PartitionSpec(("process", "local")))
    target = {"stack": jax.ShapeDtypeStruct((4096, 2, 4096), "bfloat16", sharding=sharding)}
    found = planned(checkpoint, target, 4, ost.SafetensorsOptions(cooperative=True))
    (one,) = found.chosen
    # Half of the processes read the first tensor, in blocks of its rows.
    assert one.way.exchange.parts == ((), (2,), (0, 1))
    assert [cost.read_bytes for cost in found.plan().processes] == [2 * 4096 * 4096 * 2 // 4] * 4


@pytest.mark.parametrize("value", ["on", None, 2])
def test_options_are_checked(value):
    with pytest.raises(ost.SafetensorsError, match="cooperative is"):
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
        assert asked(None, args).processes == found, args
    with jax.set_mesh(mesh):
        assert asked(None, ocp.ArrayRestoreArgs(sharding=abstract)).processes == {0}
    assert asked(None, ocp.ArrayRestoreArgs(sharding="x")) is None
