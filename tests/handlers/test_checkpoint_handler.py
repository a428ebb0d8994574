"""Restoring through Orbax: every row of what a restore takes and returns, against the `safetensors` package."""

import collections
import dataclasses
import errno
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

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
from etils import epath
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.restore import fill
from orbax_safetensors.restore import run as restoring
from orbax_safetensors.storage import local
from orbax_safetensors.storage import memory as arena
from orbax_safetensors.transfer import engine
from tests.support.files import DTYPES, nothing_left, random_bits, write, write_indexed

RNG = np.random.default_rng(0)
W = random_bits(RNG, (16, 8), np.dtype("f4"))
B = random_bits(RNG, (8,), np.dtype(ml_dtypes.bfloat16))
STEP = np.array(7, np.int32)
TENSORS = {"layer.w": W, "layer.b": B, "step": STEP}


@pytest.fixture
def directory(tmp_path):
    write_indexed(tmp_path, [{"layer.w": W}, {"layer.b": B, "step": STEP}])
    return tmp_path


@pytest.fixture
def checkpointer():
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        yield checkpointer


def struct(array, sharding=None, **changes):
    shape, dtype = changes.get("shape", array.shape), changes.get("dtype", array.dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def assert_same_bits(found, expected):
    assert np.asarray(found).dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.asarray(found).tobytes() == expected.tobytes()


def names_of(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def restore_alone(directory, item, **kwargs):
    """Without a checkpointer around it, which has threads and descriptors of its own."""
    args = ost.SafetensorsRestore(item=item, **kwargs)
    return ost.SafetensorsHandler().restore(epath.Path(directory), args)


# --- what is given and what is returned ---


def test_nothing_given_is_everything_as_numpy(directory, checkpointer):
    restored = checkpointer.restore(directory)
    assert sorted(restored) == sorted(TENSORS)
    for name, array in TENSORS.items():
        assert isinstance(restored[name], np.ndarray)
        assert_same_bits(restored[name], array)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_bit_for_bit(tmp_path, checkpointer, mesh, dtype):
    array = random_bits(RNG, (8, 24), DTYPES[dtype])
    write(tmp_path / "x.safetensors", {"a": array[:1, :3], "w": array})
    oracle = dict(safetensors.deserialize((tmp_path / "x.safetensors").read_bytes()))
    assert bytes(oracle["w"]["data"]) == array.tobytes()
    assert_same_bits(checkpointer.restore(tmp_path)["w"], array)
    for spec in (P("x"), P(None, "y"), P("y", "x"), P()):
        with jax.enable_x64(True):
            item = {"w": struct(array, NamedSharding(mesh, spec))}
            args = ost.SafetensorsRestore(item=item, partial_restore=True)
            restored = checkpointer.restore(tmp_path, args=args)["w"]
            assert restored.dtype == array.dtype
            for shard in restored.addressable_shards:
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


Pair = collections.namedtuple("Pair", "w b")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: object
    b: object


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        (Pair("w", "b"), {"w": "w", "b": "b"}),
        (Layer("w", "b"), {"w": "w", "b": "b"}),
        (["w", ("b",)], {"0": "w", "1.0": "b"}),
        ({"a": {"c": "w"}, "b": [{"d": "b"}]}, {"a.c": "w", "b.0.d": "b"}),
        ({"a": None, "c": "w", "d": (), "e": "b"}, {"c": "w", "e": "b"}),
        (flax.core.freeze({"k": {"w": "w"}, "b": "b"}), {"k.w": "w", "b": "b"}),
        ({3: "w", 10: "b"}, {"3": "w", "10": "b"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_trees_of_every_kind(tmp_path, checkpointer, tree, names):
    arrays = {"w": W, "b": B}
    write(tmp_path / "x.safetensors", {name: arrays[which] for name, which in names.items()})
    item = jax.tree.map(lambda which: struct(arrays[which]), tree)
    restored = checkpointer.restore(tmp_path, args=ost.SafetensorsRestore(item=item))
    assert jax.tree.structure(restored) == jax.tree.structure(item)
    jax.tree.map(lambda which, array: assert_same_bits(array, arrays[which]), tree, restored)


class Model(flax.nnx.Module):
    def __init__(self, rngs):
        self.linear = flax.nnx.Linear(16, 8, rngs=rngs)


def test_the_state_of_an_nnx_model(tmp_path, checkpointer, mesh):
    _, state = flax.nnx.split(Model(flax.nnx.Rngs(0)))
    values = {name: random_bits(RNG, leaf.shape, leaf.dtype) for name, leaf in names_of(state).items()}
    write(tmp_path / "x.safetensors", values)
    abstract = jax.tree.map(lambda x: struct(x, NamedSharding(mesh, P())), state)
    restored = checkpointer.restore(tmp_path, args=ost.SafetensorsRestore(item=abstract))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for name, leaf in names_of(restored).items():
        assert_same_bits(leaf, values[name])
    model = flax.nnx.merge(flax.nnx.graphdef(Model(flax.nnx.Rngs(0))), restored)
    assert_same_bits(
        model.linear.kernel[...], values["linear.kernel.value" if "linear.kernel.value" in values else "linear.kernel"]
    )


def train_state(directory):
    return flax.training.train_state.TrainState.create(
        apply_fn=lambda x: x,
        params={"layer": {"w": jnp.zeros(W.shape), "b": jnp.zeros(B.shape, B.dtype)}},
        tx=optax.adam(1e-3),
    )


def test_the_parameters_of_a_train_state(directory, checkpointer, mesh):
    state = train_state(directory)
    params = checkpointer.restore(directory, args=ost.SafetensorsRestore(item=state.params, partial_restore=True))
    assert_same_bits(params["layer"]["w"], W)


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


# --- shapes and dtypes ---


@pytest.mark.parametrize("shape", [(24, 8), (16, 16), (8, 4), (24, 4), (16, 8), (40, 24), (0, 8)])
@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P("x", "y"), P()], ids=str)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_padding_and_truncating(directory, checkpointer, mesh, shape, spec, dtype):
    args = ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, spec), global_shape=shape, strict=False, dtype=dtype)
    restored = checkpointer.restore(directory, restore_args={"layer": {"w": args}}, partial_restore=True)["layer"]["w"]
    expected = np.zeros(shape, W.dtype)
    corner = tuple(slice(min(a, b)) for a, b in zip(shape, W.shape, strict=True))
    expected[corner] = W[corner]
    assert_same_bits(restored, expected if dtype is None else expected.astype(dtype))


@pytest.mark.parametrize(
    "wanted", [np.float16, ml_dtypes.bfloat16, np.float32, np.int32, ml_dtypes.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize(
    "stored", [np.float32, ml_dtypes.bfloat16, np.float16, np.int8, ml_dtypes.float8_e5m2], ids=str
)
def test_a_cast_that_was_asked_for_is_numpys(tmp_path, checkpointer, mesh, stored, wanted):
    array = np.linspace(-100, 100, 8 * 1024).reshape(8, 1024).astype(stored)
    write(tmp_path / "x.safetensors", {"w": array})
    for spec in (P("x"), P(None, ("x", "y"))):
        item = {"w": struct(array, NamedSharding(mesh, spec), dtype=wanted)}
        with np.errstate(all="ignore"):
            assert_same_bits(checkpointer.restore(tmp_path, item=item)["w"], array.astype(wanted))


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


def test_packed_tensors_are_restored_packed(tmp_path, checkpointer, mesh):
    packed = np.arange(64, dtype=np.uint8).reshape(8, 8)
    spec = safetensors.TensorSpec(dtype="float4_e2m1fn_x2", shape=[8, 8], data_ptr=packed.ctypes.data, data_len=64)
    (tmp_path / "x.safetensors").write_bytes(safetensors.serialize({"w": spec}))
    assert_same_bits(checkpointer.restore(tmp_path)["w"], packed)
    item = {"w": struct(packed, NamedSharding(mesh, P("x", "y")))}
    assert_same_bits(checkpointer.restore(tmp_path, item=item)["w"], packed)
    with pytest.raises(ost.TensorMismatchError, match="F4 is held packed as uint8"):
        checkpointer.restore(tmp_path, item={"w": struct(packed, dtype=jnp.bfloat16)})


# --- requests that do not fit ---

MISFITS = {
    "missing tensor": (
        {"layer.w": struct(W), "layer.bias": struct(B)},
        r"not in the checkpoint: 'layer.bias' \(nearest stored: 'layer.b'\)",
    ),
    "unasked tensors": ({"layer.w": struct(W)}, "not in the tree .pass partial_restore=True.* 'step', 'layer.b'"),
    "an empty tree": ({}, "not in the tree"),
    "wrong shape": ({"layer.w": struct(W, shape=(16, 9))}, r"'layer.w': expected shape \(16, 9\), found \(16, 8\)"),
    "wrong rank": ({"layer.w": struct(W, shape=(128,))}, r"expected shape \(128,\), found \(16, 8\)"),
    "a matrix as a scalar": ({"layer.w": 0.0}, r"expected shape \(\), found \(16, 8\)"),
    "a string": ({"layer.w": "x"}, "a leaf of type str cannot be restored: 'x'"),
    "a random key": ({"layer.w": jax.random.key(0)}, "restore the key data as uint32"),
    "two leaves of one name": ({"layer.w": struct(W), "layer": {"w": struct(W)}}, "two leaves .* name 'layer.w'"),
}


@pytest.mark.parametrize(("item", "message"), MISFITS.values(), ids=MISFITS)
def test_an_item_that_does_not_fit(directory, item, message):
    with nothing_left(directory), pytest.raises(ost.TensorMismatchError, match=message):
        restore_alone(directory, item, partial_restore="not in the tree" not in message)


MISFIT_ARGS = {
    "mesh without axes": (
        lambda mesh: ocp.ArrayRestoreArgs(mesh=mesh), "mesh and mesh_axes are given together"),
    "no such type": (lambda mesh: ocp.RestoreArgs(restore_type=str), "restore_type is <class 'str'>"),
    "a sharding of another kind": (
        lambda mesh: ocp.ArrayRestoreArgs(sharding=P("x")), "expected a sharding, found P"),
    "an uneven sharding": (
        lambda mesh: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, P("x")), global_shape=(17, 8), strict=False),
        r"'layer.w': shape \(17, 8\) cannot be sharded",
    ),
    "an abstract mesh": (
        lambda mesh: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh.abstract_mesh, P("x"))),
        "'layer.w' has a sharding without devices: set its mesh",
    ),
    "strict by default": (
        lambda mesh: ocp.ArrayRestoreArgs(global_shape=(24, 8)), r"expected shape \(24, 8\), found \(16, 8\)"),
    "another rank, not strict": (
        lambda mesh: ocp.ArrayRestoreArgs(global_shape=(128,), strict=False), r"expected shape \(128,\)"),
    "no restore args": (lambda mesh: 3, "expected ocp.RestoreArgs in restore_args, found 3"),
    "one replica without a mesh": (
        lambda mesh: ocp.type_handlers.SingleReplicaArrayRestoreArgs(), "needs a sharding over a mesh"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), MISFIT_ARGS.values(), ids=MISFIT_ARGS)
def test_restore_args_that_do_not_fit(directory, checkpointer, mesh, make, message):
    with pytest.raises(ost.TensorMismatchError, match=message):
        checkpointer.restore(directory, restore_args={"layer": {"w": make(mesh)}}, partial_restore=True)


def test_restore_args_for_leaves_that_are_not_there(directory, checkpointer):
    args = {"layer.w": ocp.RestoreArgs(), "layer.x": ocp.RestoreArgs()}
    with pytest.raises(ost.TensorMismatchError, match=r"item and restore_args differ: item does not have 'layer\.x'"):
        checkpointer.restore(directory, args=ost.SafetensorsRestore(item={"layer.w": struct(W)}, restore_args=args))


def test_a_complex_tensor_stays_complex(tmp_path, checkpointer):
    write(tmp_path / "x.safetensors", {"c": np.array(1j, np.complex64)})
    with pytest.raises(ost.TensorMismatchError, match="complex complex64 cannot be cast to float32"):
        checkpointer.restore(tmp_path, item={"c": jax.ShapeDtypeStruct((), jnp.float32)})
    with pytest.raises(ost.TensorMismatchError, match="complex complex64 cannot be cast to float"):
        checkpointer.restore(tmp_path, item={"c": 0.0})


@pytest.mark.parametrize("asked", [object, "S4", "nonsense", "M8[s]", np.longdouble, "float6_e2m3fn", "V4"])
@pytest.mark.parametrize("kind", [jax.Array, np.ndarray])
def test_a_dtype_that_no_tensor_has(directory, checkpointer, monkeypatch, asked, kind):
    monkeypatch.setattr(engine.Reader, "run", None)  # it is refused before anything is read
    args = {"layer": {"w": ocp.ArrayRestoreArgs(restore_type=kind, dtype=asked)}}
    with pytest.raises(ost.TensorMismatchError, match="'layer.w': expected a dtype that tensors can have"):
        checkpointer.restore(directory, restore_args=args, partial_restore=True)


def test_a_dtype_that_cannot_be_cast_to(tmp_path, checkpointer):
    write(tmp_path / "x.safetensors", {"w": np.zeros(3, ml_dtypes.float8_e8m0fnu)})
    with pytest.raises(ost.TensorMismatchError, match="'w': float8_e8m0fnu cannot be cast to float8_e5m2"):
        checkpointer.restore(tmp_path, item={"w": jax.ShapeDtypeStruct((3,), jnp.float8_e5m2)})


@pytest.mark.parametrize("shape", [(-1, 8), 8, (8, 8.0), "ab"])
def test_a_shape_that_is_none(directory, checkpointer, shape):
    args = {"layer": {"w": ocp.ArrayRestoreArgs(global_shape=shape, strict=False)}}
    with pytest.raises(ost.TensorMismatchError, match="'layer.w': expected a shape"):
        checkpointer.restore(directory, restore_args=args, partial_restore=True)


def test_a_float_that_does_not_fit_the_integer_that_jax_makes_of_int64(tmp_path, checkpointer):
    for value in (3e9, -3e9, np.nan, np.inf):
        write(tmp_path / "x.safetensors", {"w": np.array([1.5, value], np.float32)})
        with pytest.raises(ost.TensorMismatchError, match=r"'w': .* does not fit int32"):
            checkpointer.restore(tmp_path, restore_args={"w": ocp.ArrayRestoreArgs(dtype=np.int64)})
    write(tmp_path / "x.safetensors", {"w": np.array([1.5, -7], np.float32)})
    restored = checkpointer.restore(tmp_path, restore_args={"w": ocp.ArrayRestoreArgs(dtype=np.int64)})["w"]
    assert restored.tolist() == [1, -7]


def test_a_numpy_scalar_is_not_a_python_scalar(tmp_path, checkpointer):
    write(tmp_path / "x.safetensors", {"s": np.array(2.5)})
    args = {"s": ocp.RestoreArgs(restore_type=np.float64)}
    for given, kind in (({"item": {"s": np.float64(0)}}, np.ndarray), ({"restore_args": args}, np.float64)):
        restored = checkpointer.restore(tmp_path, **given)["s"]
        assert type(restored) is kind
        assert restored == 2.5


def test_nan_is_no_bool(tmp_path, checkpointer):
    write(tmp_path / "x.safetensors", {"s": np.array(np.nan)})
    with pytest.raises(ost.TensorMismatchError, match="nan cannot be restored as bool"):
        checkpointer.restore(tmp_path, item={"s": True})


@pytest.mark.parametrize(
    "make",
    [
        lambda mesh: {"mesh": mesh, "mesh_axes": P("q")},
        lambda mesh: {"mesh": mesh, "mesh_axes": ("x",)},
        lambda mesh: {"sharding": Format(Layout((0, 1, 2)), NamedSharding(mesh, P()))},
        lambda mesh: {"sharding": Format(Layout.AUTO, None)},
        lambda mesh: {"sharding": Format(None, None)},
        lambda mesh: {"sharding": ocp.metadata.SingleDeviceShardingMetadata(device_str="TPU_77")},
    ],
)
def test_a_sharding_that_cannot_be_made(directory, checkpointer, mesh, make):
    with pytest.raises(ost.TensorMismatchError, match="'layer.w': "):
        args = {"layer": {"w": ocp.ArrayRestoreArgs(**make(mesh))}}
        checkpointer.restore(directory, restore_args=args, partial_restore=True)


def test_restore_args_that_lack_a_leaf(directory, checkpointer):
    item = {"layer.w": struct(W), "layer.b": struct(B)}
    args = ost.SafetensorsRestore(item=item, restore_args={"layer.w": ocp.RestoreArgs()}, partial_restore=True)
    with pytest.raises(ost.TensorMismatchError, match=r"restore_args does not have 'layer\.b'"):
        checkpointer.restore(directory, args=args)


@pytest.mark.parametrize("args", [ocp.args.PyTreeRestore(item={}), ocp.args.StandardRestore({})], ids=str)
def test_arguments_of_another_handler(directory, tmp_path, checkpointer, args):
    with pytest.raises(ost.SafetensorsError, match=r"expected orbax_safetensors\.SafetensorsRestore, found"):
        checkpointer.restore(directory, args=args)
    write(tmp_path / "one.safetensors", TENSORS)
    with (
        ost.SafetensorsCheckpointer() as checkpointer,
        pytest.raises(ost.SafetensorsError, match=r"expected orbax_safetensors\.SafetensorsRestore, found"),
    ):
        checkpointer.restore(tmp_path / "one.safetensors", args)


def test_the_layout_of_a_described_array(directory, checkpointer, mesh):
    wanted = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh, P("x", "y")))
    item = {"layer": {"w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=wanted)}}
    restored = checkpointer.restore(directory, item=item, partial_restore=True)["layer"]["w"]
    assert restored.format.layout.major_to_minor == (1, 0)
    assert_same_bits(restored, W)


def test_eval_shape_under_a_mesh(tmp_path, checkpointer):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    write(tmp_path / "x.safetensors", {"w": W})
    with jax.set_mesh(mesh):
        item = jax.eval_shape(lambda: {"w": jnp.zeros(W.shape, W.dtype, out_sharding=P("x", "y"))})
        restored = checkpointer.restore(tmp_path, item=item)["w"]
    assert restored.sharding == NamedSharding(mesh, P("x", "y"))
    assert_same_bits(restored, W)
    with pytest.raises(ost.TensorMismatchError, match="'w' has a sharding without devices"):
        checkpointer.restore(tmp_path, item=item)


def test_a_wrong_tree_of_many_names_is_refused_at_once(tmp_path, checkpointer):
    names = [f"model.layers.{layer}.experts.{expert}.weight" for layer in range(60) for expert in range(256)]
    empty = np.zeros(0, np.int8)
    write(tmp_path / "x.safetensors", dict.fromkeys(names, empty))
    item = {name.removeprefix("model."): struct(empty) for name in names}
    begun = time.process_time()
    with pytest.raises(ost.TensorMismatchError, match=r"nearest stored: 'model\.layers\.0\.experts\.0\.weight'"):
        checkpointer.restore(tmp_path, item=item)
    assert time.process_time() - begun < 5


def test_many_wrong_names_are_not_all_listed(directory, checkpointer):
    item = {f"layer.{number}": struct(W) for number in range(100)}
    with pytest.raises(ost.TensorMismatchError, match="and 92 more"):
        checkpointer.restore(directory, item=item)


# --- through the rest of Orbax ---


def test_async_checkpointer(directory, mesh):
    item = {"layer": {"w": struct(W, NamedSharding(mesh, P("x")))}}
    with ocp.AsyncCheckpointer(ost.SafetensorsHandler()) as checkpointer:
        args = ost.SafetensorsRestore(item=item, partial_restore=True)
        assert_same_bits(checkpointer.restore(directory, args=args)["layer"]["w"], W)


@pytest.fixture
def steps(tmp_path):
    """A directory of steps as a checkpoint manager makes it, with files that it did not write."""
    (tmp_path / "3" / "params").mkdir(parents=True)
    write_indexed(tmp_path / "3" / "params", [TENSORS])
    (tmp_path / "3" / "extra").mkdir()
    (tmp_path / "3" / "extra" / "metadata").write_text('{"epoch": 2}')
    return tmp_path


def item_handlers():
    return {"params": ost.SafetensorsHandler(), "extra": ocp.JsonCheckpointHandler()}


def handler_registry():
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("params", ost.SafetensorsRestore, ost.SafetensorsHandler())
    registry.add("params", ost.SafetensorsSave, ost.SafetensorsHandler())
    registry.add("extra", ocp.args.JsonRestore, ocp.JsonCheckpointHandler())
    registry.add("extra", ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    return registry


@pytest.mark.parametrize("how", ["item_handlers", "handler_registry"])
def test_checkpoint_manager(steps, mesh, how):
    given = {how: item_handlers() if how == "item_handlers" else handler_registry()}
    with ocp.CheckpointManager(steps, **given) as manager:
        assert manager.latest_step() == 3
        item = {"layer": {"w": struct(W, NamedSharding(mesh, P("x"))), "b": ocp.PLACEHOLDER}, "step": ocp.PLACEHOLDER}
        args = ocp.args.Composite(params=ost.SafetensorsRestore(item=item), extra=ocp.args.JsonRestore())
        restored = manager.restore(3, args=args)
        assert_same_bits(restored["params"]["layer"]["w"], W)
        assert restored["extra"] == {"epoch": 2}
        found = manager.item_metadata(3)["params"]
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in found.tree.items()} == {
            name: (array.shape, array.dtype) for name, array in TENSORS.items()
        }


def test_composite_handler(steps):
    handler = ocp.CompositeCheckpointHandler(**item_handlers())
    with ocp.Checkpointer(handler) as checkpointer:
        restored = checkpointer.restore(steps / "3", args=ocp.args.Composite(params=ost.SafetensorsRestore()))
    assert_same_bits(restored["params"]["layer.w"], W)


def test_metadata_is_orbaxs(directory, checkpointer):
    found = checkpointer.metadata(directory)
    assert isinstance(found, ocp.metadata.StepMetadata)
    for name, array in TENSORS.items():
        leaf = found.item_metadata[name]
        assert isinstance(leaf, ocp.metadata.ArrayMetadata)
        assert (leaf.name, leaf.shape, leaf.dtype, leaf.sharding) == (name, array.shape, array.dtype, None)


# --- one file ---


def test_one_file(tmp_path, mesh):
    path = tmp_path / "x.safetensors"
    write(path, TENSORS)
    with ost.SafetensorsCheckpointer() as checkpointer:
        assert_same_bits(checkpointer.restore(path)["layer.w"], W)
        item = {"layer": {"w": struct(W, NamedSharding(mesh, P("x")))}}
        args = ost.SafetensorsRestore(item=item, partial_restore=True)
        for restored in (
            checkpointer.restore(path, args=args),
            checkpointer.restore(str(path), args),
            checkpointer.restore(epath.Path(path), item=item, partial_restore=True),
            checkpointer.restore(tmp_path, args=args),
        ):
            assert_same_bits(restored["layer"]["w"], W)
        assert checkpointer.metadata(path).item_metadata["layer.w"].shape == W.shape
        assert checkpointer.metadata(tmp_path).item_metadata["layer.w"].shape == W.shape
        with pytest.raises(FileNotFoundError):
            checkpointer.restore(tmp_path / "missing.safetensors")


# --- memory, files and threads ---


def aligned_file(path, tensors):
    """A file of the reference writer with its header padded so that the data begins at a multiple of 64."""
    write(path, tensors)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    padded = -(-(8 + length) // 64) * 64 - 8
    path.write_bytes(padded.to_bytes(8, "little") + raw[8 : 8 + length].ljust(padded) + raw[8 + length :])


def addresses(array):
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def mapped(address, path):
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= address < last:
                return line.rstrip().endswith(str(path))
    return False


def test_alias_maps_what_lies_in_the_file_as_in_memory(tmp_path, mesh):
    tensors = {"even": random_bits(RNG, (64, 64), np.dtype("f4")), "odd": random_bits(RNG, (3,), np.dtype("i1"))}
    tensors["last"] = random_bits(RNG, (8, 8), np.dtype("i1"))
    aligned_file(tmp_path / "x.safetensors", tensors)
    item = {
        "even": struct(tensors["even"], NamedSharding(mesh, P("x"))),
        "odd": struct(tensors["odd"], NamedSharding(mesh, P())),
        "last": struct(tensors["last"], NamedSharding(mesh, P(None, "y"))),
    }
    handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(alias=True))
    with ocp.Checkpointer(handler) as checkpointer:
        restored = checkpointer.restore(tmp_path, item=item)
    (tmp_path / "x.safetensors").rename(tmp_path / "y.safetensors")
    for name, array in tensors.items():
        assert_same_bits(restored[name], array)
    assert all(mapped(address, tmp_path / "y.safetensors") for address in addresses(restored["even"]))
    assert not any(mapped(address, tmp_path / "y.safetensors") for address in addresses(restored["last"]))


def test_arrays_are_not_mapped_unless_asked(tmp_path, checkpointer, mesh):
    array = random_bits(RNG, (64, 64), np.dtype("f4"))
    aligned_file(tmp_path / "x.safetensors", {"w": array})
    restored = checkpointer.restore(tmp_path, item={"w": struct(array, NamedSharding(mesh, P("x")))})["w"]
    assert len(addresses(restored)) == 2
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) not in maps.read()


def test_replicas_are_read_once_and_share_one_buffer(tmp_path, checkpointer, mesh, scalars):
    array = random_bits(RNG, (64, 64), np.dtype("f4"))
    write(tmp_path / "x.safetensors", {"w": array})
    restored = checkpointer.restore(tmp_path, item={"w": struct(array, NamedSharding(mesh, P()))})["w"]
    assert len(addresses(restored)) == 1
    assert scalars["/jax/orbax/read/safetensors/bytes_read"] == array.nbytes
    assert scalars["/jax/orbax/read/safetensors/num_reads"] == 1
    assert scalars["/jax/orbax/read/safetensors/storage_reads"] == 1


def test_one_line_is_logged(directory, checkpointer, caplog):
    with caplog.at_level("INFO", logger="orbax_safetensors"):
        checkpointer.restore(directory)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("orbax_safetensors")]
    assert f"Restored 3 arrays from {directory}: {W.nbytes + B.nbytes + 4} bytes read in 2 requests" in line


def test_memory_for_accelerators_is_held_to_the_budget(tmp_path, mesh, monkeypatch):
    """As on a GPU, where host memory is given back once the transfer is done; here nothing is transferred."""
    arrays = {f"w{number}": random_bits(RNG, (64, 64), np.dtype("f4")) for number in range(10)}
    write(tmp_path / "x.safetensors", arrays)
    monkeypatch.setattr(fill, "on_host", lambda sharding: False)
    waited = []
    monkeypatch.setattr(fill.jax, "block_until_ready", lambda batch: waited.append(len(batch)))
    options = ost.SafetensorsOptions(in_flight_bytes=4 * 64 * 64 * 4)
    with ocp.Checkpointer(ost.SafetensorsHandler(options=options)) as checkpointer:
        restored = checkpointer.restore(tmp_path, restore_args=dict.fromkeys(arrays, ocp.ArrayRestoreArgs()))
    assert waited == [2, 2, 2]
    for name, array in arrays.items():
        assert_same_bits(restored[name], array)


@pytest.mark.parametrize(
    "bad", [{"threads": 0}, {"in_flight_bytes": 0}, {"max_gap_bytes": -1}, {"threads": "4"}, {"alignment": 4}], ids=str
)
def test_options_out_of_range(bad):
    with pytest.raises(ost.SafetensorsError, match="must be an integer of at least"):
        ost.SafetensorsOptions(**bad)


# --- storage that fails ---


def sharded_item(mesh):
    return {"layer": {"w": struct(W, NamedSharding(mesh, P("x", "y"))), "b": struct(B)}, "step": struct(STEP)}


def test_a_read_that_fails_is_one_error_and_leaves_nothing(directory, mesh, monkeypatch):
    real, calls = os.preadv, []

    def fail_later(descriptor, buffers, offset):
        calls.append(offset)
        if len(calls) == 7:  # prefix and header of two files, then data
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(local.os, "preadv", fail_later)
    message = r"model-0000.*: reading .* failed: Input/output error"
    with nothing_left(directory), pytest.raises(ost.StorageError, match=message):
        restore_alone(directory, sharded_item(mesh))


def test_a_failed_restore_gives_its_memory_back_at_once(directory, mesh, monkeypatch):
    arenas = []
    real = arena._map

    def remember(nbytes):
        memory = real(nbytes)
        arenas.append(weakref.ref(memory))
        return memory

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(arena, "_map", remember)
    checkpoint = ost.open_checkpoint(directory)
    monkeypatch.setattr(restoring, "read_checkpoint", lambda *_: checkpoint)
    monkeypatch.setattr(local.os, "preadv", fail)
    gc.disable()
    try:
        with pytest.raises(ost.StorageError) as caught:
            restore_alone(directory, sharded_item(mesh))
        del caught
        assert arenas
        assert not [memory for memory in arenas if memory() is not None]
    finally:
        gc.enable()


def test_a_thread_that_cannot_be_started_stops_the_others(directory, monkeypatch):
    real, calls = ThreadPoolExecutor.submit, []

    def submit(self, work):
        calls.append(work)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, work)

    read = []
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    monkeypatch.setattr(engine.Reader, "_move", lambda *_: (read.append(1), time.sleep(0.2)))
    monkeypatch.setattr(local.LocalStore, "cost", dataclasses.replace(local.COST, max_request_bytes=16))
    with pytest.raises(KeyboardInterrupt):
        ost.SafetensorsHandler().restore(epath.Path(directory))
    assert len(read) <= 2


def test_memory_that_cannot_be_had(monkeypatch):
    with pytest.raises(ost.StorageError, match="bytes of memory cannot be had"):
        arena.allocate([2**60])


@pytest.mark.parametrize("change", ["touch", "truncate", "grow", "overwrite"])
def test_a_file_that_changes_while_it_is_read(directory, mesh, monkeypatch, change):
    path = directory / "model-00001-of-00002.safetensors"
    real, calls = os.preadv, []

    def change_it(descriptor, buffers, offset):
        calls.append(offset)
        if len(calls) == 6:
            before = path.stat()
            raw = path.read_bytes()
            if change == "truncate":
                os.truncate(path, before.st_size - 20)
            elif change == "grow":
                os.truncate(path, before.st_size + 1)
            elif change == "overwrite":
                path.write_bytes(raw[:-4] + b"\0\0\0\0")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(local.os, "preadv", change_it)
    with (
        nothing_left(directory),
        pytest.raises(
            ost.StorageError, match=r"00001-of-00002\.safetensors: (changed while|expected .* found its end)"
        ),
    ):
        restore_alone(directory, sharded_item(mesh))


def test_a_file_that_is_replaced_between_header_and_data(directory, checkpointer, monkeypatch):
    real = Checkpoint.open_file

    def replace_first(self, index):
        stored = self.files[index].path
        os.rename(stored, stored + ".old")
        write(epath.Path(stored), {"other": W})
        return real(self, index)

    monkeypatch.setattr(Checkpoint, "open_file", replace_first)
    with pytest.raises(ost.StorageError, match="changed while it was in use"):
        checkpointer.restore(directory)


def test_a_restore_from_many_threads_at_once(directory, checkpointer, mesh):
    errors = []

    def work():
        try:
            assert_same_bits(checkpointer.restore(directory, item=sharded_item(mesh))["layer"]["w"], W)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
