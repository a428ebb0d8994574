"""`SafetensorsTypeHandler` in the registry of Orbax's handler of trees: arrays are safetensors, all else is Orbax's."""

import asyncio
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from etils import epath
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.handlers import type_handler
from orbax_safetensors.save.job import SaveJob
from tests.support import hang
from tests.support.accelerator import accelerator
from tests.support.files import random_bits, write
from tests.support.type_handlers import assert_same, make_handler, sharded_args, th

RNG = np.random.default_rng(0)
KERNEL = random_bits(RNG, (16, 8), np.dtype("f4"))
BIAS = random_bits(RNG, (8,), np.dtype(ml_dtypes.bfloat16))


@pytest.fixture
def checkpointer():
    with ocp.Checkpointer(make_handler()) as checkpointer:
        yield checkpointer


@pytest.fixture
def params(mesh):
    return {
        "dense": {
            "kernel": jax.device_put(KERNEL, NamedSharding(mesh, P("x", "y"))),
            "bias": jax.device_put(BIAS, NamedSharding(mesh, P("y"))),
        }
    }


def test_a_handler_alone_saves_over_nothing(tmp_path, params):
    """Neither the arrays nor what Orbax says of the tree are those of the second save."""
    handler, directory = make_handler(), epath.Path(tmp_path)
    handler.save(directory, args=ocp.args.PyTreeSave(params))
    handler.finalize(directory)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ost.StorageError, match="already exists, and holds model.safetensors, .*; delete these files"):
        handler.save(directory, args=ocp.args.PyTreeSave({**params, "more": jnp.zeros(3)}))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


class Pair(NamedTuple):
    left: object
    right: object


@pytest.fixture
def mixed(params):
    """Leaves of every kind, in nodes of every kind."""
    return {
        "params": params,
        "opt": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params),
        "step": 3,
        "rate": 0.5,
        "name": "tiny",
        "table": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scale": np.float32(1.5),
        "nothing": None,
        "empty": {},
        "parts": [jnp.arange(5), (), Pair(jnp.float32(2.0), None)],
    }


@pytest.mark.both_devices
def test_a_mixed_tree(tmp_path, checkpointer, mixed, mesh):
    checkpointer.save(tmp_path / "saved", mixed)
    for axis in (0, -1):
        args = sharded_args(mixed, mesh, axis)
        restored = checkpointer.restore(tmp_path / "saved", item=mixed, restore_args=args)
        assert_same(restored, mixed)
        assert restored["params"]["dense"]["kernel"].sharding.is_equivalent_to(
            args["params"]["dense"]["kernel"].sharding, 2
        )
        assert (type(restored["step"]), type(restored["rate"])) == (int, float)
        assert restored["table"].dtype == np.int16


def test_arrays_are_in_safetensors_files_and_nothing_else_is(tmp_path, checkpointer, mixed):
    checkpointer.save(tmp_path / "saved", mixed)
    stored = safetensors.numpy.load_file(tmp_path / "saved" / "model.safetensors")
    assert stored.keys() == {
        "params.dense.kernel", "params.dense.bias", "opt.1.0.count", "opt.1.0.mu.dense.kernel",
        "opt.1.0.mu.dense.bias", "opt.1.0.nu.dense.kernel", "opt.1.0.nu.dense.bias", "parts.0", "parts.2.left",
    }  # fmt: skip
    assert stored["params.dense.kernel"].tobytes() == KERNEL.tobytes()
    assert stored["params.dense.bias"].tobytes() == BIAS.tobytes()
    assert ost.verify(tmp_path / "saved") == []


def test_our_own_handler_restores_the_arrays(tmp_path, checkpointer, mixed):
    checkpointer.save(tmp_path / "saved", mixed)
    item = {"params": mixed["params"]}
    with ocp.Checkpointer(ost.SafetensorsHandler()) as own:
        args = ost.SafetensorsRestore(item=item, partial_restore=True)
        assert_same(own.restore(tmp_path / "saved", args=args), item)


def test_with_nothing_said(tmp_path, checkpointer, mixed):
    checkpointer.save(tmp_path / "saved", mixed)
    assert_same(checkpointer.restore(tmp_path / "saved")["params"], mixed["params"])


@pytest.mark.both_devices
def test_casts_and_other_shapes(tmp_path, checkpointer, mesh):
    tree = {"w": jnp.arange(6, dtype=jnp.float32)}
    checkpointer.save(tmp_path / "saved", tree)
    sharding = NamedSharding(mesh, P("y"))
    args = {
        "w": ocp.ArrayRestoreArgs(sharding=sharding, dtype=jnp.bfloat16, global_shape=(8,), strict=False),
    }
    restored = checkpointer.restore(tmp_path / "saved", item=tree, restore_args=args)["w"]
    assert (restored.dtype, restored.shape) == (jnp.bfloat16, (8,))
    assert np.asarray(restored).tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert restored.sharding.is_equivalent_to(sharding, 1)


def test_a_cast_while_saving(tmp_path, checkpointer):
    tree = {"w": jnp.arange(6, dtype=jnp.float32), "v": jnp.arange(6, dtype=jnp.float32), "n": 3}
    save_args = {"w": ocp.SaveArgs(dtype=jnp.bfloat16), "v": ocp.SaveArgs(), "n": ocp.SaveArgs()}
    checkpointer.save(tmp_path / "saved", tree, save_args=save_args)
    stored = ost.open_checkpoint(tmp_path / "saved")
    assert {name: tensor.dtype for name, tensor in stored.tensors.items()} == {"w": jnp.bfloat16, "v": jnp.float32}


def test_a_part_of_a_tree(tmp_path, checkpointer, params, mesh):
    checkpointer.save(tmp_path / "saved", params)
    sharding = NamedSharding(mesh, P("y"))
    item = {"dense": {"kernel": ocp.PLACEHOLDER, "bias": jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=sharding)}}
    args = {"dense": {"kernel": ocp.PLACEHOLDER, "bias": ocp.ArrayRestoreArgs(sharding=sharding)}}
    registry = th.create_type_handler_registry(
        (jax.Array, ost.SafetensorsTypeHandler()), (type(ocp.PLACEHOLDER), th.get_type_handler(type(ocp.PLACEHOLDER)))
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as partial:
        restored = partial.restore(tmp_path / "saved", args=ocp.args.PyTreeRestore(item=item, restore_args=args))
    assert restored["dense"]["kernel"] is ocp.PLACEHOLDER
    assert np.asarray(restored["dense"]["bias"]).tobytes() == BIAS.tobytes()


@pytest.mark.parametrize("change", ["deleted", "donated"])
def test_what_happens_to_arrays_does_not_change_a_save_in_the_background(tmp_path, monkeypatch, params, change):
    """Even if it happens before the background looks at them."""
    run, go = SaveJob.run, threading.Event()

    def wait(job):
        assert go.wait(hang.SECONDS)
        run(job)

    monkeypatch.setattr(SaveJob, "run", wait)
    arrays = jax.tree.map(jnp.copy, params)  # in memory of their own, not that of `KERNEL`
    with ocp.AsyncCheckpointer(make_handler()) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ocp.args.PyTreeSave(arrays))
        for array in jax.tree.leaves(arrays):
            if change == "deleted":
                array.delete()
            else:
                jax.jit(lambda x: x * 0, donate_argnums=0)(array).block_until_ready()
        go.set()
        checkpointer.wait_until_finished()
    stored = safetensors.numpy.load_file(tmp_path / "saved" / "model.safetensors")
    assert stored["dense.kernel"].tobytes() == KERNEL.tobytes()
    assert stored["dense.bias"].tobytes() == BIAS.tobytes()


def test_no_copies_are_left_with_the_arrays(tmp_path, checkpointer):
    """In a layout of its own an array is copied for NumPy even on a CPU, as every array on an accelerator is."""
    layout = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    array = jax.device_put(np.ones((64, 64), np.float32), layout)
    checkpointer.save(tmp_path / "saved", {"w": array})
    held = [array, *(shard.data for shard in array.addressable_shards)]
    assert [copy for copy in held if copy._npy_value is not None] == []
    np.asarray(array)
    assert array._npy_value is not None  # where JAX would keep it


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_a_tree_without_arrays(tmp_path, use_ocdbt):
    tree = {"step": 3, "table": np.arange(4)}
    with ocp.Checkpointer(make_handler(use_ocdbt=use_ocdbt)) as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        assert not list((tmp_path / "saved").glob("*.safetensors"))
        assert_same(checkpointer.restore(tmp_path / "saved"), tree)


def test_beside_zarr(tmp_path, mixed, mesh):
    """Where Orbax's own leaves are one directory each."""
    del mixed["name"]
    with ocp.Checkpointer(make_handler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "saved", mixed)
        assert (tmp_path / "saved" / "table").is_dir()
        args = sharded_args(mixed, mesh, 0)
        assert_same(checkpointer.restore(tmp_path / "saved", item=mixed, restore_args=args), mixed)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(("use_ocdbt", "registered"), [(True, True), (False, False)])
def test_shardings_are_recorded_as_orbax_records_them(tmp_path, mesh, use_ocdbt, registered):
    tree = {
        "w": jax.device_put(KERNEL, NamedSharding(mesh, P("x", "y"))),
        "one": jax.device_put(KERNEL, jax.devices()[3]),
        "inner": [jax.device_put(KERNEL, NamedSharding(mesh, P(None, "x"))), 3],
    }

    def shardings(handler, directory):
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory, tree)
            restored = checkpointer.restore(directory)
            metadata = checkpointer.metadata(directory).item_metadata.tree
        return [[getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(found)] for found in (restored, metadata)]

    expected = shardings(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt), tmp_path / "stock")
    if registered:
        ost.register(save=True)
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
    else:
        handler = make_handler(use_ocdbt=use_ocdbt)
    try:
        assert shardings(handler, tmp_path / "ours") == expected
    finally:
        ost.unregister()
    assert list((tmp_path / "ours").glob("*.safetensors"))


def test_a_tensor_that_is_gone(tmp_path, checkpointer, params):
    checkpointer.save(tmp_path / "saved", params)
    write(tmp_path / "saved" / "model.safetensors", {"dense.bias": BIAS})
    with pytest.raises(ost.TensorMismatchError, match=r"dense\.kernel"):
        checkpointer.restore(tmp_path / "saved", item=params)
    with pytest.raises(ost.TensorMismatchError, match=r"dense\.kernel"):
        make_handler().metadata(epath.Path(tmp_path / "saved"))


def test_a_file_that_is_gone(tmp_path, checkpointer, params):
    checkpointer.save(tmp_path / "saved", params)
    (tmp_path / "saved" / "model.safetensors").unlink()
    with pytest.raises(ost.StorageError, match=r"saved: holds no \.safetensors file"):
        checkpointer.restore(tmp_path / "saved", item=params)


def test_a_sharding_that_does_not_divide(tmp_path, checkpointer, mesh):
    tree = {"w": jnp.arange(6)}
    checkpointer.save(tmp_path / "saved", tree)
    args = {"w": ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, P("y")))}
    with pytest.raises(ost.TensorMismatchError, match="'w'"):
        checkpointer.restore(tmp_path / "saved", item=tree, restore_args=args)


def test_leaves_of_one_name(tmp_path, checkpointer):
    tree = {"a": {"b": jnp.arange(3)}, "a.b": jnp.arange(4)}
    with pytest.raises(ValueError, match=r"a\.b"):
        checkpointer.save(tmp_path / "saved", tree)
    assert not (tmp_path / "saved").exists()


def test_arrays_of_a_dtype_that_cannot_be_stored(tmp_path, checkpointer):
    tree = {"w": jnp.arange(3), "key": jnp.zeros(4, jnp.float8_e4m3b11fnuz)}
    with pytest.raises(ost.TensorMismatchError, match="key"):
        checkpointer.save(tmp_path / "saved", tree)
    assert not (tmp_path / "saved").exists()


def test_several_directories_in_one_call(tmp_path, checkpointer, params):
    """Orbax gives a handler the leaves of one directory; the interface allows for more, and for the same names."""
    infos = []
    for number in range(2):
        checkpointer.save(tmp_path / str(number), {"w": jnp.full(4, number)})
        infos.append(th.ParamInfo(name="w", parent_dir=epath.Path(tmp_path / str(number))))
    handler = ost.SafetensorsTypeHandler()
    restored = asyncio.run(handler.deserialize(infos))
    assert [array.tolist() for array in restored] == [[0] * 4, [1] * 4]
    assert [leaf.shape for leaf in asyncio.run(handler.metadata(infos))] == [(4,), (4,)]


@pytest.mark.parametrize(
    ("gigabytes", "own", "expected", "registered"),
    [(1, 2**31, 10**9, False), (96, 2**20, 2**20, True), (1e-6, 5000, 1000, False)],
)
def test_orbaxs_limits_bound_what_is_in_flight(tmp_path, monkeypatch, gigabytes, own, expected, registered):
    seen = []
    save, restore = type_handler.SaveRequest, type_handler.restore
    monkeypatch.setattr(type_handler, "SaveRequest", lambda *a, **k: (seen.append(k["options"]), save(*a, **k))[1])
    monkeypatch.setattr(type_handler, "restore", lambda request: (seen.append(request.options), restore(request))[1])
    handler = ost.SafetensorsTypeHandler(options=ost.SafetensorsOptions(in_flight_bytes=own, threads=3))
    if registered:
        ost.register(save=True)
        monkeypatch.setattr(th.get_type_handler(jax.Array), "_safetensors", handler)
    try:
        registry = (
            {} if registered else {"type_handler_registry": th.create_type_handler_registry((jax.Array, handler))}
        )
        tree = {"w": jnp.asarray(KERNEL), "v": jnp.arange(7)}
        limits = {"save_concurrent_gb": gigabytes, "restore_concurrent_gb": gigabytes}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**registry, **limits)) as checkpointer:
            checkpointer.save(tmp_path / "saved", tree)
            args = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding), tree)
            assert_same(checkpointer.restore(tmp_path / "saved", item=tree, restore_args=args), tree)
    finally:
        ost.unregister()
    assert seen == [ost.SafetensorsOptions(in_flight_bytes=expected, threads=3)] * 2


def test_a_limit_on_restores_holds_for_accelerators(tmp_path, checkpointer):
    tree = {f"w{number}": jnp.full((64, 64), number, jnp.float32) for number in range(10)}
    checkpointer.save(tmp_path / "saved", tree)
    limit = 4 * 64 * 64 * 4
    handler = make_handler(restore_concurrent_gb=limit / 10**9)
    with accelerator() as device, ocp.Checkpointer(handler) as bounded:
        args = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding), tree)
        assert_same(bounded.restore(tmp_path / "saved", item=tree, restore_args=args), tree)
    assert 0 < device.most_bytes <= limit
