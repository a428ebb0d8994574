"""Items and restore arguments that do not fit the stored tensors: each is refused, and the error says why."""

import contextlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.transfer.reader import Reader
from tests.support.compare import assert_same_bits
from tests.support.files import nothing_left, write
from tests.support.roots import TESTDATA
from tests.support.small_model import TENSORS, B, W, restore_alone, struct

MISFITS = {
    "missing tensor": (
        {"layer.w": struct(W), "layer.bias": struct(B)},
        r"not in the checkpoint: 'layer.bias' \(nearest: 'layer.b'\)",
    ),
    "unasked tensors": (
        {"layer.w": struct(W)},
        "not in the tree .*partial_restore=True.* 'step', 'layer.b'",
    ),
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
        lambda mesh: ocp.ArrayRestoreArgs(mesh=mesh), "expected both mesh and mesh_axes, found one"),
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
    "a layout on an abstract mesh": (
        lambda mesh: ocp.ArrayRestoreArgs(
            sharding=Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh.abstract_mesh, P("x")))
        ),
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


@pytest.mark.parametrize("leaf", ["text", b"bytes", 3j, {1}, np.dtype("f4"), P("x")], ids=repr)
def test_a_leaf_of_another_type_is_a_type_error(directory, mesh, leaf):
    target = {"layer": {"w": struct(W, sharding=NamedSharding(mesh, P("x"))), "b": leaf}, "step": 0}
    for error in (TypeError, ost.TensorMismatchError):
        with pytest.raises(error, match=f"'layer.b': a leaf of type {type(leaf).__name__} cannot be restored"):
            ost.load(directory, target)


def test_a_tree_of_a_family_that_was_forgotten(checkpointer):
    """No advice to leave out all tensors, or to spell names of another tree."""
    stored = TESTDATA / "maxtext" / "qwen3" / "hf"
    tree = ost.load(stored, family="maxtext")
    advice = "the tree has none of the stored names: rename its leaves, or pass family=, as 'maxtext'"
    message = rf"/hf: {advice}; not in the checkpoint: ([^,]+, ){{2}}[^,]+ and \d+ more$"
    for partial in (False, True):
        with pytest.raises(ost.TensorMismatchError, match=message):
            ost.load(stored, tree, partial=partial)
    with pytest.raises(ost.TensorMismatchError, match=message):
        checkpointer.restore(stored, item=tree)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.99.input_layernorm.weight", r"config.json does not fit the files \(it may be of .*\): no leaf"),
        ("model.layers.0.other.weight", "maxtext.qwen3: no leaf of the tree uses these stored tensors"),
    ],
)
def test_a_tensor_that_nothing_uses(tmp_path, name, message):
    """Of a layer that the config does not have, or of a kind that the family does not know."""
    stored = TESTDATA / "maxtext" / "qwen3" / "hf"
    shutil.copy(stored / "config.json", tmp_path)
    write(tmp_path / "model.safetensors", ost.load(stored) | {name: np.zeros(4, np.float32)})
    with pytest.raises(ost.MappingError, match=f"{message}.*{name}"):
        ost.load(tmp_path, family="maxtext")


def test_numbers_of_a_module(directory):
    """Those of Equinox are leaves, as the rate of a Dropout."""
    item = {"layer": {"w": struct(W), "b": struct(B), "p": 0.5, "inference": False}, "step": ocp.PLACEHOLDER}
    advice = r"'layer.p'.* \(leave out numbers of a module, as eqx\.partition\(model, eqx\.is_array\) does\)$"
    with pytest.raises(ost.TensorMismatchError, match=advice):
        ost.load(directory, item)


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
def test_a_dtype_that_no_tensor_has(directory, checkpointer, monkeypatch, asked):
    monkeypatch.setattr(Reader, "run", None)  # it is refused before anything is read
    for kind in (jax.Array, np.ndarray):
        args = {"layer": {"w": ocp.ArrayRestoreArgs(restore_type=kind, dtype=asked)}}
        with pytest.raises(ost.TensorMismatchError, match="'layer.w': expected a dtype that tensors can have"):
            checkpointer.restore(directory, restore_args=args, partial_restore=True)


def test_a_dtype_that_cannot_be_cast_to(tmp_path, checkpointer):
    write(tmp_path / "x.safetensors", {"w": np.zeros(3, ml_dtypes.float8_e8m0fnu)})
    with pytest.raises(ost.TensorMismatchError, match="'w': float8_e8m0fnu cannot be cast to float8_e5m2"):
        checkpointer.restore(tmp_path, item={"w": jax.ShapeDtypeStruct((3,), jnp.float8_e5m2)})


@pytest.mark.parametrize("kind", [np.int32, np.int8, np.uint16, np.bool_])
@pytest.mark.parametrize("leaf", [struct, np.zeros_like], ids=["described", "array"])
def test_a_tree_of_integers_for_floating_point(directory, checkpointer, kind, leaf):
    """Their values would be lost: all of them are in (-1, 1), or True."""
    item = {"layer": {"w": leaf(W, dtype=kind)}}
    message = rf"'layer.w': expected {np.dtype(kind)}, found float32, whose values would be lost; describe the leaf as"
    for args in (item, ost.SafetensorsRestore(item, partial_restore=True)):
        with pytest.raises(ost.TensorMismatchError, match=message):
            if args is item:
                ost.load(directory, item, partial=True)
            else:
                checkpointer.restore(directory, args=args)
    args = {"layer": {"w": ocp.ArrayRestoreArgs(dtype=kind)}}
    assert checkpointer.restore(directory, restore_args=args, partial_restore=True)["layer"]["w"].dtype == kind


@pytest.mark.parametrize("shape", [(-1, 8), 8, (8, 8.0), "ab"])
def test_a_shape_that_is_none(directory, checkpointer, shape):
    args = {"layer": {"w": ocp.ArrayRestoreArgs(global_shape=shape, strict=False)}}
    with pytest.raises(ost.TensorMismatchError, match="'layer.w': expected a shape"):
        checkpointer.restore(directory, restore_args=args, partial_restore=True)


@pytest.mark.parametrize("shape", [(2**58, 8), (2**63, 8), (2**61, 0)], ids=str)
def test_a_shape_of_more_bytes_than_can_be_addressed(directory, checkpointer, shape):
    for kind in (jax.Array, np.ndarray):
        args = {"layer": {"w": ocp.ArrayRestoreArgs(restore_type=kind, global_shape=shape, strict=False)}}
        with pytest.raises(ost.TensorMismatchError, match=r"'layer.w': NumPy cannot have an array of shape"):
            checkpointer.restore(directory, restore_args=args, partial_restore=True)


def test_an_empty_tensor_that_numpy_cannot_hold(tmp_path, checkpointer):
    header = b'{"a":{"dtype":"F32","shape":[9223372036854775807,0],"data_offsets":[0,0]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ost.TensorMismatchError, match=r"'a': NumPy cannot have an array of shape \(\d+, 0\)"):
        checkpointer.restore(tmp_path)


def test_a_shape_that_is_none_after_one_that_is_equal(tmp_path, checkpointer):
    write(tmp_path / "x.safetensors", {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)})
    args = {"a": ocp.ArrayRestoreArgs(global_shape=(4,)), "b": ocp.ArrayRestoreArgs(global_shape=(4.0,))}
    with pytest.raises(ost.TensorMismatchError, match="'b': expected a shape"):
        checkpointer.restore(tmp_path, restore_args=args)


@pytest.mark.both_devices
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


@pytest.mark.parametrize("args", [ocp.args.PyTreeRestore(item={}), ocp.args.StandardRestore({})], ids=str)
def test_arguments_of_another_handler(directory, tmp_path, checkpointer, args):
    advice = r"pass ost\.Safetensors{}\(\.\.\.\), or keep these args with Orbax's handler after ost\.register\({}\)$"
    message = r"expected orbax_safetensors\.SafetensorsRestore, found .*: " + advice.format("Restore", "")
    with pytest.raises(ost.SafetensorsError, match=message):
        checkpointer.restore(directory, args=args)
    with pytest.raises(ost.SafetensorsError, match=advice.format("Save", "save=True")):
        checkpointer.save(tmp_path / "saved", args=ocp.args.PyTreeSave({"w": W}))
    write(tmp_path / "one.safetensors", TENSORS)
    with (
        ost.SafetensorsCheckpointer() as checkpointer,
        pytest.raises(ost.SafetensorsError, match=r"expected orbax_safetensors\.SafetensorsRestore, found"),
    ):
        checkpointer.restore(tmp_path / "one.safetensors", args)


@pytest.mark.both_devices
def test_the_layout_of_a_described_array(directory, checkpointer, mesh):
    wanted = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh, P("x", "y")))
    item = {"layer": {"w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=wanted)}}
    for is_set in (False, True):
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
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
    with pytest.raises(ost.TensorMismatchError, match=r"nearest: 'model\.layers\.0\.experts\.0\.weight'"):
        checkpointer.restore(tmp_path, item=item)


def test_many_wrong_names_are_not_all_listed(directory, checkpointer):
    item = {f"layer.{number}": struct(W) for number in range(100)}
    with pytest.raises(ost.TensorMismatchError, match="and 97 more"):
        checkpointer.restore(directory, item=item)
