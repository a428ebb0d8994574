"""Which leaves are read in parts, that parts cover a leaf, and that devices make its shards of them."""

from math import prod
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import orbax_safetensors as ost
from orbax_safetensors.devices.sharding import device_boxes
from orbax_safetensors.geometry.view import View
from orbax_safetensors.restore import parts
from orbax_safetensors.restore.cooperative import _Leaf, _shards
from orbax_safetensors.restore.leaf_request import leaf_request
from orbax_safetensors.restore.parts import parts_of
from orbax_safetensors.restore.target import Target
from tests.support.files import DTYPES, random_bits
from tests.support.measure import different_shards
from tests.support.strategies import examples

MESH = AbstractMesh((4, 2), ("process", "local"))
EVERYWHERE = ("process", "local")


def target(view, sharding, dtype=np.uint16, **fields):
    return Target("leaf", view, view.shape, np.dtype(dtype), jax.Array, sharding, lossless=False, **fields)


def found(view, *spec, mesh=MESH, processes=4):
    return parts_of(target(view, NamedSharding(mesh, PartitionSpec(*spec))), processes)


def found_among(owners, leaf):
    """The parts of a leaf whose devices belong to these processes."""
    parts._parts.cache_clear()
    with mock.patch.object(parts, "device_owners", return_value=owners):
        cut = parts_of(leaf, max(owners) + 1)
    parts._parts.cache_clear()
    return cut


def tensor(*shape):
    return View.tensor("a", shape, np.dtype(np.uint16))


def stack(number, *shape):
    views = [View.tensor(f"{layer}", shape, np.dtype(np.uint16)) for layer in range(number)]
    return views[0].stack(views)


@pytest.mark.parametrize(
    ("view", "spec"),
    [
        (tensor(64, 48), ()),
        (tensor(64, 48), ("local",)),  # replicated over processes
        (tensor(64, 48), (None, EVERYWHERE)),
        (tensor(64, 48), (None, "process")),
        (tensor(64, 48), ("local", "process")),
        (tensor(64, 48), (("local", "process"),)),  # a process holds rows that are not neighbours
        (tensor(64, 48).T, (EVERYWHERE,)),
        (tensor(4, 64, 48), (None, EVERYWHERE)),
        (stack(3, 64, 48), (None, None, "process")),
        (stack(8, 64, 48), (None, None, EVERYWHERE)),
        (tensor(8), ()),
    ],
)
def test_leaves_of_which_processes_would_read_the_same_stretches(view, spec):
    assert found(view, *spec) is not None
    assert found(view, *spec, processes=1) is None


@pytest.mark.parametrize(
    ("view", "spec"),
    [
        (tensor(64, 48), (EVERYWHERE,)),
        (tensor(64, 48), ("process",)),  # devices of one process hold the same
        (tensor(64, 48), ("process", "local")),  # which hold whole rows together
        (tensor(64, 48).T, (None, EVERYWHERE)),
        (tensor(1, 64, 48), (None, EVERYWHERE)),
        (tensor(3, 64, 48), (None, EVERYWHERE)),  # three rows in storage: parts would be the same
        (tensor(4, 64, 48), ("process", "local")),
        (stack(3, 64, 48), (None, EVERYWHERE)),  # one stretch of each tensor
        (stack(8, 64, 48), ("process", None, "local")),
        (tensor(), ()),
        (tensor(9), ()),  # too few for eight devices
        (tensor(9, 3), ()),
        (tensor(0, 8), ()),
    ],
)
def test_leaves_of_which_each_process_holds_stretches_of_its_own(view, spec):
    assert found(view, *spec) is None


def test_leaves_that_devices_do_not_exchange(mesh):
    named, replicated = NamedSharding(MESH, PartitionSpec()), NamedSharding(mesh, PartitionSpec())
    assert parts_of(target(tensor(64, 48), named), 4) is not None
    for leaf in (
        target(tensor(64, 48), Format(Layout((1, 0)), replicated)),
        target(tensor(64, 48), named.with_memory_kind("pinned_host")),
        target(tensor(64, 48), named, broadcast=True),
        Target("leaf", tensor(64, 48), (64, 48), np.dtype(np.uint16), np.ndarray, None, lossless=False),
    ):
        assert parts_of(leaf, 4) is None, leaf


def test_devices_of_only_some_processes():
    leaf = target(tensor(64, 48), NamedSharding(MESH, PartitionSpec()))
    assert found_among([0, 0, 1, 1, 2, 2, 3, 3], leaf) is not None
    assert found_among([0, 0, 1, 1, 3, 3, 3, 3], leaf) is None


@pytest.mark.parametrize(
    ("shape", "spec", "padded", "before"),
    [
        ((64, 8), (), (64, 8), (("0", "1", "2"), None)),  # replicated: everybody reads rows
        ((64, 8), (None, ("x", "y")), (64, 8), (("0", "1", "2"), None)),  # columns
        ((64, 8), ("y", "x"), (64, 8), (("1", "2", "0"), None)),  # the axes that cut rows in the end stay there
        # Few layers: both dimensions that are outermost.
        ((4, 64, 8), (None, None, ("x", "y")), (4, 64, 8), (("1", "2"), "0", None)),
        ((151655, 8), (None, ("x", "y")), (151656, 8), (("0", "1", "2"), None)),  # a row more
        ((9, 64), (), (9, 64), (None, ("0", "1", "2"))),  # rather than seven rows more, columns
    ],
)
def test_parts_are_cut_where_storage_is_contiguous(shape, spec, padded, before):
    cut = found(tensor(*shape), *spec, mesh=AbstractMesh((2, 4), ("x", "y")), processes=2)
    assert (cut.shape, cut.before) == (padded, PartitionSpec(*before))


def test_stacks_and_transposes_are_cut_where_storage_is():
    layers = [View.tensor(f"{layer}", (64, 48), np.dtype(np.uint16)).T for layer in range(2)]
    view = layers[0].stack(layers, axis=1)  # (48, 2, 64): the first dimension is innermost in storage
    cut = found(view, EVERYWHERE)
    # Half of the processes read the first tensor, in blocks of its rows.
    assert cut.before == PartitionSpec(None, "2", ("0", "1"))


def test_a_process_reads_neighbours_whatever_the_order_of_devices():
    cut = found_among([0, 1] * 4, target(tensor(64), NamedSharding(MESH, PartitionSpec())))
    # Device 2 has read part 1, and device 1 part 4.
    assert dict(cut.sends) == {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}


@examples(200)
@given(st.data())
def test_devices_make_every_shard_of_the_parts(data):
    axis_sizes = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3)
    sizes = data.draw(axis_sizes.filter(lambda found: 1 < prod(found) <= 8))
    count, names = prod(sizes), "xyz"[: len(sizes)]
    rank = data.draw(st.integers(0, 3))
    spec = [() for _ in range(rank)]
    for axis in data.draw(st.permutations(range(len(sizes)))):
        if rank and data.draw(st.booleans()):
            dimension = data.draw(st.integers(0, rank - 1))
            spec[dimension] = (*spec[dimension], names[axis])
    of_name = dict(zip(names, sizes, strict=True))
    lengths = st.sampled_from([1, 2, 4, 6, 8, 24, 31, 63])  # some are lengthened by one
    shape = tuple(prod(of_name[axis] for axis in entry) * data.draw(lengths) for entry in spec)
    order = data.draw(st.permutations(range(rank)))
    view = View.tensor("a", tuple(shape[dimension] for dimension in order), np.dtype(np.uint8))
    view = view.transpose(tuple(np.argsort(order).tolist()))
    dtype = data.draw(st.sampled_from([DTYPES[name] for name in ("BF16", "F8_E5M2", "F8_E4M3", "F32", "C64", "BOOL")]))
    mesh = Mesh(np.array(data.draw(st.permutations(jax.devices())))[:count].reshape(sizes), tuple(names))
    leaf = target(view, NamedSharding(mesh, PartitionSpec(*spec)), dtype)
    processes = data.draw(st.sampled_from([number for number in (2, 3, 4, 8) if count % number == 0]))
    owners = data.draw(st.permutations([number % processes for number in range(count)]))
    cut = found_among(owners, leaf)
    assume(cut is not None)
    owner_of = dict(zip(mesh.devices.flat, owners, strict=True))
    # In the order of the parts, each process reads neighbours, and together they read everything once: what differs in
    # `boxes` does not overlap.
    reads = [owner_of[device] for device in cut.sharding.mesh.devices.flat]
    assert reads == sorted(owners)
    boxes = device_boxes(cut.sharding, cut.shape)
    starts = [tuple(box.start[dimension] for dimension in order) for box in boxes]
    assert starts == sorted(starts)
    assert sum(box.volume for box in set(boxes)) == prod(cut.shape)
    host = random_bits(np.random.default_rng(0), shape, dtype)
    padded = np.zeros(cut.shape, dtype)
    padded[tuple(map(slice, shape))] = host
    read = jax.make_array_from_callback(cut.shape, cut.sharding, lambda index: padded[index])
    made = _shards(_Leaf(0, leaf, cut), read)
    assert made.sharding == leaf.sharding
    assert not different_shards(made, host)


# What a plan counts.


@pytest.fixture
def path(tmp_path):
    ost.save(tmp_path / "model", {"big": np.zeros((2048, 512), np.uint16), "bias": np.zeros(512, np.uint16), "one": 1})
    return tmp_path / "model"


def read_bytes(path, specs, processes=4, **options):
    """What each process reads, and holds in the end."""
    leaves = ost.open_checkpoint(path).leaves
    item = {
        name: jax.ShapeDtypeStruct(
            leaves[name].shape, leaves[name].dtype, sharding=NamedSharding(MESH, PartitionSpec(*spec))
        )
        for name, spec in specs.items()
    }
    plan = ost.plan_restore(path, item, process_count=processes, options=ost.SafetensorsOptions(**options))
    return [cost.read_bytes for cost in plan.processes], [cost.destination_bytes for cost in plan.processes]


BIG = 2048 * 512 * 2


def test_a_plan_counts_parts(path):
    assert read_bytes(path, {"big": ()}) == ([BIG] * 4, [BIG] * 4)
    assert read_bytes(path, {"big": ()}, cooperative=True) == ([BIG // 4] * 4, [BIG] * 4)
    inner = {"big": (None, EVERYWHERE)}
    assert sum(read_bytes(path, inner)[0]) > 3 * BIG
    assert read_bytes(path, inner, cooperative=True) == ([BIG // 4] * 4, [BIG // 4] * 4)
    assert read_bytes(path, {"bias": ()}, cooperative=True) == ([512 * 2 // 4] * 4, [512 * 2] * 4)


@pytest.mark.parametrize(
    ("specs", "options"),
    [
        ({"big": ()}, {"cooperative": True, "alias": True}),
        ({"big": (EVERYWHERE,)}, {"cooperative": True}),
        ({"one": ()}, {"cooperative": True}),
    ],
)
def test_a_plan_of_other_leaves_is_as_ever(path, specs, options):
    assert read_bytes(path, specs, **options) == read_bytes(path, specs)


def test_one_process_has_nobody_to_exchange_with(path):
    inner = {"big": (None, EVERYWHERE)}
    assert read_bytes(path, inner, processes=1, cooperative=True) == read_bytes(path, inner, processes=1)


# Before there is a checkpoint.


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
    with pytest.raises(ost.TensorMismatchError, match="expected a sharding"):
        leaf_request(None, ocp.ArrayRestoreArgs(sharding="x"))
