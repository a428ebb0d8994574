"""Orbax checkpoints as a source and as a sink, with Orbax's own handlers as the oracle in both directions."""

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import hypothesis
import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from orbax_safetensors.errors import SafetensorsError, StorageError, TensorMismatchError
from orbax_safetensors.orbax_store import (
    OrbaxItem,
    OrbaxLeaf,
    OrbaxSink,
    directories,
    named_sharding,
    open_orbax,
    operations,
    unfinished,
)
from orbax_safetensors.orbax_store import item_writer as drafts
from tests.support.roots import ROOT
from tests.support.sinks import step_sink

SAMPLES = {
    "deepseek3_scanned": ("deepseek3/mt_scanned.npz", {"scan_layers": True}),
    "qwen3_unscanned": ("qwen3/mt_unscanned.npz", {"scan_layers": False}),
}
BF16 = np.dtype(ml_dtypes.bfloat16)

# Whole leaves by name: dtype, shape, and spec over the mesh `x` 2, `y` 4.
LEAVES = {
    "params.kernel": (BF16, (8, 12), PartitionSpec("x", "y")),
    "params.cube": (np.dtype(np.float32), (4, 6, 8), PartitionSpec(None, None, ("x", "y"))),
    "params.table": (np.dtype(ml_dtypes.float8_e4m3fn), (16, 4), PartitionSpec("y")),
    "params.levels": (np.dtype(np.int8), (8, 8), PartitionSpec("x")),
    "params.mask": (np.dtype(np.bool_), (8,), PartitionSpec()),
    "params.scale": (np.dtype(np.float32), (), PartitionSpec()),
    "layers.0.bias": (np.dtype(np.uint32), (4,), PartitionSpec("y")),
    "layers.1.bias": (np.dtype(np.float16), (4,), PartitionSpec("y")),
}
MESH = {"x": 2, "y": 4}

FORMATS = [(ocdbt, zarr3) for ocdbt in (True, False) for zarr3 in (True, False)]
NAMES = ["ocdbt zarr3", "ocdbt zarr2", "files zarr3", "files zarr2"]
all_formats = pytest.mark.parametrize(("ocdbt", "zarr3"), FORMATS, ids=NAMES)


def random(dtype, shape, seed=0):
    """Any bits, so that NaN payloads, -0.0 and subnormals are among them."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def values():
    return {name: random(dtype, shape, seed) for seed, (name, (dtype, shape, _)) in enumerate(LEAVES.items())}


def tree_of(leaf):
    """The tree that `LEAVES` are of, in which there are scalars and empty nodes too."""
    return {
        "step": 7,
        "params": {name.split(".")[1]: leaf(name) for name in LEAVES if name.startswith("params.")},
        "layers": [{"bias": leaf("layers.0.bias")}, {"bias": leaf("layers.1.bias")}],
        "opt_state": {},
        "nothing": None,
        "rate": 0.5,
    }


def sharded(mesh):
    arrays = values()
    return tree_of(lambda name: jax.device_put(arrays[name], NamedSharding(mesh, LEAVES[name][2])))


def leaf_of(name):
    dtype, shape, spec = LEAVES[name]
    parts = [1 if part is None else np.prod([MESH[axis] for axis in np.atleast_1d(part)]) for part in spec]
    parts += [1] * (len(shape) - len(parts))
    chunks = tuple(size // int(part) for size, part in zip(shape, parts, strict=True))
    return OrbaxLeaf(shape, dtype, chunks, sharding=named_sharding(MESH, spec))


def index(box):
    return (*(slice(start, stop) for start, stop in box), ...)  # an array, also where there is no dimension


def whole(shape):
    return tuple((0, size) for size in shape)


def fill(sink, arrays, names=None):
    """Writes all chunks of all arrays, the last first."""
    for name in names or sink.leaves:
        for box in reversed(list(sink.missing(name))):
            sink.write(name, box, arrays[name][index(box)])


def write(destination, **options):
    arrays = values()
    with step_sink(destination, tree_of(leaf_of), **options) as sink:
        fill(sink, arrays)
        sink.commit()
    return destination / "0" / "items"


def same_bits(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def is_values(tree):
    arrays = values()
    jax.tree.map(lambda leaf, name: same_bits(np.asarray(leaf), arrays[name]), arrays_of(tree), arrays_of(tree_of(str)))
    assert tree["step"] == 7
    assert tree["rate"] == 0.5
    assert tree["opt_state"] == {}
    assert tree["nothing"] is None


def arrays_of(tree):
    return {"params": tree["params"], "layers": tree["layers"]}


@pytest.fixture(scope="module", params=["PyTree", "Standard"])
def saved(request, tmp_path_factory):
    """What stock handlers write, by format."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    root = tmp_path_factory.mktemp("saved")
    for ocdbt, zarr3 in FORMATS:
        path = root / f"{ocdbt}{zarr3}" / "3"
        if request.param == "PyTree":
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
            ocp.Checkpointer(handler).save(path, sharded(mesh), custom_metadata={"why": ["test"]})
        else:  # it cannot be told to use Zarr 3
            handler = ocp.StandardCheckpointHandler(use_ocdbt=ocdbt)
            ocp.Checkpointer(handler).save(path, args=ocp.args.StandardSave(sharded(mesh)))
    return lambda ocdbt, zarr3: root / f"{ocdbt}{zarr3}" / "3"


@all_formats
def test_leaves_and_values(saved, ocdbt, zarr3):
    checkpoint = open_orbax(saved(ocdbt, zarr3))
    assert checkpoint.step == 3
    assert checkpoint.ocdbt == ocdbt
    arrays = values()
    assert set(checkpoint.leaves) == {*LEAVES, "step", "rate"}
    for name, (dtype, shape, _) in LEAVES.items():
        expected = leaf_of(name)
        found = checkpoint.leaves[name]
        assert (found.kind, found.shape, found.dtype) == ("jax.Array", shape, dtype)
        # Orbax shares what is replicated out among the replicas.
        if not name.endswith(("mask", "levels", "bias", "table")):
            assert found.chunk_shape == found.write_shape == expected.chunk_shape
        assert found.sharding == expected.sharding
        same_bits(checkpoint.value(name), arrays[name])
    assert checkpoint.leaves["step"].kind == "scalar"
    assert checkpoint.leaves["step"].shape == ()
    is_values(checkpoint.tree(lambda name, leaf: checkpoint.value(name)))


@all_formats
def test_boxes(saved, ocdbt, zarr3):
    checkpoint = open_orbax(saved(ocdbt, zarr3), memory_bytes=64)
    arrays = values()

    @hypothesis.settings(max_examples=40)
    @hypothesis.given(st.data())
    def check(data):
        name = data.draw(st.sampled_from(sorted(LEAVES)))
        box = data.draw(boxes(LEAVES[name][1]))
        every_second = (*(slice(1, None, 2) for _ in box), ...)
        outer = np.zeros([2 * (stop - start) + 1 for start, stop in box], LEAVES[name][0])
        out = outer[every_second]
        nbytes = checkpoint.read(name, box, out).result()
        expected = np.zeros_like(outer)
        expected[every_second] = arrays[name][index(box)]
        same_bits(outer, expected)
        assert nbytes >= out.nbytes

    check()


def test_many_reads_at_once(saved):
    checkpoint = open_orbax(saved(True, True), memory_bytes=1000)
    arrays = values()
    outs = {(name, turn): np.empty_like(arrays[name]) for name in LEAVES for turn in range(20)}
    futures = [checkpoint.read(name, whole(out.shape), out) for (name, _), out in outs.items()]
    assert sum(future.result() for future in futures) == sum(out.nbytes for out in outs.values())
    for (name, _), out in outs.items():
        same_bits(out, arrays[name])


def test_reads_from_many_threads(saved):
    checkpoint = open_orbax(saved(True, True), memory_bytes=300)
    arrays = values()
    failures = []

    def work():
        try:
            for name in LEAVES:
                same_bits(checkpoint.value(name), arrays[name])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@st.composite
def boxes(draw, shape):
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in ends)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_values_are_those_of_its_arrays(name):
    arrays, custom_metadata = SAMPLES[name]
    checkpoint = open_orbax(ROOT / "testdata" / "orbax" / name)
    assert checkpoint.step == 0
    assert checkpoint.custom_metadata == custom_metadata
    with np.load(ROOT / "testdata" / "maxtext" / arrays) as expected:
        assert {f"params.{key.replace('-', '.')}" for key in expected} | {"step"} == set(checkpoint.leaves)
        for key in expected:
            same_bits(checkpoint.value(f"params.{key.replace('-', '.')}"), expected[key])
    tree = checkpoint.tree(lambda name, leaf: leaf.kind)
    assert (tree["step"], tree["opt_state"]) == ("scalar", {})


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
            for box in sink.missing(leaf):
                sink.write(leaf, box, array[index(box)])
        sink.commit()
    assert json_files(tmp_path) == json_files(sample)
    assert file_names(tmp_path) == file_names(sample)
    assert stored_arrays(tmp_path / "0" / "items") == stored_arrays(sample / "0" / "items")


def file_names(root):
    """Names of files, but for those that OCDBT chooses at random, of which there may be any number."""
    names = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    if ocp.__version__.startswith("0.11."):  # writes it on Google Cloud Storage only
        names = {name for name in names if not name.endswith("commit_success.txt")}
    return {re.sub(r"(^|/)d/[0-9a-f]{32}$", r"\1d/*", name) for name in names}


def json_files(root, item="0/items"):
    """What Orbax writes besides arrays, byte for byte, and the step's metadata without its times."""
    step = json.loads((root / item / ".." / "_CHECKPOINT_METADATA").read_text())
    assert step.pop("init_timestamp_nsecs") < step.pop("commit_timestamp_nsecs")
    names = ["_METADATA", "_sharding", "array_metadatas/process_0"]
    texts = {name: (root / item / name).read_bytes() for name in names}
    texts["_sharding"] = sorted(json.loads(texts["_sharding"]).items())  # in the order of a hash
    return texts, json.dumps(step)


def stored_arrays(item, ocdbt=True):
    """The keys of all chunks, and the metadata of all arrays, byte for byte."""
    spec = {"driver": "file", "path": f"{item}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": spec} if ocdbt else spec).result()
    keys = store.list().result()
    metadata = {key: store.read(key).result().value for key in keys if key.endswith((b"zarr.json", b".zarray"))}
    return sorted(keys), metadata


@all_formats
@pytest.mark.parametrize("compression", [True, False], ids=["compressed", "plain"])
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


def restore_args(sharding):
    """All leaves over `sharding` but those that it would cut unevenly."""
    parts = sharding.shard_shape((8,))[0]
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    tree = tree_of(
        lambda name: ocp.ArrayRestoreArgs(
            sharding=sharding if LEAVES[name][1] and LEAVES[name][1][0] % (8 // parts) == 0 else replicated
        )
    )
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, ocp.RestoreArgs) else ocp.RestoreArgs(), tree)


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
    assert found.sharding == named_sharding(MESH, ("x", "y"))
    assert open_orbax(tmp_path).tree_custom_metadata == {"of": ["the", "item"]}


def test_tiles_of_several_chunks_from_several_threads(tmp_path):
    shape, chunks = (30, 14, 5), (4, 3, 5)
    arrays = {f"a{number}": random(BF16, shape, number) for number in range(6)}
    tree = {name: OrbaxLeaf(shape, BF16, chunks) for name in arrays}
    tiles = [
        (name, ((x, min(x + 8, 30)), (y, min(y + 6, 14)), (0, 5)))
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
                    sink.write(name, box, tile).result()
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


@pytest.mark.parametrize(
    "name", ["bool", "int4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
             "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
)  # fmt: skip
@pytest.mark.parametrize("zarr3", [True, False], ids=["zarr3", "zarr2"])
def test_bits_of_every_dtype(tmp_path, name, zarr3):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = random(dtype, (6, 8)) if name != "int4" else np.arange(48).reshape(6, 8).astype(dtype)
    with step_sink(tmp_path, {"a": OrbaxLeaf((6, 8), dtype, (3, 8))}, zarr3=zarr3) as sink:
        fill(sink, {"a": array})
        sink.commit()
    same_bits(open_orbax(tmp_path).value("a"), array)
    args = {"a": ocp.RestoreArgs(restore_type=np.ndarray)}
    same_bits(ocp.PyTreeCheckpointer().restore(tmp_path / "0" / "items", restore_args=args)["a"], array)


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.data())
def test_any_shape_in_any_chunks(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 7), max_size=3).map(tuple))
    chunks = tuple(data.draw(st.integers(1, size)) for size in shape)
    array = random(np.dtype(np.int16), shape, data.draw(st.integers(0, 9)))
    ocdbt, zarr3 = data.draw(st.sampled_from(FORMATS))
    path = tmp_path_factory.mktemp("any")
    with step_sink(path, {"a": OrbaxLeaf(shape, array.dtype, chunks)}, ocdbt=ocdbt, zarr3=zarr3) as sink:
        assert not sink.written("a", whole(shape))
        fill(sink, {"a": array})
        sink.wait()
        assert sink.written("a", whole(shape))
        assert not list(sink.missing("a"))
        sink.commit()
    checkpoint = open_orbax(path)
    assert checkpoint.leaves["a"].chunk_shape == chunks
    box = data.draw(boxes(shape))
    out = np.empty([stop - start for start, stop in box], array.dtype)
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
            sink.write(name, whole(leaf.shape), source.value(name))
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


def plain_registry():
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=False,
        array_metadata_store=ocp.type_handlers.get_type_handler(jax.Array)._array_metadata_store,
    )
    scalars = ocp.type_handlers.ScalarHandler()
    return ocp.type_handlers.create_type_handler_registry((int, scalars), (float, scalars), (jax.Array, arrays))


# What goes wrong.


@pytest.fixture
def item(tmp_path):
    return write(tmp_path / "saved")


def test_a_step_that_is_there(tmp_path, item):
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
        (OrbaxLeaf((4, 2), BF16, (4,)), r"\(4,\) is no shape of chunks"),
        (OrbaxLeaf((4, 2), BF16, (0, 2)), "no shape of chunks"),
        (OrbaxLeaf((4, 2), BF16, (5, 2)), "no shape of chunks"),
        (OrbaxLeaf((4,), np.dtype(ml_dtypes.uint4), (4,)), "arrays of uint4 cannot be stored"),
        (OrbaxLeaf((4,), np.dtype("<U4"), (4,)), "arrays of <U4 cannot be stored"),
        (OrbaxLeaf((), np.dtype(np.int64), (), "scalar"), "is given by its value"),
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
        {"custom_metadata": ["a"]},
        {"tree_custom_metadata": {"a": {1}}},
        {"item": ".."},
        {"item": "../items"},
        {"item": "_CHECKPOINT_METADATA"},
        {"item": "", "others": {"metadata": "/nowhere"}},
        {"others": {"items": "/nowhere"}},
        {"item": "items.orbax-checkpoint-tmp"},
        {"memory_bytes": 0},
    ],
)
def test_options_that_make_no_sense(tmp_path, options):
    with pytest.raises(SafetensorsError):
        step_sink(tmp_path / "new", tree_of(leaf_of), **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "box", "tile", "why"),
    [
        ("params.nothing", ((0, 4),), np.zeros(4, BF16), "has no array 'params.nothing'"),
        ("step", (), np.zeros((), np.int64), "has no array 'step'"),
        ("params.kernel", ((0, 4),), np.zeros(4, BF16), "expected a box of shape"),
        ("params.kernel", ((0, 4), (0, 13)), np.zeros((4, 13), BF16), "expected a box of shape"),
        ("params.kernel", ((4, 0), (0, 3)), np.zeros((4, 3), BF16), "expected a box of shape"),
        ("params.kernel", ((0, 4), (1, 4)), np.zeros((4, 3), BF16), r"chunks of shape \(4, 3\)"),
        ("params.kernel", ((0, 3), (0, 3)), np.zeros((3, 3), BF16), r"chunks of shape \(4, 3\)"),
        ("params.kernel", ((0, 4), (0, 3)), np.zeros((3, 4), BF16), r"array of shape \(4, 3\) of bfloat16"),
        ("params.kernel", ((0, 4), (0, 3)), np.zeros((4, 3), np.float16), "found shape .* of float16"),
        ("params.kernel", ((0, 4), (0, 3)), [[0.0] * 3] * 4, "found list"),
    ],
)
def test_tiles_that_do_not_belong(tmp_path, name, box, tile, why):
    with step_sink(tmp_path, tree_of(leaf_of)) as sink:
        with pytest.raises(TensorMismatchError, match=why):
            sink.write(name, box, tile)
        fill(sink, values())  # it can go on
        sink.commit()
    is_values(open_orbax(tmp_path).tree(lambda name, leaf: open_orbax(tmp_path).value(name)))


def is_not_there(root):
    with pytest.raises(StorageError):
        open_orbax(root)
    for path in root.rglob("*tmp*"):
        with pytest.raises(StorageError, match="was never finished"):
            open_orbax(path)
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.latest_step() is None


def test_chunks_that_are_missing(tmp_path):
    sink = step_sink(tmp_path, tree_of(leaf_of))
    fill(sink, values(), [name for name in LEAVES if name != "params.cube"])
    sink.write("params.cube", ((0, 4), (0, 6), (0, 3)), values()["params.cube"][..., :3])
    with pytest.raises(
        TensorMismatchError, match=r"5 chunks of 'params.cube' .* the first is \(\(0, 4\), .* \(3, 4\)\)"
    ):
        sink.commit()
    is_not_there(tmp_path)
    for again in (sink.commit, sink.wait, lambda: sink.write("params.scale", (), values()["params.scale"])):
        with pytest.raises(StorageError, match="committed or given up"):
            again()
    with step_sink(tmp_path, tree_of(leaf_of), resume=True) as sink:
        assert {name for name in LEAVES if not sink.written(name, whole(LEAVES[name][1]))} == {"params.cube"}
        assert len(list(sink.missing("params.cube"))) == 5
        fill(sink, values())
        sink.commit()
    is_values(open_orbax(tmp_path).tree(lambda name, leaf: open_orbax(tmp_path).value(name)))


@pytest.mark.parametrize("error", [None, ValueError("the source is gone"), KeyboardInterrupt()])
def test_given_up(tmp_path, error):
    def work():
        with step_sink(tmp_path, tree_of(leaf_of)) as sink:
            fill(sink, values())
            if error:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    is_not_there(tmp_path)


def test_what_was_left_behind_is_deleted_unless_it_is_wanted(tmp_path):
    with step_sink(tmp_path, tree_of(leaf_of)) as sink:
        fill(sink, values())
    with step_sink(tmp_path, tree_of(leaf_of)) as sink:
        assert len(list(sink.missing("params.kernel"))) == 8


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tree": {"step": 7}}, "leaves was"),
        ({"ocdbt": False}, "ocdbt was True when it was begun and is False now"),
        ({"zarr3": False}, "zarr3 was True"),
        ({"compression": False}, "compression was True"),
        ({"source": "another"}, "it was begun of another source, or with other arguments; begin anew"),
    ],
)
def test_what_was_left_behind_by_another_sink(tmp_path, change, why):
    with step_sink(tmp_path, tree_of(leaf_of)) as sink:
        fill(sink, values())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TensorMismatchError, match=f"cannot be taken up again: {why}"):
        step_sink(tmp_path, change.pop("tree", tree_of(leaf_of)), resume=True, **change)
    assert sorted(tmp_path.rglob("*")) == before


UNFINISHED = f"0{ocp.path.atomicity.TMP_DIR_SUFFIX}"
with_and_without_resume = pytest.mark.parametrize("resume", [False, True])


def contents(root):
    """All names with what they are of, as a change would show."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in root.rglob("*")
    }


@with_and_without_resume
@pytest.mark.parametrize("kind", ["empty", "step", "items"])
def test_what_orbax_itself_has_not_finished_is_deleted(tmp_path, kind, resume, monkeypatch, caplog):
    if kind == "empty":
        (tmp_path / UNFINISHED).mkdir()
    else:

        def fail(*_):
            raise RuntimeError("nothing works")

        handler, args = ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeSave({"a": np.ones(3)})
        if kind == "items":
            handler, args = ocp.CompositeCheckpointHandler(items=handler), ocp.args.Composite(items=args)
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="nothing works"):
            patched.setattr(ocp.PyTreeCheckpointHandler, "finalize", fail)
            ocp.Checkpointer(handler).save(tmp_path / "0", args=args)
    assert os.listdir(tmp_path) == [UNFINISHED]
    write(tmp_path, resume=resume)
    assert ("has no record of what it was begun for and is deleted" in caplog.text) == resume
    assert os.listdir(tmp_path) == ["0"]
    is_values(open_orbax(tmp_path).tree(lambda name, leaf: open_orbax(tmp_path).value(name)))


@with_and_without_resume
@pytest.mark.parametrize("finished", [False, True])
def test_what_is_no_unfinished_checkpoint_is_never_deleted(tmp_path, finished, resume, caplog):
    if finished:
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "mine", {"a": np.ones(3)})
        (tmp_path / "mine").rename(tmp_path / UNFINISHED)
        why = "is a checkpoint that was finished, as its _CHECKPOINT_METADATA says; move it away"
    else:
        (tmp_path / UNFINISHED).mkdir()
        (tmp_path / UNFINISHED / "model.safetensors").write_text("mine")
        why = "is no unfinished checkpoint, it holds 'model.safetensors'; move it away"
    before = contents(tmp_path)
    with pytest.raises(StorageError, match=f"{UNFINISHED}: {why}"):
        step_sink(tmp_path, tree_of(leaf_of), resume=resume)
    assert contents(tmp_path) == before
    assert "deleted" not in caplog.text


@with_and_without_resume
@pytest.mark.parametrize(
    ("place", "kind"), [("file", "file"), ("link", "link"), ("dangling", "link"), ("item", "link"), ("items", "link")]
)
def test_what_is_no_directory(tmp_path, place, kind, resume):
    """A link is not followed, even to what would be taken up."""
    with step_sink(tmp_path / "other", tree_of(leaf_of)) as sink:
        fill(sink, values())
    path, other = tmp_path / "to" / UNFINISHED, tmp_path / "other" / UNFINISHED
    (tmp_path / "to").mkdir()
    if place == "file":
        path.write_text("mine")
    elif place in ("link", "dangling"):
        path.symlink_to("nothing" if place == "dangling" else other)
    else:
        path.mkdir()
        shutil.copy(other / "_in_progress.json", path)
        path = path / (place if place == "items" else f"items{ocp.path.atomicity.TMP_DIR_SUFFIX}")
        path.symlink_to(other / f"items{ocp.path.atomicity.TMP_DIR_SUFFIX}")
    before = contents(tmp_path)
    with pytest.raises(StorageError, match=f"{path}: is a {kind} and no unfinished checkpoint; move it away"):
        step_sink(tmp_path / "to", tree_of(leaf_of), resume=resume)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", [b"", b'{"leav', b"\xff", b"\0\0", b"[1]", b"null", b'"leaves"'])
def test_a_record_that_is_damaged(tmp_path, text):
    with step_sink(tmp_path, tree_of(leaf_of)) as sink:
        fill(sink, values())
    (tmp_path / UNFINISHED / "_in_progress.json").write_bytes(text)
    with pytest.raises(StorageError, match=r"_in_progress.json: cannot be read: .*; begin anew without resume"):
        step_sink(tmp_path, tree_of(leaf_of), resume=True)
    write(tmp_path)


@pytest.mark.parametrize("left", range(4))
@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "files"])
def test_a_deletion_that_is_cut_short(tmp_path, left, ocdbt, monkeypatch):
    """What is half deleted is neither taken up nor taken for somebody else's."""
    with step_sink(tmp_path, tree_of(leaf_of), ocdbt=ocdbt) as sink:
        fill(sink, values())
    deletions = 0

    def cut_short(function):
        def deletes(path, **more):
            nonlocal deletions
            deletions += 1
            if deletions > left:
                raise OSError(errno.EIO, "killed")
            return function(path, **more)

        return deletes

    with monkeypatch.context() as patched, pytest.raises(StorageError, match="killed"):
        for name in ("unlink", "rmdir"):
            patched.setattr(os, name, cut_short(getattr(os, name)))
        step_sink(tmp_path, tree_of(leaf_of), ocdbt=ocdbt)
    with step_sink(tmp_path, tree_of(leaf_of), ocdbt=ocdbt, resume=True) as sink:
        assert len(list(sink.missing("params.kernel"))) == 8
        fill(sink, values())
        sink.commit()


@all_formats
def test_any_name_of_an_array(tmp_path, ocdbt, zarr3):
    arrays = {name: random(BF16, (4, 6), seed) for seed, name in enumerate(["a\nb", "\n", "c/0/1", "0.1", "ü"])}
    if not ocdbt:
        del arrays["c/0/1"]  # Orbax makes no directory in a directory of its own
    tree = {name: OrbaxLeaf((4, 6), BF16, (2, 3)) for name in arrays}
    with step_sink(tmp_path, tree, ocdbt=ocdbt, zarr3=zarr3) as sink:
        fill(sink, arrays)
    with step_sink(tmp_path, tree, ocdbt=ocdbt, zarr3=zarr3, resume=True) as sink:
        assert not [name for name in tree if list(sink.missing(name))]
        sink.commit()
    for name, array in arrays.items():
        same_bits(open_orbax(tmp_path).value(name), array)


def test_a_name_of_an_array_that_is_no_directory(tmp_path):
    """TensorStore would write it to a directory `a` with `b` in it."""
    for name in ("a\\b", "a/../b"):
        with pytest.raises(StorageError, match="whose libraries take this path for"):
            step_sink(tmp_path, {name: OrbaxLeaf((4, 6), BF16, (2, 3))}, ocdbt=False)
    assert not os.listdir(tmp_path)


@all_formats
@pytest.mark.parametrize("lost", ["params.kernel", "step", "_METADATA"])
def test_a_finished_item_is_looked_at_before_it_has_its_name(tmp_path, lost, ocdbt, zarr3, monkeypatch):
    """Whatever Orbax or a disk has made of it."""
    finalize = ocp.PyTreeCheckpointHandler.finalize

    def lose(self, directory):
        finalize(self, directory)
        if lost == "_METADATA":
            (directory / lost).unlink()
            return
        context = ocp.type_handlers.get_ts_context(use_ocdbt=ocdbt)
        store = directories.kvstore(os.fspath(directory), context, ocdbt=ocdbt)
        store.write(f"{lost}/{'zarr.json' if zarr3 else '.zarray'}", None).result()

    with step_sink(tmp_path, tree_of(leaf_of), ocdbt=ocdbt, zarr3=zarr3) as sink:
        fill(sink, values())
        with monkeypatch.context() as patched, pytest.raises(StorageError, match=lost):
            patched.setattr(ocp.PyTreeCheckpointHandler, "finalize", lose)
            sink.commit()
    is_not_there(tmp_path)


def test_a_merge_that_makes_nothing(tmp_path, monkeypatch):
    with step_sink(tmp_path, tree_of(leaf_of)) as sink:
        fill(sink, values())
        with monkeypatch.context() as patched, pytest.raises(StorageError, match="cannot be found: .* is missing"):
            patched.setattr(ocp.PyTreeCheckpointHandler, "finalize", lambda *_: None)
            sink.commit()
    is_not_there(tmp_path)
    with step_sink(tmp_path, tree_of(leaf_of), resume=True) as sink:
        assert not any(list(sink.missing(name)) for name in LEAVES)
        sink.commit()


STAGES = {
    "save": (ocp.PyTreeCheckpointHandler, "save"),
    "the step's metadata": (type(ocp.metadata.metadata_store(enable_write=True, blocking_write=True)), "update"),
    "merge": (ocp.PyTreeCheckpointHandler, "finalize"),
    "rename": (ocp.path.atomicity.AtomicRenameTemporaryPath, "finalize"),
    "flush": (unfinished, "flush"),
    "last rename": (os, "rename"),
    "listing": (drafts.ItemDraft, "_keys"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "files"])
def test_a_commit_that_fails(tmp_path, stage, ocdbt, monkeypatch):
    with step_sink(tmp_path, tree_of(leaf_of), ocdbt=ocdbt) as sink:
        fill(sink, values())
        with monkeypatch.context() as patched:

            def fail(*_, **__):
                raise RuntimeError("nothing works")

            patched.setattr(*STAGES[stage], fail)
            with pytest.raises(StorageError, match="nothing works"):
                sink.commit()
    is_not_there(tmp_path)
    with step_sink(tmp_path, tree_of(leaf_of), ocdbt=ocdbt, resume=True) as sink:
        assert not any(list(sink.missing(name)) for name in LEAVES)
        sink.commit()
    write(tmp_path / "at once", ocdbt=ocdbt)
    assert json_files(tmp_path) == json_files(tmp_path / "at once")
    shutil.move(tmp_path / "at once", tmp_path.parent / f"{tmp_path.name} at once")
    assert file_names(tmp_path) == file_names(tmp_path.parent / f"{tmp_path.name} at once")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a file system: {mount.stderr.strip()}")
    yield disk
    # TensorStore closes files in threads of its own, perhaps a moment later.
    for _ in range(100):
        unmounted = subprocess.run(["umount", disk], capture_output=True, text=True, check=False)
        if not unmounted.returncode:
            return
        time.sleep(0.1)
    raise AssertionError(unmounted.stderr)


@all_formats
def test_a_disk_that_is_full(small_disk, ocdbt, zarr3):
    array = random(np.dtype(np.int32), (512, 1024))
    tree = {"a": OrbaxLeaf(array.shape, array.dtype, (32, 1024))}

    def work(**options):
        with step_sink(small_disk / "new", tree, ocdbt=ocdbt, zarr3=zarr3, **options) as sink:
            fill(sink, {"a": array})
            sink.commit()

    with pytest.raises(StorageError, match="No space left on device") as caught:
        work()
    assert "'a'" in str(caught.value)
    is_not_there(small_disk / "new")
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    work(resume=True)
    same_bits(open_orbax(small_disk / "new").value("a"), array)


@pytest.mark.parametrize("free", range(0, 40_000, 8_000))
def test_a_disk_that_is_full_when_all_has_been_written(small_disk, free):
    tree = {f"layer_{number:03}": OrbaxLeaf((4,), BF16, (4,)) for number in range(200)}
    with step_sink(small_disk / "new", tree) as sink:
        fill(sink, {name: np.ones(4, BF16) for name in tree})
        sink.wait()
        with open(small_disk / "filler", "wb") as filler:
            status = os.statvfs(small_disk)
            filler.write(bytes(status.f_bavail * status.f_frsize - free))
        try:
            sink.commit()
        except StorageError:
            is_not_there(small_disk / "new")
            (small_disk / "filler").unlink()
            with step_sink(small_disk / "new", tree, resume=True) as sink:
                assert not any(list(sink.missing(name)) for name in tree)
                sink.commit()
    checkpoint = open_orbax(small_disk / "new")
    for name in tree:
        same_bits(checkpoint.value(name), np.ones(4, BF16))


def test_in_flight_bytes_are_bounded(tmp_path, monkeypatch):
    """All that is written and not yet done, at every moment, as the sink counts it."""
    in_flight = peak = 0
    lock = threading.Lock()
    whole_add = operations.Operations.add

    def add(self, operation, budget, taken):
        nonlocal in_flight, peak
        with lock:
            in_flight += 1
            peak = max(peak, in_flight)

        def done(_):
            nonlocal in_flight
            with lock:
                in_flight -= 1

        operation.add_done_callback(done)
        whole_add(self, operation, budget, taken)

    monkeypatch.setattr(operations.Operations, "add", add)
    array = random(np.dtype(np.int32), (64, 8192))
    tree = {"a": OrbaxLeaf(array.shape, array.dtype, (1, 8192))}
    with step_sink(tmp_path, tree, compression=False, memory_bytes=8 * 50_000) as sink:
        fill(sink, {"a": array})
        sink.commit()
    assert 2 <= peak <= 8
    peak = 0
    with step_sink(tmp_path, tree, step=1, memory_bytes=1) as sink:  # less than a tile
        fill(sink, {"a": array})
        sink.commit()
    assert peak == 1
    peak = 0
    checkpoint = open_orbax(tmp_path, memory_bytes=2 * 2 * array.nbytes // 16)
    assert checkpoint.step == 1
    same_bits(checkpoint.value("a"), array)
    assert 2 <= peak <= 4


STREAM = """
import resource, sys
import numpy as np
from orbax_safetensors.orbax_store import OrbaxLeaf, open_orbax
from tests.support.sinks import step_sink

def grown():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before

path, compression, memory_bytes = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
shape, chunk = (4096, 65536), (16, 65536)
tile = np.random.default_rng(0).integers(0, 256, chunk, np.uint8)
out = np.zeros((16, 1000), np.uint8)
tree = {"a": OrbaxLeaf(shape, tile.dtype, chunk)}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with step_sink(path, tree, compression=compression, memory_bytes=memory_bytes, fsync=False) as sink:
    for box in sink.missing("a"):
        sink.write("a", box, tile)
    sink.commit()
written = grown()
checkpoint = open_orbax(path, memory_bytes=memory_bytes)
for first in range(0, 4096, 16):
    checkpoint.read("a", ((first, first + 16), (500, 1500)), out).result()
assert (out == tile[:, 500:1500]).all()
print(written, grown())
"""


@pytest.mark.parametrize("compression", [True, False], ids=["compressed", "plain"])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path, compression):
    """256 MiB in tiles of 1 MiB with 16 MiB in flight. Malloc keeps some of what was given back to it."""
    arguments = [sys.executable, "-c", STREAM, tmp_path, str(compression), str(16 << 20)]
    process = subprocess.run(
        arguments, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False
    )
    assert process.returncode == 0, process.stderr
    written, read = map(int, process.stdout.split())
    assert written < 100 << 20
    assert read < 100 << 20


def test_memory_that_somebody_waits_for_when_a_write_fails(tmp_path, monkeypatch):
    """Threads that wait for their turn go on, and learn what has failed."""
    array = random(np.dtype(np.int32), (8, 8))
    sink = step_sink(tmp_path, {"a": OrbaxLeaf((8, 8), array.dtype, (1, 8))}, memory_bytes=1)
    shutil.rmtree(tmp_path / f"0{ocp.path.atomicity.TMP_DIR_SUFFIX}")
    (tmp_path / f"0{ocp.path.atomicity.TMP_DIR_SUFFIX}").write_text("")
    failures = []

    def work(number):
        try:
            sink.write("a", ((number, number + 1), (0, 8)), array[number : number + 1])
            sink.wait()
        except StorageError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 8
    with pytest.raises(StorageError, match="'a': NOT_FOUND"):
        sink.commit()


def test_larger_chunks_than_orbax_keeps_in_one_file(tmp_path):
    shape = (3, 1 << 30)
    with step_sink(tmp_path, {"a": OrbaxLeaf(shape, np.dtype(np.int8), shape)}) as sink:
        assert np.prod(sink.leaves["a"].chunk_shape) <= 1 << 31
        assert len(list(sink.missing("a"))) > 1


def test_without_waiting_for_the_disk(tmp_path):
    write(tmp_path, fsync=False)
    is_values(open_orbax(tmp_path).tree(lambda name, leaf: open_orbax(tmp_path).value(name)))


# What is no checkpoint.


def test_where_nothing_is(tmp_path):
    with pytest.raises(StorageError, match="found nothing"):
        open_orbax(tmp_path / "nothing")
    with pytest.raises(StorageError, match="holds no finished checkpoint"):
        open_orbax(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="found a file"):
        open_orbax(tmp_path / "file")
    for nowhere in ("s3://bucket/0", "gs://", "https://host/0"):
        with pytest.raises(StorageError, match="in file systems and below gs://bucket only"):
            open_orbax(nowhere)
        with pytest.raises(StorageError, match="in file systems and below gs://bucket only"):
            OrbaxSink(nowhere, {"items": OrbaxItem(tree_of(leaf_of))})


def test_places_of_a_checkpoint(tmp_path):
    for step in (2, 10):
        write(tmp_path, step=step) if step == 0 else None
        with step_sink(tmp_path, {"a": OrbaxLeaf((1,), np.dtype(np.int64), (1,))}, step=step) as sink:
            sink.write("a", ((0, 1),), np.array([step]))
            sink.commit()
    (tmp_path / "notes").mkdir()
    (tmp_path / f"11{ocp.path.atomicity.TMP_DIR_SUFFIX}").mkdir()
    for path, step in {".": 10, "2": 2, "10": 10, "2/items": 2}.items():
        checkpoint = open_orbax(tmp_path / path)
        assert checkpoint.step == step
        assert checkpoint.value("a") == [step]
        assert checkpoint.path == str(tmp_path / str(step) / "items")
    with pytest.raises(StorageError, match="holds no finished checkpoint"):
        open_orbax(tmp_path / "notes")


def test_several_items(tmp_path):
    state = {"a": np.arange(3)}
    with ocp.CheckpointManager(tmp_path) as manager:
        save = ocp.args.StandardSave
        manager.save(5, args=ocp.args.Composite(params=save(state), state=save({"b": np.arange(4)})))
    with pytest.raises(StorageError, match=r"holds several items, .*\['params', 'state'\]"):
        open_orbax(tmp_path)
    assert open_orbax(tmp_path / "5" / "state").step == 5
    assert open_orbax(tmp_path / "5" / "state").value("b").tolist() == [0, 1, 2, 3]


def test_any_tree(tmp_path):
    """Names and structure are Orbax's own, whatever the tree is made of. Numbers may be NumPy's."""

    class Pair(NamedTuple):
        left: Any
        right: Any

    leaf = OrbaxLeaf((np.int64(4),), np.dtype(np.int8), (np.int64(2),))
    tree = {"pair": Pair(leaf, [leaf, (leaf, 1.5)]), "state": optax.EmptyState(), "by number": {1: leaf}}
    with step_sink(tmp_path, tree) as sink:
        assert list(sink.leaves) == ["by number.1", "pair.left", "pair.right.0", "pair.right.1.0"]
        fill(sink, {name: np.arange(4, dtype=np.int8) for name in sink.leaves})
        sink.commit()
    target = jax.tree.map(lambda leaf: 0.0 if leaf == 1.5 else np.zeros(4, np.int8), tree)
    args = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray if np.ndim(leaf) else float), target)
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "0" / "items", item=target, restore_args=args)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    checkpoint = open_orbax(tmp_path)
    assert list(checkpoint.leaves) == [*sink.leaves, "pair.right.1.1"]
    names = checkpoint.tree(lambda name, leaf: name)
    assert names["pair"] == {"left": "pair.left", "right": ["pair.right.0", ["pair.right.1.0", "pair.right.1.1"]]}
    assert names["state"] is None


def test_names_of_steps(tmp_path):
    options = ocp.CheckpointManagerOptions(step_prefix="step", step_format_fixed_length=6)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (9, 11):
            manager.save(step, args=ocp.args.StandardSave({"a": np.array([step])}))
    assert open_orbax(tmp_path).step == 11
    assert open_orbax(tmp_path / "step_000009").value("a") == [9]


def test_a_checkpoint_without_steps(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", {"a": np.arange(3)}, custom_metadata={"why": 1})
    checkpoint = open_orbax(tmp_path / "saved")
    assert checkpoint.step is None
    assert checkpoint.custom_metadata == {"why": 1}
    assert checkpoint.value("a").tolist() == [0, 1, 2]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"tree_metadata": 3}', '{"tree_metadata": {"a": 3}}'])
def test_metadata_that_nobody_wrote(item, text):
    (item / "_METADATA").write_text(text)
    with pytest.raises(StorageError, match="_METADATA"):
        open_orbax(item)


@pytest.mark.parametrize(("file", "text"), [("_sharding", "{"), ("array_metadatas/process_0", "{}")])
def test_records_that_nobody_wrote(item, file, text):
    (item / file).write_text(text)
    with pytest.raises(StorageError, match=file):
        open_orbax(item)


def test_kinds_that_are_not_known(item):
    text = (item / "_METADATA").read_text()
    (item / "_METADATA").write_text(text.replace('"scalar"', '"my.Handler"'))
    with pytest.raises(TensorMismatchError, match="'rate': is a leaf of kind 'my.Handler'"):
        open_orbax(item)


def test_shardings_that_are_not_known(item):
    shardings = json.loads((item / "_sharding").read_text())
    first = next(iter(shardings))
    shardings[first] = '{"sharding_type": "PositionalSharding"}'
    (item / "_sharding").write_text(json.dumps(shardings))
    leaves = open_orbax(item).leaves
    assert sum(leaf.sharding is None for leaf in leaves.values() if leaf.kind == "jax.Array") == 1


def test_arrays_that_are_missing_or_damaged(item, tmp_path):
    plain = write(tmp_path / "plain", ocdbt=False)
    shutil.rmtree(plain / "params.scale")
    with pytest.raises(StorageError, match=r"'params.scale': .*NOT_FOUND"):
        open_orbax(plain)
    for data in item.rglob("d/*"):
        data.write_bytes(b"")
    with pytest.raises(StorageError):
        open_orbax(item).value("params.kernel")


def test_chunks_that_are_missing_or_damaged(tmp_path):
    plain = write(tmp_path, ocdbt=False)
    (plain / "params.kernel" / "c" / "1" / "2").unlink()
    (plain / "params.table" / "c" / "1" / "0").write_bytes(b"short")
    checkpoint = open_orbax(plain)
    kernel, table = np.empty((8, 12), BF16), np.empty((16, 4), np.dtype(ml_dtypes.float8_e4m3fn))
    with pytest.raises(StorageError, match=r"'params.kernel': .*missing"):
        checkpoint.read("params.kernel", whole((8, 12)), kernel).result()
    with pytest.raises(StorageError, match="'params.table': "):
        checkpoint.read("params.table", whole((16, 4)), table).result()
    checkpoint.read("params.kernel", ((0, 4), (0, 12)), kernel[:4]).result()
    same_bits(kernel[:4], values()["params.kernel"][:4])


@pytest.mark.parametrize(
    ("name", "box", "out", "why"),
    [
        ("params.nothing", ((0, 4),), np.zeros(4, BF16), "has no leaf 'params.nothing'"),
        ("params.mask", ((0, 9),), np.zeros(9, np.bool_), "expected a box of shape"),
        ("params.mask", ((-1, 2),), np.zeros(3, np.bool_), "expected a box of shape"),
        ("params.mask", ((0, 3),), np.zeros(4, np.bool_), "expected an array of shape"),
        ("params.mask", ((0, 3),), np.zeros(3, np.int8), "found shape .* of int8"),
        ("params.mask", ((0, 3),), np.frombuffer(bytes(3), np.bool_), "is read-only"),
    ],
)
def test_boxes_that_are_not_there(item, name, box, out, why):
    with pytest.raises(TensorMismatchError, match=why):
        open_orbax(item).read(name, box, out)
