"""What `test_restore.py` runs in several processes: one scenario after the other, all of them in one start.

A scenario asserts what holds for its own process. What it returns has to be the same in every process.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

# Orbax exports the type, and not the way to make one from a sharding.
import orbax_safetensors as ost
from tests.support.checkpoints import DTYPES, SMALL, Reference
from tests.support.files import nothing_left
from tests.support.measure import different_shards, measured

SCENARIOS: dict[str, Callable[[Site], Any]] = {}


class Site:
    """Where a scenario runs: the checkpoint, what the reference reads of it, and this process's place."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "3" / "params"
        self.expected = Reference(self.directory).tensors
        self.index = jax.process_index()
        self.count = jax.process_count()

    def mesh(self) -> Mesh:
        """All devices; each row belongs to one process."""
        return Mesh(np.array(jax.devices()).reshape(self.count, -1), ("x", "y"))

    def check(self, restored: Any, names: list[str]) -> None:
        """Fails where a leaf is not what the reference reads, in this process's shards."""
        flat = flatten(restored)
        assert sorted(flat) == sorted(names), sorted(flat)
        for name, value in flat.items():
            if isinstance(value, jax.Array):
                assert not (wrong := different_shards(value, self.expected[name])), (name, wrong)
            else:
                assert value.dtype == self.expected[name].dtype, (name, value.dtype)
                assert value.shape == self.expected[name].shape, (name, value.shape)
                assert value.tobytes() == self.expected[name].tobytes(), name


def scenario(function: Callable[[Site], Any]) -> Callable[[Site], Any]:
    SCENARIOS[function.__name__] = function
    return function


def run(root: str) -> dict[str, dict[str, Any]]:
    """By the name of each scenario what it returned, and the traceback with which it failed."""
    site = Site(Path(root))
    out: dict[str, dict[str, Any]] = {}
    for name, function in SCENARIOS.items():
        try:
            out[name] = {"value": function(site), "failure": None}
        except Exception:
            out[name] = {"value": None, "failure": traceback.format_exc()}
        multihost_utils.sync_global_devices(name)
    return out


# Layouts of the small model: some leaves sharded by rows, some by columns, some replicated.
SPECS = {
    "layer.kernel": PartitionSpec("x", "y"),
    "layer.bias": PartitionSpec("y"),
    "layer.scale": PartitionSpec(None, ("x", "y")),
    "table": PartitionSpec(("x", "y")),
    "mask": PartitionSpec("x"),
    "count": PartitionSpec(),
}


def flatten(tree: Any) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of dicts whose key paths are the names of `leaves`."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *groups, last = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = leaf
    return tree


def structs(mesh: Mesh, specs: Mapping[str, PartitionSpec] | None = None) -> dict[str, Any]:
    return nested({name: struct(name, NamedSharding(mesh, spec)) for name, spec in (specs or SPECS).items()})


def struct(name: str, sharding: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    dtype, shape = SMALL[name]
    return jax.ShapeDtypeStruct(shape, DTYPES[dtype], sharding=sharding)


def restore_args(mesh: Mesh) -> dict[str, Any]:
    return nested({name: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, spec)) for name, spec in SPECS.items()})


def restore(site: Site, item: Any = None, args: Any = None) -> tuple[Any, dict[str, Any]]:
    """A restore by the handler alone, and what it cost this process."""
    request = ost.SafetensorsRestore(item=item, restore_args=args, partial_restore=True)
    return measured(lambda: ost.SafetensorsHandler().restore(site.directory, request))


def check_cost(site: Site, target: Any, cost: Mapping[str, Any]) -> None:
    """Fails where a restore of `target` cost this process anything else than the plan for it says."""
    plan = ost.plan_restore(site.directory, target)
    assert len(plan.processes) == site.count, f"{len(plan.processes)} processes in the plan, {site.count} are there"
    planned = plan.processes[site.index]
    found = cost["bytes_read"], cost["storage_reads"]
    assert found == ([planned.read_bytes], [planned.num_requests]), f"planned {planned}, found {cost}"


def error_of(call: Callable[[], Any]) -> str:
    """Message of the `TensorMismatchError` that `call` raises."""
    try:
        found = call()
    except ost.TensorMismatchError as error:
        return str(error)
    raise AssertionError(f"expected TensorMismatchError, found {found!r}")


# Through Orbax.


@scenario
def checkpointer_with_restore_args(site: Site) -> None:
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        args = restore_args(site.mesh())
        restored, cost = measured(lambda: checkpointer.restore(site.directory, restore_args=args, partial_restore=True))
    site.check(restored, list(SPECS))
    check_cost(site, args, cost)


@scenario
def checkpoint_manager(site: Site) -> None:
    args = ost.SafetensorsRestore(item=structs(site.mesh()), partial_restore=True)
    with ocp.CheckpointManager(site.root, item_handlers={"params": ost.SafetensorsHandler()}) as manager:
        assert manager.all_steps() == [3]
        restored, cost = measured(lambda: manager.restore(3, args=ocp.args.Composite(params=args)))
        site.check(restored["params"], list(SPECS))
        check_cost(site, args.item, cost)
        metadata = manager.item_metadata(3)["params"]
        assert {name: leaf.shape for name, leaf in flatten(metadata.tree).items()} == {
            name: shape for name, (_, shape) in SMALL.items()
        }


@scenario
def load_with_a_function(site: Site) -> None:
    def sharding(name: str, shape: tuple[int, ...]) -> NamedSharding | None:
        return NamedSharding(site.mesh(), SPECS[name]) if name in SPECS else None

    restored = ost.load(site.directory, sharding)
    site.check(restored, list(site.expected))
    for name, spec in SPECS.items():
        assert restored[name].sharding == NamedSharding(site.mesh(), spec), (name, restored[name].sharding)
    assert "pass a mesh, as ost.load(path, mesh)" in error_of(lambda: ost.load(site.directory))


@scenario
def a_description_is_a_target(site: Site) -> list[str]:
    """Of arrays over all processes, and of NumPy arrays; a process describes alone, and so more often than others."""

    def sharding(name: str, shape: tuple[int, ...]) -> NamedSharding | None:
        return NamedSharding(site.mesh(), SPECS[name]) if name in SPECS else None

    for _ in range(1 + site.index):
        described = ost.abstract(site.directory, sharding)
    restored = ost.load(site.directory, described)
    site.check(restored, list(site.expected))
    for name, leaf in described.items():
        assert isinstance(leaf, jax.ShapeDtypeStruct if name in SPECS else np.ndarray), name
        assert getattr(leaf, "sharding", None) == getattr(restored[name], "sharding", None), name
    assert "has no saved tree" in error_of(lambda: ost.abstract(site.directory))
    return sorted(described)


# Leaves of every kind.


@scenario
def plan_of_numpy_leaves_beside_arrays(site: Site) -> None:
    args = restore_args(site.mesh())
    args["table"] = ocp.RestoreArgs(restore_type=np.ndarray)
    args["count"] = ocp.RestoreArgs(restore_type=int)
    restored, cost = restore(site, args=args)
    assert restored.pop("count") == site.expected["count"]
    site.check(restored, [name for name in SPECS if name != "count"])
    check_cost(site, args, cost)


@scenario
def padded_and_cut_shapes(site: Site) -> None:
    """Nine rows as sixteen, of which the last are zeros that nobody reads, and as eight."""
    sharding = NamedSharding(site.mesh(), PartitionSpec(("x", "y")))
    for rows in (16, 8):
        args = {"uneven": ocp.ArrayRestoreArgs(sharding=sharding, global_shape=(rows, 56), strict=False)}
        restored, cost = restore(site, args=args)
        expected = np.zeros((rows, 56), np.float32)
        expected[:9] = site.expected["uneven"][:rows]
        assert not (wrong := different_shards(restored["uneven"], expected)), wrong
        check_cost(site, args, cost)
        own = range(site.index * rows // site.count, (site.index + 1) * rows // site.count)
        assert cost["bytes_read"] == [len([row for row in own if row < 9]) * 56 * 4], cost


# Devices of some processes.


def _rows(site: Site) -> dict[str, Mesh]:
    """For each process a mesh of its devices alone."""
    return {f"process {row}": Mesh(site.mesh().devices[row], ("d",)) for row in range(site.count)}


@scenario
def meshes_of_one_process(site: Site) -> None:
    """Who has no shard reads nothing, and has an array without shards."""
    for row, mesh in enumerate(_rows(site).values()):
        item = {"table": struct("table", NamedSharding(mesh, PartitionSpec("d")))}
        restored, cost = restore(site, item)
        site.check(restored, ["table"])
        check_cost(site, item, cost)
        assert len(restored["table"].addressable_shards) == (mesh.size if row == site.index else 0)
        assert cost["bytes_read"] == [site.expected["table"].nbytes if row == site.index else 0], cost


@scenario
def replicated_over_one_process(site: Site) -> None:
    for row, mesh in enumerate(_rows(site).values()):
        item = {"table": struct("table", NamedSharding(mesh, PartitionSpec()))}
        restored, cost = restore(site, item)
        site.check(restored, ["table"])
        assert cost["bytes_read"] == [site.expected["table"].nbytes if row == site.index else 0], cost


@scenario
def single_devices(site: Site) -> None:
    """A device of the last process, then one of the first."""
    for name, device in (("table", jax.devices()[-1]), ("mask", jax.devices()[0])):
        item = {name: struct(name, SingleDeviceSharding(device))}
        restored, cost = restore(site, item)
        site.check(restored, [name])
        own = device.process_index == site.index
        assert cost["bytes_read"] == [site.expected[name].nbytes if own else 0], cost


@scenario
def plan_of_a_leaf_for_each_process(site: Site) -> None:
    """As the stages of a pipeline: every leaf lives in one process, and no two in the same."""
    names = [name for name in SPECS if site.expected[name].size % 4 == 0 and site.expected[name].shape[0] % 4 == 0]
    meshes = list(_rows(site).values())
    item = nested(
        {
            name: struct(name, NamedSharding(meshes[-1 - number], PartitionSpec("d")))
            for number, name in enumerate(names[: site.count])
        }
    )
    restored, cost = restore(site, item)
    site.check(restored, names[: site.count])
    check_cost(site, item, cost)


@scenario
def plan_of_single_devices(site: Site) -> None:
    """A leaf on a device of the last process, one on a device of the first."""
    item = {
        "table": struct("table", SingleDeviceSharding(jax.devices()[-1])),
        "mask": struct("mask", SingleDeviceSharding(jax.devices()[0])),
    }
    planned = [process.read_bytes for process in ost.plan_restore(site.directory, item).processes]
    expected = [site.expected["mask"].nbytes, *[0] * (site.count - 2), site.expected["table"].nbytes]
    assert planned == expected, planned


# One replica reads.

BROADCAST = {
    "plain.f32": PartitionSpec(None, "rest"),
    "plain.bf16": PartitionSpec("rest"),
    "table": PartitionSpec("rest"),
    "count": PartitionSpec(),
}


def _replicas(site: Site) -> Mesh:
    """Two replicas of half of the processes each."""
    return Mesh(np.array(jax.devices()).reshape(2, -1), ("replica", "rest"))


def _broadcast(mesh: Mesh, specs: Mapping[str, PartitionSpec]) -> dict[str, Any]:
    """Arguments for leaves that the first replica of `mesh` reads."""
    kind = ocp.type_handlers.SingleReplicaArrayRestoreArgs
    return nested({name: kind(sharding=NamedSharding(mesh, spec)) for name, spec in specs.items()})


def _unless_receiving(site: Site, specs: Mapping[str, PartitionSpec]) -> list[int]:
    """What a process of the first replica reads of its own shards, and nothing for one that receives."""
    item = structs(_replicas(site), specs)
    planned = ost.plan_restore(site.directory, item).processes[site.index]
    return [planned.read_bytes if site.index < site.count // 2 else 0]


@scenario
def one_replica_reads(site: Site) -> None:
    """Both have all values and the sharding that was asked for, and the second reads nothing."""
    args = _broadcast(_replicas(site), BROADCAST)
    restored, cost = restore(site, args=args)
    site.check(restored, list(BROADCAST))
    for name, array in flatten(restored).items():
        assert array.sharding == NamedSharding(_replicas(site), BROADCAST[name]), (name, array.sharding)
    assert cost["bytes_read"] == _unless_receiving(site, BROADCAST), cost
    check_cost(site, args, cost)


@scenario
def one_replica_reads_beside_normal_leaves(site: Site) -> None:
    mesh = _replicas(site)
    received = {"table": PartitionSpec("rest"), "plain.bf16": PartitionSpec(), "count": PartitionSpec()}
    args = _broadcast(mesh, received)
    args["mask"] = ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, PartitionSpec("replica")))
    args["layer"] = {"kernel": ocp.RestoreArgs(restore_type=np.ndarray)}
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        restored, cost = measured(lambda: checkpointer.restore(site.directory, restore_args=args, partial_restore=True))
    site.check(restored, [*received, "mask", "layer.kernel"])
    (own,) = _unless_receiving(site, received)
    own += site.expected["mask"].nbytes // 2 + site.expected["layer.kernel"].nbytes
    assert cost["bytes_read"] == [own], (cost, own)


@scenario
def one_replica_reads_where_a_leaf_has_no_replicas(site: Site) -> None:
    """Each process restores its own shards of a leaf that is sharded over the replicas, too, or all refuse."""
    args = _broadcast(_replicas(site), {"table": PartitionSpec(("replica", "rest"))})
    try:
        restored, _ = restore(site, args=args)
    except ost.TensorMismatchError:
        return
    site.check(restored, ["table"])


@scenario
def one_replica_reads_where_there_is_no_mesh(site: Site) -> str:
    sharding = SingleDeviceSharding(jax.devices()[0])
    args = {"table": ocp.type_handlers.SingleReplicaArrayRestoreArgs(sharding=sharding)}
    message = error_of(lambda: restore(site, args=args))
    assert "'table'" in message, message
    return message


# Errors: the same in every process, and nothing is left waiting.


@scenario
def nothing_asked_for(site: Site) -> str:
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        message = error_of(lambda: checkpointer.restore(site.directory))
    assert f"{site.count} processes" in message, message
    return message


@scenario
def leaf_without_sharding(site: Site) -> str:
    item = {"table": struct("table"), "mask": struct("mask", NamedSharding(site.mesh(), PartitionSpec("x")))}
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        args = ost.SafetensorsRestore(item=item, partial_restore=True)
        message = error_of(lambda: checkpointer.restore(site.directory, args=args))
        by_args = {
            "table": ocp.ArrayRestoreArgs(),
            "mask": ocp.ArrayRestoreArgs(mesh=site.mesh(), mesh_axes=SPECS["mask"]),
        }
        other = error_of(lambda: checkpointer.restore(site.directory, restore_args=by_args, partial_restore=True))
    for text in (message, other):
        assert all(part in text for part in ("'table'", "no sharding", f"{site.count} processes")), text
    return message + other


@scenario
def missing_tensor_and_on_to_a_valid_restore(site: Site) -> list[str]:
    messages = []
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        for _ in range(2):
            item = structs(site.mesh())
            item["tabel"] = item.pop("table")
            wrong = ost.SafetensorsRestore(item=item, partial_restore=True)
            messages.append(error_of(lambda wrong=wrong: checkpointer.restore(site.directory, args=wrong)))
            assert all(name in messages[-1] for name in ("'tabel'", "'table'")), messages
            right = ost.SafetensorsRestore(item=structs(site.mesh()), partial_restore=True)
            site.check(checkpointer.restore(site.directory, args=right), list(SPECS))
    return messages


@scenario
def uneven_sharding(site: Site) -> list[str]:
    """JAX has no arrays whose dimensions do not divide.

    Processes that hold nothing of such a leaf refuse it as well: they would wait for the others forever.
    """
    messages = []
    specs = (PartitionSpec("x"), PartitionSpec(("x", "y")), PartitionSpec(("y", "x"), None))
    shardings = [NamedSharding(site.mesh(), spec) for spec in specs]
    shardings += [NamedSharding(mesh, PartitionSpec("d")) for mesh in _rows(site).values()]
    for sharding in shardings:
        try:
            jax.make_array_from_callback((9, 56), sharding, lambda index: np.zeros((9, 56))[index], dtype=np.float32)
        except ValueError:
            pass
        else:
            raise AssertionError("JAX shards unevenly: restore such leaves")
        item = {"uneven": struct("uneven", sharding), "mask": struct("mask", NamedSharding(site.mesh(), SPECS["mask"]))}
        with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
            args = ost.SafetensorsRestore(item=item, partial_restore=True)
            messages.append(error_of(lambda args=args: checkpointer.restore(site.directory, args=args)))
        assert all(part in messages[-1] for part in ("'uneven'", "(9, 56)")), messages
    return messages


# What stays.


@scenario
def value_that_does_not_fit(site: Site) -> None:
    """Found while bytes are on their way, by each process in its own shard."""
    args = {"wide": ocp.ArrayRestoreArgs(sharding=NamedSharding(site.mesh(), PartitionSpec("x")))}
    message = error_of(lambda: restore(site, args=args))
    assert "'wide'" in message, message


@scenario
def nothing_stays_open_by_orbax(site: Site) -> None:
    """Orbax keeps threads of its own for the next time; no files."""
    right = ost.SafetensorsRestore(item=structs(site.mesh()), partial_restore=True)
    wrong = ost.SafetensorsRestore(item={"tabel": struct("table", NamedSharding(site.mesh(), PartitionSpec()))})
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.restore(site.directory, args=right)
        with nothing_left(site.directory):
            for _ in range(3):
                checkpointer.restore(site.directory, args=right)
                error_of(lambda: checkpointer.restore(site.directory, args=wrong))
