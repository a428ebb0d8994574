"""The same call to Orbax's own handlers and to ours gives the same tree, types, dtypes, shardings and bits."""

import enum

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.support.files import random_bits, write

RNG = np.random.default_rng(0)
KERNEL = random_bits(RNG, (16, 8), np.dtype("f4"))
BIAS = random_bits(RNG, (8,), np.dtype(ml_dtypes.bfloat16))
STEP = np.array(7, np.int32)
TREE = {"dense": {"kernel": KERNEL, "bias": BIAS}, "step": STEP}
WIDTHS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]


class Matrix(np.ndarray):
    """A subclass of NumPy's arrays."""


class Number(enum.IntEnum):
    """A subclass of int."""

    SEVEN = 7


def names(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@pytest.fixture
def both(tmp_path):
    """Restores a tree of NumPy arrays from Orbax's files and from ours, with the same arguments."""
    return save_both(tmp_path, TREE)


def save_both(tmp_path, tree):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)
    (tmp_path / "safetensors").mkdir()
    write(tmp_path / "safetensors" / "model.safetensors", names(tree))

    def restore(**kwargs):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            expected = checkpointer.restore(tmp_path / "orbax", **given_to_orbax(kwargs))
        with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
            found = checkpointer.restore(tmp_path / "safetensors", **kwargs)
        assert_same(found, expected)
        return found

    return restore


def given_to_orbax(kwargs):
    """Orbax's handler takes `partial_restore` in `args` only."""
    return {"args": ocp.args.PyTreeRestore(**kwargs)} if "partial_restore" in kwargs else kwargs


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        if isinstance(other, jax.Array):
            assert one.sharding == other.sharding


def abstract(mesh, tree=TREE):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())), tree)


def array_args(mesh, tree=TREE):
    return jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, P())), tree)


# --- what a leaf is restored as ---


@pytest.mark.parametrize("kind", [type(jnp.zeros(1)), jax.Array], ids=["of an array", "jax.Array"])
def test_restore_type_of_a_jax_array(both, mesh, kind):
    all_args = array_args(mesh)
    all_args["dense"]["kernel"] = ocp.ArrayRestoreArgs(restore_type=kind, sharding=NamedSharding(mesh, P("x", "y")))
    restored = both(item=abstract(mesh), restore_args=all_args)
    assert restored["dense"]["kernel"].sharding.spec == P("x", "y")


@pytest.mark.parametrize("kind", [np.ndarray, Matrix, np.memmap])
def test_restore_type_of_a_numpy_array(both, mesh, kind):
    args = array_args(mesh)
    args["dense"]["kernel"] = ocp.RestoreArgs(restore_type=kind)
    assert type(both(item=abstract(mesh), restore_args=args)["dense"]["kernel"]) is np.ndarray


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.float32, np.float64, int, float])
def test_restore_type_of_a_scalar(both, mesh, kind):
    args = {**array_args(mesh), "step": ocp.RestoreArgs(restore_type=kind)}
    assert both(item=abstract(mesh), restore_args=args)["step"] == kind(7)


@pytest.mark.parametrize("stored", [np.array(True), np.array(1, np.uint8), np.array(0.0)], ids=str)
def test_restore_type_of_a_bool(tmp_path, stored):
    both = save_both(tmp_path, {"flag": stored})
    assert both(restore_args={"flag": ocp.RestoreArgs(restore_type=bool)})["flag"] is bool(stored)


@pytest.mark.parametrize("kind", [np.bool_, ml_dtypes.bfloat16, Number])
def test_scalars_that_orbax_does_not_have(both, tmp_path, kind):
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        restored = checkpointer.restore(
            tmp_path / "safetensors",
            restore_args={"step": ocp.RestoreArgs(restore_type=kind)},
            partial_restore=True,
        )["step"]
    assert isinstance(restored, int if kind is Number else kind)
    assert restored == kind(7)


@pytest.mark.parametrize(
    "kind", [np.generic, np.number, np.str_, str, complex, object, "jax.Array", [jax.Array]], ids=str
)
def test_types_that_no_tensor_is_restored_as(both, tmp_path, kind):
    with (
        ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer,
        pytest.raises(ost.TensorMismatchError, match=r"'step': restore_type is .* can be jax\.Array, np\.ndarray, "),
    ):
        args = {"step": ocp.RestoreArgs(restore_type=kind)}
        checkpointer.restore(tmp_path / "safetensors", restore_args=args, partial_restore=True)


def test_a_numpy_scalar_of_a_vector_is_an_error(both, tmp_path):
    with (
        ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer,
        pytest.raises(ost.TensorMismatchError, match=r"'dense.bias': expected shape \(\), found \(8,\)"),
    ):
        args = {"dense": {"bias": ocp.RestoreArgs(restore_type=np.float32)}}
        checkpointer.restore(tmp_path / "safetensors", restore_args=args, partial_restore=True)


# --- which leaves are restored ---


@pytest.mark.parametrize("item", [{"step": 0}, {"dense": {"bias": 0}}, {"dense": {"kernel": 0}, "step": 0}], ids=str)
def test_a_part_with_the_restore_args_of_all(both, mesh, item):
    wanted = jax.tree.map(lambda _, whole: whole, item, prune(abstract(mesh), item))
    both(item=wanted, restore_args=array_args(mesh), partial_restore=True)
    both(item=wanted, restore_args=prune(array_args(mesh), item), transforms={})
    both(item=wanted, restore_args=array_args(mesh), transforms={})


def prune(tree, like):
    return {name: prune(tree[name], below) for name, below in like.items()} if isinstance(like, dict) else tree


def test_restore_args_beyond_the_item_are_an_error_without_partial_restore(both, tmp_path, mesh):
    with (
        ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer,
        pytest.raises(ost.TensorMismatchError, match=r"item does not have 'dense\.bias', 'dense\.kernel'"),
    ):
        item = {"step": abstract(mesh)["step"]}
        checkpointer.restore(tmp_path / "safetensors", item=item, restore_args=array_args(mesh))


def test_an_item_beyond_the_restore_args_is_an_error(both, tmp_path, mesh):
    with (
        ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer,
        pytest.raises(ost.TensorMismatchError, match="restore_args does not have 'step'"),
    ):
        args = ost.SafetensorsRestore(abstract(mesh), {"dense": array_args(mesh)["dense"]}, partial_restore=True)
        checkpointer.restore(tmp_path / "safetensors", args=args)


@pytest.mark.parametrize("empty", [None, {}, (), []], ids=repr)
def test_an_empty_node_in_the_place_of_an_array(both, mesh, empty):
    item = abstract(mesh)
    item["dense"]["kernel"] = empty
    assert both(item=item, restore_args=array_args(mesh))["dense"]["kernel"] == empty
    unsaid = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), item)
    assert both(item=unsaid)["dense"]["kernel"] == empty


def test_none_with_partial_restore(both, mesh):
    item = {**abstract(mesh), "step": None}
    assert both(item=item, restore_args=array_args(mesh), partial_restore=True)["step"] is None
    unsaid = {"dense": None, "step": jax.ShapeDtypeStruct((), np.int32)}
    assert both(item=unsaid, partial_restore=True)["dense"] is None


def test_none_in_the_place_of_a_tree_is_an_error(both, tmp_path, mesh):
    item = {**abstract(mesh), "dense": None}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer, pytest.raises(ValueError, match="dense"):
        checkpointer.restore(tmp_path / "orbax", item=item)
    with (
        ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer,
        pytest.raises(ost.TensorMismatchError, match=r"not in the tree .*: 'dense\.kernel', 'dense\.bias'"),
    ):
        checkpointer.restore(tmp_path / "safetensors", item=item)


def test_none_in_restore_args_says_nothing(both, mesh):
    item = abstract(mesh)
    item["step"] = jax.ShapeDtypeStruct((), np.int32)
    assert type(both(item=item, restore_args={**array_args(mesh), "step": None})["step"]) is np.ndarray


def test_transforms_are_an_error(both, tmp_path, mesh):
    with (
        ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer,
        pytest.raises(ost.SafetensorsError, match="transforms cannot be applied to safetensors: describe the tree"),
    ):
        checkpointer.restore(
            tmp_path / "safetensors",
            item={"count": abstract(mesh)["step"]},
            transforms={"count": ocp.Transform(original_key="step")},
        )


def test_a_part_of_a_plain_directory_for_orbaxs_own_handlers(both, tmp_path, mesh, monkeypatch):
    """Orbax compares items only with its `_METADATA`, and without one it tells type handlers the same in all cases.

    If a version of it tells who called, or `partial_restore`, `register` can make standard restores of parts errors.
    """
    told, deserialize = [], ost.SafetensorsTypeHandler.deserialize

    def remember(self, infos, args=None):
        made_anew = {"byte_limiter", "ts_context"}
        told.append(([{key: at for key, at in vars(info).items() if key not in made_anew} for info in infos], args))
        return deserialize(self, infos, args)

    monkeypatch.setattr(ost.SafetensorsTypeHandler, "deserialize", remember)
    item = {"dense": abstract(mesh)["dense"]}
    args = ocp.checkpoint_utils.construct_restore_args(item)
    standard = ocp.args.StandardRestore(item)
    trees = [ocp.args.PyTreeRestore(item, args, **more) for more in ({}, {"partial_restore": True}, {"transforms": {}})]
    ost.register()
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            with pytest.raises(ValueError, match="structures do not match"):
                checkpointer.restore(tmp_path / "orbax", args=standard)
            restored = checkpointer.restore(tmp_path / "safetensors", args=standard)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            for tree in trees:
                assert_same(checkpointer.restore(tmp_path / "safetensors", args=tree), restored)
    finally:
        ost.unregister()
    assert_same(restored, both(item=item, restore_args=args, partial_restore=True))
    assert told == [told[0]] * 4
    with pytest.raises(ost.TensorMismatchError, match="in the checkpoint but not in the tree .*: 'step'"):
        ost.load(tmp_path / "safetensors", item)


# --- arrays that nobody gave a sharding ---


@pytest.mark.parametrize("said", ["item", "item and RestoreArgs", "construct_restore_args", "standard"])
def test_an_array_without_a_sharding_is_numpys_in_all_widths(tmp_path, said):
    tree = {width: random_bits(RNG, (3,), np.dtype(width)) for width in WIDTHS}
    both = save_both(tmp_path, tree)
    item = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    if said == "standard":
        with ocp.StandardCheckpointer() as checkpointer:
            expected = checkpointer.restore(tmp_path / "orbax", item)
        with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
            restored = checkpointer.restore(tmp_path / "safetensors", item)
        assert_same(restored, expected)
    elif said == "item":
        restored = both(item=item)
    elif said == "item and RestoreArgs":
        restored = both(item=item, restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(), item))
    else:
        restored = both(item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item))
    for width, array in tree.items():
        assert type(restored[width]) is np.ndarray
        assert restored[width].dtype == width
        assert restored[width].tobytes() == array.tobytes()


def test_a_directory_of_hugging_face_without_shardings(tmp_path):
    """Also where Orbax's handlers read it, to which a leaf without metadata is a NumPy array."""
    write(tmp_path / "x.safetensors", {"wide": np.array([2**40])})
    ost.register()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(tmp_path, item={"wide": jax.ShapeDtypeStruct((1,), np.int64)})["wide"]
    finally:
        ost.unregister()
    assert (type(restored), restored.dtype, restored.tolist()) == (np.ndarray, np.int64, [2**40])


# --- saving ---


@pytest.mark.parametrize("empty", [None, {}, (), []], ids=repr)
def test_save_args_of_empty_nodes(tmp_path, empty):
    tree = {"nothing": empty, "deeper": [empty, {"w": KERNEL}]}
    args = {"nothing": ocp.SaveArgs(), "deeper": [ocp.SaveArgs(), {"w": ocp.SaveArgs(dtype=np.dtype("f8"))}]}
    for name, handler in (("orbax", ocp.PyTreeCheckpointHandler()), ("ours", ost.SafetensorsHandler())):
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(tmp_path / name, tree, save_args=args)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        expected = checkpointer.restore(tmp_path / "orbax")["deeper"][1]["w"]
    stored = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    assert stored.keys() == {"deeper.1.w"}
    assert stored["deeper.1.w"].dtype == expected.dtype == np.float64
    assert stored["deeper.1.w"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">f2", ">c8"])
def test_arrays_of_the_other_byte_order(tmp_path, dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    tree = {"w": values, "s": values[1, 2], "t": values.T}
    for name, handler in (("orbax", ocp.PyTreeCheckpointHandler()), ("ours", ost.SafetensorsHandler())):
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(
                tmp_path / name, {key: leaf for key, leaf in tree.items() if name == "ours" or key != "s"}
            )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        expected = checkpointer.restore(tmp_path / "orbax")
    stored = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    assert stored.keys() == tree.keys()
    for name, array in stored.items():
        assert array.dtype == np.dtype(dtype).newbyteorder("<")
        np.testing.assert_array_equal(array, tree[name])
    for name, array in expected.items():
        np.testing.assert_array_equal(array, stored[name])
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:  # a tree that has been saved says what to restore
        restored = checkpointer.restore(tmp_path / "ours", item=tree)
    for name, array in restored.items():
        assert array.dtype.isnative
        np.testing.assert_array_equal(array, tree[name])


def test_a_cast_to_the_other_byte_order(tmp_path):
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.save(tmp_path / "x", {"w": KERNEL}, save_args={"w": ocp.SaveArgs(dtype=np.dtype(">f8"))})
    stored = safetensors.numpy.load_file(tmp_path / "x" / "model.safetensors")["w"]
    assert stored.tobytes() == KERNEL.astype(np.float64).tobytes()


# --- what is missing ---


@pytest.mark.parametrize("place", ["nowhere", "nowhere/model.safetensors", "empty", "index"])
def test_what_is_missing_is_a_file_not_found_error(tmp_path, place):
    (tmp_path / "empty").mkdir()
    (tmp_path / "index").mkdir()
    index = '{"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}'
    (tmp_path / "index" / "model.safetensors.index.json").write_text(index)
    path = epath.Path(tmp_path / place)
    item = {"w": jax.ShapeDtypeStruct((2,), np.float32)}
    calls = [
        lambda: ost.SafetensorsHandler().restore(path, ost.SafetensorsRestore(item)),
        lambda: ost.SafetensorsHandler().metadata(path),
        lambda: ost.open_checkpoint(path),
        lambda: ost.plan_restore(path, item),
    ]
    if place.startswith("nowhere"):
        calls.append(lambda: ost.convert(path, tmp_path / "to", to="orbax"))
        calls.append(lambda: ost.reshard(path, tmp_path / "to", mesh={"x": 2}, spec={"w": ("x",)}))
    for call in calls:
        with pytest.raises(FileNotFoundError, match=place.rpartition("/")[0] or place) as raised:
            call()
        assert isinstance(raised.value, ost.MissingError)
        assert isinstance(raised.value, ost.StorageError)
    with pytest.raises(FileNotFoundError):
        ocp.PyTreeCheckpointHandler().restore(path)
