"""Planning and verifying through the public names; plans against what a restore really reads."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, tensor
from tests.support.files import random_bits, write, write_indexed

RNG = np.random.default_rng(0)
TENSORS = [
    {"wide": random_bits(RNG, (64, 16384), np.dtype("f4")), "small": random_bits(RNG, (8,), np.dtype("i1"))},
    {"deep": random_bits(RNG, (8, 16, 24), np.dtype("f2")), "tall": random_bits(RNG, (20000, 8), np.dtype("f4"))},
]
ARRAYS = TENSORS[0] | TENSORS[1]
SPECS = {
    "leading": {"wide": P("y"), "small": P("y"), "deep": P("y"), "tall": P("x")},
    "inner": {"wide": P(None, "y"), "small": P(), "deep": P(None, "y"), "tall": P(None, ("x", "y"))},
    "both": {"wide": P("x", "y"), "small": P("x"), "deep": P("y", "x"), "tall": P("y", "x")},
    "replicated": dict.fromkeys(ARRAYS, P()),
}


@pytest.fixture
def directory(tmp_path):
    write_indexed(tmp_path, TENSORS)
    return tmp_path


def target(mesh, specs, dtype=None):
    return {
        name: jax.ShapeDtypeStruct(array.shape, dtype or array.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, array in ARRAYS.items()
    }


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("dtype", "max_gap_bytes"), [(None, 0), (jnp.bfloat16, 16384), (None, 10**9)])
def test_a_plan_says_what_a_restore_reads(directory, mesh, specs, dtype, max_gap_bytes, scalars):
    wanted = target(mesh, specs, dtype)
    options = ost.SafetensorsOptions(max_gap_bytes=max_gap_bytes)
    (cost,) = ost.plan_restore(directory, wanted, options=options).processes
    restored = ost.SafetensorsHandler(options=options).restore(
        epath.Path(directory), ost.SafetensorsRestore(item=wanted)
    )
    expected = {"bytes_read": cost.read_bytes, "num_reads": cost.num_requests, "storage_reads": cost.num_requests}
    assert {name: scalars[f"/jax/orbax/read/safetensors/{name}"] for name in expected} == expected
    for name, array in ARRAYS.items():
        with np.errstate(all="ignore"):
            expected = array.astype(dtype or array.dtype)
        assert np.asarray(restored[name]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_a_plan_needs_no_devices(directory, mesh, specs):
    abstract = target(AbstractMesh((2, 4), ("x", "y")), specs)
    plan = ost.plan_restore(directory, abstract)
    assert plan == ost.plan_restore(directory, target(mesh, specs))
    dealt = ost.plan_restore(directory, abstract, process_count=8, all_processes=True)
    assert [cost.process for cost in dealt.processes] == list(range(8))
    assert sum(cost.needed_bytes for cost in dealt.processes) >= plan.processes[0].needed_bytes
    assert plan.total_params == sum(array.size for array in ARRAYS.values())
    assert plan.total_bytes == sum(array.nbytes for array in ARRAYS.values())


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_of_many_processes_a_plan_looks_at_four(directory, specs):
    abstract = target(AbstractMesh((2, 4), ("x", "y")), specs)
    everyone = ost.plan_restore(directory, abstract, process_count=8, all_processes=True)
    some = ost.plan_restore(directory, abstract, process_count=8)
    assert [cost.process for cost in some.processes] == [0, 2, 5, 7]
    assert some.processes == tuple(everyone.processes[cost.process] for cost in some.processes)
    assert (some.process_count, everyone.process_count) == (8, 8)
    # Sums are over the processes that a plan looks at.
    for plan in (some, everyone):
        read, needed = (
            sum(getattr(cost, figure) for cost in plan.processes) for figure in ("read_bytes", "needed_bytes")
        )
        assert sum(leaf.read_bytes - leaf.needed_bytes for leaf in plan.over_reads) <= read - needed


def test_leaves_that_make_most_of_the_requests_are_named(directory):
    abstract = target(AbstractMesh((2, 4), ("x", "y")), SPECS["inner"])
    plan = ost.plan_restore(directory, abstract, process_count=2, options=ost.SafetensorsOptions(max_gap_bytes=0))
    requests = sum(cost.num_requests for cost in plan.processes)
    assert [leaf.name for leaf in plan.most_requests] == ["tall"]
    assert plan.most_requests[0].num_requests > 0.9 * requests
    replicated = target(AbstractMesh((2, 4), ("x", "y")), SPECS["replicated"])
    assert ost.plan_restore(directory, replicated, process_count=2).most_requests == ()


def test_leaves_that_read_too_much_are_named_in_the_order_of_what_they_waste(tmp_path):
    """In bytes: a small leaf may read more times what it needs."""
    write(tmp_path / "x.safetensors", {"a": np.zeros((8, 8), np.float32), "b": np.zeros((64, 8), np.float32)})
    mesh = AbstractMesh((4, 2), ("x", "y"))
    specs = {"a": P(None, "x"), "b": P(None, "y")}
    args = {name: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, spec)) for name, spec in specs.items()}
    plan = ost.plan_restore(tmp_path, args, process_count=8)
    assert [(leaf.name, round(leaf.over_read)) for leaf in plan.over_reads] == [("b", 2), ("a", 4)]


def test_a_printed_plan_has_its_main_figures(tmp_path):
    write(tmp_path / "x.safetensors", {"a": np.zeros((8, 1024), np.float32), "b": np.zeros((8, 64), np.float32)})
    mesh = AbstractMesh((2,), ("x",))
    specs = {"a": P("x"), "b": P(None, "x")}
    args = {name: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, spec)) for name, spec in specs.items()}
    plan = ost.plan_restore(tmp_path, args, process_count=2)
    assert str(plan).splitlines() == [
        "restore of 34.0 KiB: arrays 2, parameters 8,704, processes 2",
        "process 0 reads most: 17.9 KiB, requests 2, over-read 1.05",
        "over-read most: b, reads 3.8 KiB and needs 2.0 KiB",
        "as stored: 34.0 KiB",
    ]


def test_a_way_on_the_host_says_how_few_bytes_are_too_few(tmp_path):
    write(tmp_path / "x.safetensors", {"w": np.zeros((8, 4), np.float32)})
    family = Family("turned", (), lambda config: {"w": tensor("w", (8, 4)).T})
    plan = ost.plan_restore(tmp_path, NamedSharding(AbstractMesh((1,), ("x",)), P()), family=family)
    assert [each.way for each in plan.ways] == ["reordered on the host: under 128 MiB for each program"]


def test_leading_shards_cost_exactly_their_bytes(directory):
    abstract = target(AbstractMesh((2, 4), ("x", "y")), dict.fromkeys(ARRAYS, P("x")))
    plan = ost.plan_restore(directory, abstract, process_count=2)
    for cost in plan.processes:
        assert cost.needed_bytes == cost.read_bytes == plan.total_bytes // 2 == cost.destination_bytes
        assert cost.over_read == 1.0
    assert plan.largest_shard == plan.smallest_shard
    assert plan.largest_shard.params == plan.total_params // 2


def test_a_plan_of_restore_args(directory, mesh):
    args = {name: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, P())) for name in ARRAYS}
    assert ost.plan_restore(directory, args).total_params == sum(array.size for array in ARRAYS.values())


def test_a_plan_of_a_part(directory, mesh):
    plan = ost.plan_restore(directory, {"small": target(mesh, SPECS["both"])["small"]})
    assert (plan.num_arrays, plan.total_bytes) == (1, 8)
    assert [file.file for file in plan.processes[0].files] == [str(directory / "model-00001-of-00002.safetensors")]


def test_a_plan_of_numpy_arrays_and_single_devices(directory):
    args = {"small": ocp.RestoreArgs(), "wide": ocp.ArrayRestoreArgs()}
    plan = ost.plan_restore(directory, args, process_count=3)
    assert [cost.needed_bytes for cost in plan.processes] == [8 + 64 * 16384 * 4, 8, 8]


def test_a_plan_with_padding(tmp_path):
    write(tmp_path / "x.safetensors", {"w": ARRAYS["small"]})
    sharding = NamedSharding(AbstractMesh((4,), ("x",)), P("x"))
    args = {"w": ocp.ArrayRestoreArgs(sharding=sharding, global_shape=(16,), strict=False)}
    plan = ost.plan_restore(tmp_path, args, process_count=4)
    assert [(cost.needed_bytes, cost.destination_bytes) for cost in plan.processes] == [(4, 4), (4, 4), (0, 4), (0, 4)]


@pytest.mark.parametrize("count", [0, 2.5, True])
def test_a_plan_for_so_many_processes_as_there_cannot_be(directory, count):
    with pytest.raises(ost.SafetensorsError, match="process_count is .*, must be an integer of at least 1"):
        ost.plan_restore(directory, dict.fromkeys(ARRAYS, ocp.RestoreArgs()), process_count=count)


def test_a_plan_that_does_not_fit(directory):
    sharding = NamedSharding(AbstractMesh((4,), ("x",)), P(None, "x"))
    with pytest.raises(ost.TensorMismatchError, match=r"'small': shape .* cannot be sharded"):
        ost.plan_restore(directory, {"small": ocp.ArrayRestoreArgs(sharding=sharding)})
    with pytest.raises(ost.TensorMismatchError, match="nearest: 'small'"):
        ost.plan_restore(directory, {"smal": jax.ShapeDtypeStruct((8,), jnp.int8)})


def test_a_plan_and_a_restore_of_a_scalar_that_is_sharded_say_the_same(tmp_path, mesh):
    write(tmp_path / "x.safetensors", {"step": np.array(3, np.int32)})
    args = {"step": ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, P("x")))}
    message = r"^'step': shape \(\) cannot be sharded as P.*: expected a partition of at most 0 entries$"
    with pytest.raises(ost.TensorMismatchError, match=message):
        ost.plan_restore(tmp_path, args)
    with pytest.raises(ost.TensorMismatchError, match=message):
        ost.SafetensorsHandler().restore(epath.Path(tmp_path), ost.SafetensorsRestore(restore_args=args))


@pytest.mark.process
def test_planning_starts_no_backend(directory):
    """A laptop plans for 512 devices: neither a plan nor metadata may ask for one."""
    code = f"""
import jax, json
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
import orbax_safetensors as ost
from jax._src import xla_bridge
mesh = AbstractMesh((8, 64), ("x", "y"))
target = {{"wide": jax.ShapeDtypeStruct((64, 16384), "float32", sharding=NamedSharding(mesh, P("x", "y"))),
    "small": jax.ShapeDtypeStruct((8,), "int8")}}
plan = ost.plan_restore({str(directory)!r}, target, process_count=64)
ost.SafetensorsHandler().metadata({str(directory)!r})
assert not xla_bridge._backends, xla_bridge._backends
print(plan.to_json())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [cost["process"] for cost in plan["processes"]] == [0, 21, 42, 63]
    assert plan["largest_shard"] == {"params": 2056, "nbytes": 8200}


def test_verify(directory):
    assert ost.verify(directory) == []
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"")
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert [type(fault) for fault in ost.verify(directory)] == [ost.MissingError, ost.HeaderError]


@pytest.mark.parametrize("path", ["nowhere", "nowhere.safetensors", "empty"])
def test_verify_raises_if_there_is_nothing(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ost.StorageError, match=path):
        ost.verify(tmp_path / path)


def test_verify_raises_if_an_object_is_not_there(gcs):
    with pytest.raises(ost.StorageError, match="nowhere"):
        ost.verify(f"{gcs.url}/nowhere.safetensors", options=ost.SafetensorsOptions(storage_options=gcs.options))
    with pytest.raises(ost.StorageError, match="nowhere"):
        ost.verify(f"{gcs.url}/nowhere", options=ost.SafetensorsOptions(storage_options=gcs.options))


def test_targets_of_load(tmp_path):
    """A sharding for all arrays, and a function, cost what the trees cost that they stand for."""
    tensors = {"a.w": np.zeros((16, 8), np.float32), "b": np.zeros((8,), np.float32)}
    write(tmp_path / "model.safetensors", tensors)
    mesh = jax.sharding.AbstractMesh((8,), ("d",))
    rows, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())

    def planned(target):
        return ost.plan_restore(tmp_path, target, process_count=4)

    def tree(of):
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of(name)) for name, x in tensors.items()}

    assert planned(rows) == planned(tree(lambda name: rows))
    by_name = planned(lambda name, shape: rows if name == "a.w" else whole)
    assert by_name == planned(tree(lambda name: rows if name == "a.w" else whole))
    assert by_name.processes[0].needed_bytes == 16 * 8 * 4 // 4 + 8 * 4
