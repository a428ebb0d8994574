"""Checkpoints in Orbax's own format that the item writer makes: what stock Orbax would have written, and reads."""

import dataclasses
import os
import threading

import hypothesis
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from orbax_safetensors.errors import SafetensorsError, StorageError, TensorMismatchError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store import (
    OrbaxLeaf,
    named_sharding,
    open_orbax,
)
from tests.support.orbax_items import (
    BF16,
    FORMATS,
    LEAVES,
    MESH,
    SAMPLES,
    all_formats,
    arrays_of,
    boxes,
    file_names,
    fill,
    index,
    is_values,
    json_files,
    leaf_of,
    plain_registry,
    random,
    restore_args,
    same_bits,
    sharded,
    tree_of,
    values,
    write,
)
from tests.support.roots import ROOT
from tests.support.sinks import missing, step_sink
from tests.support.strategies import examples


@pytest.mark.parametrize("name", list(SAMPLES))
def test_a_copy_is_the_same_checkpoint(name, tmp_path):
    sample = ROOT / "testdata" / "orbax" / name
    source = open_orbax(sample)

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class TrainState:
        """Its fields have MaxText's order, which a dict's keys do not keep."""

        step: int
        params: dict
        opt_state: dict

    tree = source.tree(lambda name, leaf: source.value(name) if leaf.kind == "scalar" else leaf)
    with step_sink(tmp_path, TrainState(**tree), custom_metadata=source.custom_metadata) as sink:
        for leaf in sink.leaves:
            array = source.value(leaf)
            for box in missing(sink, leaf):
                sink.write_box(leaf, box, array[index(box)])
        sink.commit()
    assert json_files(tmp_path) == json_files(sample)
    assert file_names(tmp_path) == file_names(sample)
    assert stored_arrays(tmp_path / "0" / "items") == stored_arrays(sample / "0" / "items")


def stored_arrays(item, ocdbt=True):
    """The keys of all chunks, and the metadata of all arrays, byte for byte."""
    spec = {"driver": "file", "path": f"{item}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": spec} if ocdbt else spec).result()
    keys = store.list().result()
    metadata = {key: store.read(key).result().value for key in keys if key.endswith((b"zarr.json", b".zarray"))}
    return sorted(keys), metadata


@pytest.mark.parametrize(
    ("ocdbt", "zarr3", "compression"), [*((*form, True) for form in FORMATS), (*FORMATS[0], False)]
)
def test_what_stock_handlers_would_write(tmp_path, mesh, ocdbt, zarr3, compression):
    custom_metadata = {"scan_layers": True}
    # Without it Orbax shares replicas out, and writes other chunks than shards.
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=ocdbt, use_zarr3=zarr3, use_compression=compression, type_handler_registry=plain_registry()
    )
    with ocp.CheckpointManager(tmp_path / "stock", item_handlers={"items": handler}) as manager:
        manager.save(
            0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(sharded(mesh))), custom_metadata=custom_metadata
        )
    options = {"ocdbt": ocdbt, "zarr3": zarr3, "compression": compression}
    write(tmp_path / "ours", custom_metadata=custom_metadata, **options)
    assert json_files(tmp_path / "ours") == json_files(tmp_path / "stock")
    assert file_names(tmp_path / "ours") == file_names(tmp_path / "stock")
    stock, ours = (stored_arrays(tmp_path / which / "0" / "items", ocdbt) for which in ("stock", "ours"))
    if ocdbt:
        assert ours == stock
    else:  # each chunk's file is named by its key, which has been compared, and it is compressed as it was there
        assert ours[1] == stock[1]


@all_formats
def test_checkpointers_restore_it(tmp_path, mesh, ocdbt, zarr3):
    item = write(tmp_path, ocdbt=ocdbt, zarr3=zarr3)
    for axes in ((), ("y",), (("x", "y"),)):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        is_values(ocp.PyTreeCheckpointer().restore(item, restore_args=restore_args(sharding)))
        is_values(ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(item, restore_args=restore_args(sharding)))


def test_checkpointers_restore_its_own_shardings(tmp_path, mesh):
    item = write(tmp_path)
    with pytest.warns(UserWarning, match="Sharding info not provided"):
        tree = ocp.PyTreeCheckpointer().restore(item)
    is_values(tree)
    for name, leaf in zip(sorted(LEAVES), jax.tree.leaves(arrays_of(tree)), strict=True):
        assert leaf.sharding == NamedSharding(mesh, LEAVES[name][2])


def test_the_standard_checkpointer_restores_it(tmp_path, mesh):
    item = write(tmp_path)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, sharded(mesh))
    with ocp.StandardCheckpointer() as checkpointer:
        is_values(checkpointer.restore(item, target))


def test_a_checkpoint_manager_restores_it(tmp_path, mesh):
    write(tmp_path, custom_metadata={"scan_layers": True})
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, sharded(mesh))
    with ocp.CheckpointManager(tmp_path, item_names=("items",)) as manager:
        assert manager.latest_step() == 0
        is_values(manager.restore(0, args=ocp.args.Composite(items=ocp.args.StandardRestore(target)))["items"])
        assert manager.metadata(0).custom_metadata == {"scan_layers": True}


def test_restored_as_maxtext_does(tmp_path, mesh):
    """A part of the tree, which the legacy transformations pick."""
    item = write(tmp_path)
    arrays, replicated = values(), NamedSharding(mesh, PartitionSpec())
    target = {"params": {name.split(".")[1]: array for name, array in arrays.items() if name.startswith("params.")}}
    args = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=replicated), target)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, restore_concurrent_gb=8)
    found = ocp.Checkpointer(handler).restore(item, item=target, transforms={}, restore_args=args)
    assert found.keys() == {"params"}
    jax.tree.map(lambda leaf, array: same_bits(np.asarray(leaf), array), found, target)


def test_metadata(tmp_path):
    item = write(tmp_path, tree_custom_metadata={"of": ["the", "item"]})
    metadata = ocp.PyTreeCheckpointHandler().metadata(item)
    assert metadata.custom_metadata == {"of": ["the", "item"]}
    assert metadata.tree["opt_state"] == {}
    found = metadata.tree["params"]["kernel"]
    assert (found.shape, found.dtype) == ((8, 12), BF16)
    assert found.storage.chunk_shape == found.storage.write_shape == (4, 3)
    assert found.sharding == named_sharding(tuple(MESH.items()), ("x", "y"))
    assert open_orbax(tmp_path).recorded.custom_metadata == {"of": ["the", "item"]}


def test_tiles_of_several_chunks_from_several_threads(tmp_path):
    shape, chunks = (30, 14, 5), (4, 3, 5)
    arrays = {f"a{number}": random(BF16, shape, number) for number in range(6)}
    tree = {name: OrbaxLeaf(shape, BF16, chunks) for name in arrays}
    tiles = [
        (name, Box(((x, min(x + 8, 30)), (y, min(y + 6, 14)), (0, 5))))
        for name in arrays
        for x in range(0, 30, 8)
        for y in range(0, 14, 6)
    ]
    np.random.default_rng(0).shuffle(tiles)
    failures = []
    with step_sink(tmp_path, tree, memory_bytes=2000) as sink:

        def work(own):
            try:
                for name, box in own:
                    tile = np.asfortranarray(arrays[name][index(box)])
                    sink.write_box(name, box, tile)
                    assert sink.written(name, box)
                    tile[...] = 0  # it is not needed any more
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(tiles[number::4],)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        sink.commit()
    checkpoint = open_orbax(tmp_path)
    for name, array in arrays.items():
        same_bits(checkpoint.value(name), array)


@pytest.mark.parametrize("zarr3", [True, False], ids=["zarr3", "zarr2"])
def test_bits_of_every_dtype(tmp_path, zarr3):
    names = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
             "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")  # fmt: skip
    arrays = {name: random(np.dtype(getattr(ml_dtypes, name, name)), (6, 8)) for name in names}
    arrays["int4"] = np.arange(48).reshape(6, 8).astype(ml_dtypes.int4)
    tree = {name: OrbaxLeaf((6, 8), array.dtype, (3, 8)) for name, array in arrays.items()}
    with step_sink(tmp_path, tree, zarr3=zarr3) as sink:
        fill(sink, arrays)
        sink.commit()
    args = dict.fromkeys(arrays, ocp.RestoreArgs(restore_type=np.ndarray))
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "0" / "items", restore_args=args)
    for name, array in arrays.items():
        same_bits(open_orbax(tmp_path).value(name), array)
        same_bits(found[name], array)


@examples(25)
@hypothesis.given(st.data())
def test_any_shape_in_any_chunks(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 7), max_size=3).map(tuple))
    chunks = tuple(data.draw(st.integers(1, size)) for size in shape)
    array = random(np.dtype(np.int16), shape, data.draw(st.integers(0, 9)))
    ocdbt, zarr3 = data.draw(st.sampled_from(FORMATS))
    path = tmp_path_factory.mktemp("any")
    with step_sink(path, {"a": OrbaxLeaf(shape, array.dtype, chunks)}, ocdbt=ocdbt, zarr3=zarr3) as sink:
        assert not sink.written("a", Box.whole(shape))
        fill(sink, {"a": array})
        assert sink.written("a", Box.whole(shape))
        assert not missing(sink, "a")
        sink.commit()
    checkpoint = open_orbax(path)
    assert checkpoint.leaves["a"].chunk_shape == chunks
    box = data.draw(boxes(shape))
    out = np.empty(box.shape, array.dtype)
    checkpoint.read("a", box, out).result()
    same_bits(out, array[index(box)])


def test_kinds_of_leaves_survive(tmp_path):
    stock = {
        "numpy": np.arange(6.0).reshape(2, 3),
        "text": "a ~ text",
        "flag": True,
        "number": np.float32(0.25),
        "integer": 7,
        "keys": jax.random.key(3),
        "empty": {"list": [], "tuple": (), "dict": {}, "none": None},
    }
    ocp.PyTreeCheckpointer().save(tmp_path / "stock", stock)
    source = open_orbax(tmp_path / "stock")
    assert source.leaves["numpy"].kind == "np.ndarray"
    assert source.leaves["text"].kind == "string"
    assert source.leaves["keys"].random_key == "threefry2x32"
    tree = source.tree(lambda name, leaf: leaf if "[" in str(leaf.shape) or leaf.shape else source.value(name))
    with step_sink(tmp_path / "ours", tree) as sink:
        for name, leaf in sink.leaves.items():
            sink.write_box(name, Box.whole(leaf.shape), source.value(name))
        sink.commit()
    item = tmp_path / "ours" / "0" / "items"
    assert open_orbax(item).leaves == source.leaves
    args = {"keys": ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}
    args = {**jax.tree.map(lambda _: ocp.RestoreArgs(), {**stock, "keys": 0}), **args}
    found = ocp.PyTreeCheckpointer().restore(item, restore_args=args)
    expected = ocp.PyTreeCheckpointer().restore(tmp_path / "stock", restore_args=args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert isinstance(found["numpy"], np.ndarray)
    same_bits(found["numpy"], stock["numpy"])
    assert (found["text"], found["flag"], found["number"]) == ("a ~ text", True, 0.25)
    assert jax.random.key_impl(found["keys"]) == jax.random.key_impl(stock["keys"])
    assert found["empty"] == expected["empty"]


def test_a_step_that_is_there(tmp_path):
    write(tmp_path / "saved")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError, match="0: already exists"):
        step_sink(tmp_path / "saved", tree_of(leaf_of))
    with pytest.raises(StorageError, match="0: already exists"):
        step_sink(tmp_path / "saved", tree_of(leaf_of), resume=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_destination_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be made"):
        step_sink(tmp_path / "file", tree_of(leaf_of))


@pytest.mark.parametrize(
    ("leaf", "why"),
    [
        (OrbaxLeaf((0, 2), BF16, (1, 1)), "no array without elements"),
        (OrbaxLeaf((4, 2), BF16, (4,)), r"\(4,\) is not a shape of chunks"),
        (OrbaxLeaf((4, 2), BF16, (0, 2)), "not a shape of chunks"),
        (OrbaxLeaf((4, 2), BF16, (5, 2)), "not a shape of chunks"),
        (OrbaxLeaf((4,), np.dtype(ml_dtypes.uint4), (4,)), "arrays of uint4 cannot be stored"),
        (OrbaxLeaf((4,), np.dtype("<U4"), (4,)), "arrays of <U4 cannot be stored"),
        (OrbaxLeaf((), np.dtype(np.int64), (), "scalar"), "expected the value of a leaf of kind"),
        (np.zeros(3), "expected an OrbaxLeaf, a scalar or a string, found ndarray"),
        (b"bytes", "found bytes"),
    ],
)
def test_leaves_that_cannot_be_stored(tmp_path, leaf, why):
    with pytest.raises(TensorMismatchError, match=f"0: 'a': .*{why}"):
        step_sink(tmp_path / "new", {"a": leaf})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("tree", [{}, {"a": {}}, {"a": {"b": 1}, "a.b": 1}])
def test_trees_that_cannot_be_stored(tmp_path, tree):
    with pytest.raises(TensorMismatchError):
        step_sink(tmp_path / "new", tree)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"custom_metadata": {"a": {1}}},
        {"tree_custom_metadata": {"a": {1}}},
        {"memory_bytes": 0},
    ],
)
def test_options_that_make_no_sense(tmp_path, options):
    with pytest.raises(SafetensorsError):
        step_sink(tmp_path / "new", tree_of(leaf_of), **options)
    assert not (tmp_path / "new").exists()


@all_formats
def test_any_name_of_an_array(tmp_path, ocdbt, zarr3):
    arrays = {name: random(BF16, (4, 6), seed) for seed, name in enumerate(["a\nb", "\n", "c/0/1", "0.1", "ü"])}
    if not ocdbt:
        del arrays["c/0/1"]  # Orbax makes no directory in a directory of its own
    tree = {name: OrbaxLeaf((4, 6), BF16, (2, 3)) for name in arrays}
    with step_sink(tmp_path, tree, ocdbt=ocdbt, zarr3=zarr3) as sink:
        fill(sink, arrays)
    with step_sink(tmp_path, tree, ocdbt=ocdbt, zarr3=zarr3, resume=True) as sink:
        assert not [name for name in tree if missing(sink, name)]
        sink.commit()
    for name, array in arrays.items():
        same_bits(open_orbax(tmp_path).value(name), array)


def test_a_name_of_an_array_that_is_no_directory(tmp_path):
    """TensorStore would write it to a directory `a` with `b` in it."""
    for name in ("a\\b", "a/../b"):
        with pytest.raises(StorageError, match="whose libraries take this path for"):
            step_sink(tmp_path, {name: OrbaxLeaf((4, 6), BF16, (2, 3))}, ocdbt=False)
    assert not os.listdir(tmp_path)
