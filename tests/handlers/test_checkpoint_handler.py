"""Restoring through Orbax: every row of what a restore takes and returns, against the `safetensors` package."""

import flax
import flax.nnx
import flax.training.train_state
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.support.compare import assert_same_bits
from tests.support.files import DTYPES, random_bits, write
from tests.support.small_model import RNG, STEP, TENSORS, B, W, struct


def test_nothing_given_is_everything_as_numpy(directory, checkpointer):
    restored = checkpointer.restore(directory)
    assert sorted(restored) == sorted(TENSORS)
    for name, array in TENSORS.items():
        assert isinstance(restored[name], np.ndarray)
        assert_same_bits(restored[name], array)


@pytest.mark.both_devices
def test_every_dtype_bit_for_bit(tmp_path, checkpointer, mesh):
    arrays = {name: random_bits(RNG, (8, 24), dtype) for name, dtype in DTYPES.items()}
    write(tmp_path / "x.safetensors", {"odd": np.zeros(3, np.int8), **arrays})
    oracle = dict(safetensors.deserialize((tmp_path / "x.safetensors").read_bytes()))
    whole = checkpointer.restore(tmp_path)
    for name, array in arrays.items():
        assert bytes(oracle[name]["data"]) == array.tobytes()
        assert_same_bits(whole[name], array)
    for spec in (P("x"), P(None, "y"), P("y", "x"), P()):
        with jax.enable_x64(True):
            item = {name: struct(array, NamedSharding(mesh, spec)) for name, array in arrays.items()}
            args = ost.SafetensorsRestore(item=item, partial_restore=True)
            restored = checkpointer.restore(tmp_path, args=args)
            for name, array in arrays.items():
                assert restored[name].dtype == array.dtype
                for shard in restored[name].addressable_shards:
                    assert np.asarray(shard.data).tobytes() == array[shard.index].tobytes()


def test_restore_args_alone_are_the_tree(directory, checkpointer, mesh):
    sharding = NamedSharding(mesh, P("y"))
    args = {
        "layer": {"w": ocp.ArrayRestoreArgs(sharding=sharding), "b": ocp.RestoreArgs()},
        "step": ocp.RestoreArgs(int),
    }
    restored = checkpointer.restore(directory, restore_args=args)
    assert restored["layer"]["w"].sharding == sharding
    assert_same_bits(restored["layer"]["w"], W)
    assert isinstance(restored["layer"]["b"], np.ndarray)
    assert_same_bits(restored["layer"]["b"], B)
    assert (restored["step"], type(restored["step"])) == (7, int)


def test_mesh_and_axes_or_sharding_metadata(directory, checkpointer, mesh):
    expected = NamedSharding(mesh, P("x", "y"))
    metadata = ocp.metadata.NamedShardingMetadata.from_jax_sharding(expected)
    for args in (ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=P("x", "y")), ocp.ArrayRestoreArgs(sharding=metadata)):
        restored = checkpointer.restore(directory, restore_args={"layer": {"w": args}}, partial_restore=True)
        assert restored["layer"]["w"].sharding == expected
        assert_same_bits(restored["layer"]["w"], W)


@pytest.mark.both_devices
def test_a_layout(directory, checkpointer, mesh):
    wanted = Format(Layout(major_to_minor=(0, 1)), NamedSharding(mesh, P("x", "y")))
    args = {"layer": {"w": ocp.ArrayRestoreArgs(sharding=wanted)}}
    restored = checkpointer.restore(directory, restore_args=args, partial_restore=True)["layer"]["w"]
    assert restored.format.layout.major_to_minor == (0, 1)
    assert_same_bits(restored, W)


def test_restore_args_come_before_the_item(directory, checkpointer, mesh):
    item = {"layer": {"w": struct(W, NamedSharding(mesh, P("x")))}}
    args = {"layer": {"w": ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, P("y")), dtype=jnp.bfloat16)}}
    restored = checkpointer.restore(
        directory, args=ost.SafetensorsRestore(item=item, restore_args=args, partial_restore=True)
    )["layer"]["w"]
    assert restored.sharding.spec == P("y")
    assert_same_bits(restored, np.asarray(W).astype(ml_dtypes.bfloat16))


@pytest.mark.both_devices
def test_leaves_of_every_kind(directory, checkpointer, mesh):
    for leaf, kind in (
        (np.zeros((), np.int32), np.ndarray),
        (np.int32(0), np.ndarray),
        (0, int),
        (0.0, float),
        (jnp.zeros((), jnp.int32), jax.Array),
        (struct(STEP), np.ndarray),
        (struct(STEP, NamedSharding(mesh, P())), jax.Array),
    ):
        restored = checkpointer.restore(directory, item={"step": leaf}, partial_restore=True)["step"]
        assert isinstance(restored, kind)
        assert restored == 7


def test_no_sharding_is_the_default_device(directory, checkpointer):
    with jax.default_device(jax.devices()[2]):
        args = {"layer": {"w": ocp.ArrayRestoreArgs()}}
        restored = checkpointer.restore(directory, restore_args=args, partial_restore=True)["layer"]["w"]
    assert restored.sharding == SingleDeviceSharding(jax.devices()[2])


def test_an_array_says_its_own_sharding(directory, checkpointer, mesh):
    now = jax.device_put(jnp.zeros(W.shape), NamedSharding(mesh, P(None, "y")))
    restored = checkpointer.restore(directory, item={"layer": {"w": now}}, partial_restore=True)["layer"]["w"]
    assert restored.sharding == now.sharding
    assert_same_bits(restored, W)


def train_state(directory):
    return flax.training.train_state.TrainState.create(
        apply_fn=lambda x: x,
        params={"layer": {"w": jnp.zeros(W.shape), "b": jnp.zeros(B.shape, B.dtype)}},
        tx=optax.adam(1e-3),
    )


def test_a_train_state_with_placeholders(tmp_path, checkpointer, mesh):
    write(tmp_path / "x.safetensors", {"params.layer.w": W, "params.layer.b": B, "step": STEP})
    state = train_state(tmp_path)
    item = jax.tree.map(lambda _: ocp.PLACEHOLDER, state).replace(
        params=jax.tree.map(lambda x: struct(x, NamedSharding(mesh, P())), state.params)
    )
    restored = checkpointer.restore(tmp_path, args=ost.SafetensorsRestore(item=item))
    assert restored.step is ocp.PLACEHOLDER
    assert restored.opt_state[0].mu["layer"]["w"] is ocp.PLACEHOLDER
    assert_same_bits(restored.params["layer"]["w"], W)
    assert_same_bits(restored.params["layer"]["b"], B)


def test_placeholders_in_restore_args(directory, checkpointer):
    args = {"layer": {"w": ocp.RestoreArgs(), "b": ocp.PLACEHOLDER}, "step": ocp.PLACEHOLDER}
    restored = checkpointer.restore(directory, restore_args=args)
    assert restored["layer"]["b"] is ocp.PLACEHOLDER
    assert_same_bits(restored["layer"]["w"], W)


def test_orbaxs_own_metadata_is_an_item(directory, checkpointer):
    metadata = checkpointer.metadata(directory).item_metadata
    restored = checkpointer.restore(directory, args=ost.SafetensorsRestore(item=dict(metadata.tree)))
    for name, array in TENSORS.items():
        assert isinstance(restored[name], np.ndarray)
        assert_same_bits(restored[name], array)
    args = ocp.checkpoint_utils.construct_restore_args(dict(metadata.tree))
    assert_same_bits(checkpointer.restore(directory, restore_args=args)["layer.w"], W)


@pytest.mark.parametrize(
    ("shape", "spec", "dtype"),
    [
        ((24, 8), P("x"), None),
        ((16, 16), P(None, "y"), jnp.bfloat16),
        ((8, 4), P("x", "y"), None),
        ((24, 4), P(), jnp.bfloat16),
        ((16, 8), P("x", "y"), None),
        ((40, 24), P("x", "y"), jnp.bfloat16),
        ((0, 8), P(None, "y"), None),
    ],
)
@pytest.mark.both_devices
def test_padding_and_truncating(directory, checkpointer, mesh, shape, spec, dtype):
    args = ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, spec), global_shape=shape, strict=False, dtype=dtype)
    restored = checkpointer.restore(directory, restore_args={"layer": {"w": args}}, partial_restore=True)["layer"]["w"]
    expected = np.zeros(shape, W.dtype)
    corner = tuple(slice(min(a, b)) for a, b in zip(shape, W.shape, strict=True))
    expected[corner] = W[corner]
    assert_same_bits(restored, expected if dtype is None else expected.astype(dtype))


@pytest.mark.parametrize(
    "stored", [np.float32, ml_dtypes.bfloat16, np.float16, np.int8, ml_dtypes.float8_e5m2], ids=str
)
@pytest.mark.both_devices
def test_a_cast_that_was_asked_for_is_numpys(tmp_path, checkpointer, mesh, stored):
    array = np.linspace(-100, 100, 8 * 1024).reshape(8, 1024).astype(stored)
    write(tmp_path / "x.safetensors", {"w": array})
    for wanted in (np.float16, ml_dtypes.bfloat16, np.float32, np.int32, ml_dtypes.float8_e4m3fn):
        for spec in (P("x"), P(None, ("x", "y"))):
            item = {"w": struct(array, NamedSharding(mesh, spec), dtype=wanted)}
            args = None
            if wanted is np.int32 and stored is not np.int8:  # which a tree alone cannot request
                args = {"w": ocp.ArrayRestoreArgs(dtype=wanted, sharding=NamedSharding(mesh, spec))}
            with np.errstate(all="ignore"):
                found = checkpointer.restore(tmp_path, item=item, restore_args=args)["w"]
                assert_same_bits(found, array.astype(wanted))


@pytest.mark.both_devices
def test_64_bits_without_x64(tmp_path, checkpointer):
    fits = {"i": np.array([1, -(2**31)]), "u": np.array([2**32 - 1], np.uint64), "f": np.array([1.1, np.inf, np.nan])}
    write(tmp_path / "x.safetensors", fits)
    restored = checkpointer.restore(tmp_path, restore_args=dict.fromkeys(fits, ocp.ArrayRestoreArgs()))
    for name, array in fits.items():
        assert restored[name].dtype == np.dtype(f"{array.dtype.kind}4")
        np.testing.assert_array_equal(restored[name], array.astype(f"{array.dtype.kind}4"))


@pytest.mark.parametrize(
    ("value", "stored"), [(2**31, np.int64), (-1, np.int64), (2**32, np.uint64), (1e300, np.float64)]
)
@pytest.mark.both_devices
def test_a_value_that_is_lost_without_x64_is_an_error(tmp_path, checkpointer, value, stored):
    value = value - 2**31 if value == -1 else value
    write(tmp_path / "x.safetensors", {"w": np.array([[0, value]], stored)})
    with pytest.raises(ost.TensorMismatchError, match=r"x\.safetensors: 'w': .* does not fit .*32"):
        checkpointer.restore(tmp_path, restore_args={"w": ocp.ArrayRestoreArgs()})
    asked = ocp.ArrayRestoreArgs(dtype=np.dtype(f"{np.dtype(stored).kind}4"))
    assert checkpointer.restore(tmp_path, restore_args={"w": asked})["w"].shape == (1, 2)


@pytest.mark.parametrize(
    ("stored", "kind", "fails"), [(2.5, int, True), (2.0, int, False), (2, bool, True), (1, bool, False)]
)
def test_python_scalars_keep_their_value(tmp_path, checkpointer, stored, kind, fails):
    write(tmp_path / "x.safetensors", {"s": np.array(stored)})
    args = {"s": ocp.RestoreArgs(restore_type=kind)}
    if fails:
        with pytest.raises(ost.TensorMismatchError, match=f"'s': {stored} cannot be restored as {kind.__name__}"):
            checkpointer.restore(tmp_path, restore_args=args)
    else:
        restored = checkpointer.restore(tmp_path, restore_args=args)["s"]
        assert (restored, type(restored)) == (stored, kind)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scalar_that_is_no_integer_at_all(tmp_path, checkpointer, value):
    write(tmp_path / "x.safetensors", {"s": np.array(value)})
    with pytest.raises(ost.TensorMismatchError, match="cannot be restored as int"):
        checkpointer.restore(tmp_path, restore_args={"s": ocp.RestoreArgs(restore_type=int)})
    restored = checkpointer.restore(tmp_path, restore_args={"s": ocp.RestoreArgs(restore_type=float)})["s"]
    assert np.isnan(restored) == np.isnan(value)


@pytest.mark.both_devices
def test_packed_tensors_are_restored_packed(tmp_path, checkpointer, mesh):
    packed = np.arange(64, dtype=np.uint8).reshape(8, 8)
    spec = safetensors.TensorSpec(dtype="float4_e2m1fn_x2", shape=[8, 8], data_ptr=packed.ctypes.data, data_len=64)
    (tmp_path / "x.safetensors").write_bytes(safetensors.serialize({"w": spec}))
    assert_same_bits(checkpointer.restore(tmp_path)["w"], packed)
    item = {"w": struct(packed, NamedSharding(mesh, P("x", "y")))}
    assert_same_bits(checkpointer.restore(tmp_path, item=item)["w"], packed)
    with pytest.raises(ost.TensorMismatchError, match="F4 is restored as packed bytes of uint8"):
        checkpointer.restore(tmp_path, item={"w": struct(packed, dtype=jnp.bfloat16)})
