"""Orbax checkpoints as a source and as a sink, with Orbax's own handlers as the oracle in both directions."""

import json
import shutil
import threading
from typing import Any, NamedTuple

import hypothesis
import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store import (
    OrbaxItem,
    OrbaxLeaf,
    UnfinishedCheckpoint,
    open_orbax,
)
from tests.support.orbax_items import (
    BF16,
    FORMATS,
    LEAVES,
    SAMPLES,
    boxes,
    fill,
    index,
    is_values,
    leaf_of,
    same_bits,
    sharded,
    tree_of,
    values,
    write,
)
from tests.support.roots import ROOT
from tests.support.sinks import step_sink
from tests.support.steps import step_of
from tests.support.strategies import examples

HANDLERS = {
    f"PyTree, {ocdbt=}, {zarr3=}": ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    for ocdbt, zarr3 in FORMATS
} | {"Standard": ocp.StandardCheckpointHandler()}


@pytest.fixture(scope="module", params=list(HANDLERS))
def saved(request, tmp_path_factory):
    """What a stock handler writes."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    path = tmp_path_factory.mktemp("saved") / "3"
    args = ocp.args.StandardSave if request.param == "Standard" else ocp.args.PyTreeSave
    ocp.Checkpointer(HANDLERS[request.param]).save(path, args=args(sharded(mesh)))
    return path


def test_leaves_and_values(saved):
    checkpoint = open_orbax(saved)
    assert step_of(checkpoint) == 3
    assert checkpoint.ocdbt == (saved / "manifest.ocdbt").exists()
    arrays = values()
    assert set(checkpoint.leaves) == {*LEAVES, "step", "rate"}
    for name, (dtype, shape, _) in LEAVES.items():
        expected = leaf_of(name)
        found = checkpoint.leaves[name]
        assert (found.kind, found.shape, found.dtype) == ("jax.Array", shape, dtype)
        # Orbax shares what is replicated out among the replicas.
        if not name.endswith(("mask", "levels", "bias", "table")):
            assert found.chunk_shape == expected.chunk_shape
        assert found.sharding == expected.sharding
        same_bits(checkpoint.value(name), arrays[name])
    assert checkpoint.leaves["step"].kind == "scalar"
    assert checkpoint.leaves["step"].shape == ()
    is_values(checkpoint.tree(lambda name, leaf: checkpoint.value(name)))


def test_boxes(saved):
    checkpoint = open_orbax(saved, memory_bytes=64)
    arrays = values()

    @examples(40)
    @hypothesis.given(st.data())
    def check(data):
        name = data.draw(st.sampled_from(sorted(LEAVES)))
        box = data.draw(boxes(LEAVES[name][1]))
        every_second = (*(slice(1, None, 2) for _ in box), ...)
        outer = np.zeros([2 * (stop - start) + 1 for start, stop in box], LEAVES[name][0])
        out = outer[every_second]
        checkpoint.read(name, box, out).result()
        expected = np.zeros_like(outer)
        expected[every_second] = arrays[name][index(box)]
        same_bits(outer, expected)

    check()


def test_many_reads_at_once(item):
    checkpoint = open_orbax(item, memory_bytes=1000)
    arrays = values()
    outs = {(name, turn): np.empty_like(arrays[name]) for name in LEAVES for turn in range(20)}
    futures = [checkpoint.read(name, Box.whole(out.shape), out) for (name, _), out in outs.items()]
    for future in futures:
        future.result()
    for (name, _), out in outs.items():
        same_bits(out, arrays[name])


def test_reads_from_many_threads(item):
    checkpoint = open_orbax(item, memory_bytes=300)
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


@pytest.mark.parametrize("name", list(SAMPLES))
def test_values_are_those_of_its_arrays(name):
    arrays, custom_metadata = SAMPLES[name]
    checkpoint = open_orbax(ROOT / "testdata" / "orbax" / name)
    assert step_of(checkpoint) == 0
    assert checkpoint.custom_metadata == custom_metadata
    with np.load(ROOT / "testdata" / "maxtext" / arrays) as expected:
        assert {f"params.{key.replace('-', '.')}" for key in expected} | {"step"} == set(checkpoint.leaves)
        for key in expected:
            same_bits(checkpoint.value(f"params.{key.replace('-', '.')}"), expected[key])
    tree = checkpoint.tree(lambda name, leaf: leaf.kind)
    assert (tree["step"], tree["opt_state"]) == ("scalar", {})


@pytest.fixture
def item(tmp_path):
    return write(tmp_path / "saved")


def test_where_nothing_is(tmp_path):
    with pytest.raises(StorageError, match="found nothing"):
        open_orbax(tmp_path / "nothing")
    with pytest.raises(StorageError, match="holds no finished checkpoint"):
        open_orbax(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="found a file"):
        open_orbax(tmp_path / "file")
    for nowhere in ("s3://bucket/0", "gs://", "https://host/0"):
        why = "in file systems and below gs://bucket only|expected a name after gs://"
        with pytest.raises(StorageError, match=why):
            open_orbax(nowhere)
        with pytest.raises(StorageError, match=why):
            UnfinishedCheckpoint(nowhere, {"items": OrbaxItem(tree_of(leaf_of))})


def test_places_of_a_checkpoint(tmp_path):
    for step in (2, 10):
        write(tmp_path, step=step) if step == 0 else None
        with step_sink(tmp_path, {"a": OrbaxLeaf((1,), np.dtype(np.int64), (1,))}, step=step) as sink:
            sink.write_box("a", Box(((0, 1),)), np.array([step]))
            sink.commit()
    (tmp_path / "notes").mkdir()
    (tmp_path / f"11{ocp.path.atomicity.TMP_DIR_SUFFIX}").mkdir()
    for path, step in {".": 10, "2": 2, "10": 10, "2/items": 2}.items():
        checkpoint = open_orbax(tmp_path / path)
        assert step_of(checkpoint) == step
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
    assert step_of(open_orbax(tmp_path / "5" / "state")) == 5
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
    assert step_of(open_orbax(tmp_path)) == 11
    assert open_orbax(tmp_path / "step_000009").value("a") == [9]


def test_a_checkpoint_without_steps(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", {"a": np.arange(3)}, custom_metadata={"why": 1})
    checkpoint = open_orbax(tmp_path / "saved")
    assert step_of(checkpoint) is None
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
        checkpoint.read("params.kernel", Box.whole((8, 12)), kernel).result()
    with pytest.raises(StorageError, match="'params.table': "):
        checkpoint.read("params.table", Box.whole((16, 4)), table).result()
    checkpoint.read("params.kernel", Box(((0, 4), (0, 12))), kernel[:4]).result()
    same_bits(kernel[:4], values()["params.kernel"][:4])


def test_a_leaf_that_is_not_there(item):
    with pytest.raises(TensorMismatchError, match="has no leaf 'params.nothing'"):
        open_orbax(item).value("params.nothing")
