"""Saving through Orbax: every way in, trees of every kind and back, and what a failure leaves."""

import asyncio
import collections
import contextlib
import dataclasses
import errno
import os
import shutil
import tempfile
import threading
from pathlib import Path
from unittest import mock

import flax
import flax.nnx
import flax.training.train_state
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.storage import local
from tests.support import hang
from tests.support.files import DTYPES, nothing_left, random_bits, stored_arrays
from tests.support.strategies import examples

RNG = np.random.default_rng(0)
W = random_bits(RNG, (16, 8), np.dtype("f4"))
B = random_bits(RNG, (8,), np.dtype(ml_dtypes.bfloat16))


@pytest.fixture
def checkpointer():
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        yield checkpointer


@pytest.fixture
def tree(mesh):
    return {"layer": {"w": sharded(W, NamedSharding(mesh, P("x", "y"))), "b": B.copy()}, "step": 7}


VALUES = {"layer.w": W, "layer.b": B, "step": np.array(7)}


def sharded(host, sharding):
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index], dtype=host.dtype)


def assert_same_bits(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.asarray(found).tobytes() == expected.tobytes()


def assert_saved(directory, values=None):
    restored = stored_arrays(directory)
    values = VALUES if values is None else values
    assert sorted(restored) == sorted(values)
    for name, array in values.items():
        assert_same_bits(restored[name], array)


# --- ways in ---


def test_the_tree_alone_or_arguments(tmp_path, checkpointer, tree):
    checkpointer.save(tmp_path / "1", tree)
    checkpointer.save(tmp_path / "2", args=ost.SafetensorsSave(tree))
    checkpointer.save(tmp_path / "3", ost.SafetensorsSave(tree, metadata={"a": "b"}))
    checkpointer.save(str(tmp_path / "4"), tree, save_args={"layer": {"w": ocp.SaveArgs(dtype=jnp.float16)}})
    for name in "123":
        assert_saved(tmp_path / name)
    with np.errstate(all="ignore"):
        assert_saved(tmp_path / "4", VALUES | {"layer.w": W.astype(np.float16)})
    assert ost.open_checkpoint(tmp_path / "3").metadata == {"format": "pt", "a": "b"}


def test_what_is_there_is_kept_unless_forced(tmp_path, checkpointer, tree):
    checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree, max_file_bytes=100))
    with pytest.raises(ValueError, match="already exists"):
        checkpointer.save(tmp_path / "saved", {"other": B})
    assert_saved(tmp_path / "saved")
    with ost.SafetensorsCheckpointer() as ours, pytest.raises(ost.TensorMismatchError, match="cannot be stored"):
        ours.save(tmp_path / "saved", {"other": "text"}, force=True)
    assert_saved(tmp_path / "saved")
    checkpointer.save(tmp_path / "saved", {"other": B}, force=True)
    assert_saved(tmp_path / "saved", {"other": B})
    assert sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors*")) == ["model.safetensors"]


# Of an index for Orbax: files of a save without one, beside these, would be taken for what it describes.
LEFT_OF_INDEX = ("_METADATA", "_METADATA.unfinished", "_sharding", "manifest.ocdbt", "_LINKED_FILES", "array_metadatas")


def stored_bytes(root):
    """Of every file its bytes and when they were written."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}


def commit(futures):
    for one in futures:
        one.result()


def delete(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("background", "max_file_bytes"), [(False, 100), (True, 10**9)], ids=["sync, indexed", "async, one file"]
)
def test_a_handler_alone_saves_over_nothing(tmp_path, tree, background, max_file_bytes):
    """The index of the first save would win, and a kill would leave files of both."""
    handler, directory = ost.SafetensorsHandler(), epath.Path(tmp_path)
    (tmp_path / "README.md").write_text("of somebody else")

    def save(args):
        if background:
            commit(asyncio.run(handler.async_save(directory, args)))
        else:
            handler.save(directory, args)

    save(ost.SafetensorsSave(tree, max_file_bytes=max_file_bytes))
    before = stored_bytes(tmp_path)
    for args in (ost.SafetensorsSave(tree), ost.SafetensorsSave({"other": B}, max_file_bytes=10)):
        with pytest.raises(ost.StorageError, match="already exists, and holds model.*; delete these"):
            save(args)
    assert stored_bytes(tmp_path) == before
    assert_saved(tmp_path)
    for path in tmp_path.iterdir():
        delete(path)
    save(ost.SafetensorsSave({"other": B}))
    assert_saved(tmp_path, {"other": B})


@pytest.mark.parametrize("left", ["model-00001-of-00002.safetensors", "model.safetensors.index.json", *LEFT_OF_INDEX])
def test_what_a_killed_save_of_a_handler_alone_has_left(tmp_path, tree, left):
    (tmp_path / left).write_bytes(b"")
    for index in (None, False):
        with pytest.raises(ost.StorageError, match=f"holds {left}.*; delete these files, or save elsewhere"):
            ost.SafetensorsHandler().save(epath.Path(tmp_path), ost.SafetensorsSave(tree, index=index))
    assert [path.name for path in tmp_path.iterdir()] == [left]


@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_what_a_killed_save_of_a_checkpointer_has_left(tmp_path, tree, kind):
    """Orbax deletes its temporary directory, perhaps in the background."""
    stale = tmp_path / f"saved{ocp.path.atomicity.TMP_DIR_SUFFIX}"
    stale.mkdir()
    (stale / "model-00001-of-00002.safetensors").write_bytes(b"\0" * 100)
    with kind(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree))
    assert_saved(tmp_path / "saved")


def test_what_was_restored_can_be_saved_again(tmp_path, checkpointer, tree):
    checkpointer.save(tmp_path / "1", tree)
    checkpointer.save(tmp_path / "2", checkpointer.restore(tmp_path / "1", item=tree))
    assert (tmp_path / "1" / "model.safetensors").read_bytes() == (tmp_path / "2" / "model.safetensors").read_bytes()


def test_a_mapped_restore_of_what_was_saved(tmp_path, tree, monkeypatch):
    """The default alignment is for this; the array is the file's own pages, as it can be on CPU devices."""
    monkeypatch.setattr("orbax_safetensors.devices.arrays.is_cpu", lambda device: True)
    with ost.SafetensorsCheckpointer(options=ost.SafetensorsOptions(alias=True)) as checkpointer:
        checkpointer.save(tmp_path / "saved", {"w": W})
        restored = checkpointer.restore(tmp_path / "saved", restore_args={"w": ocp.ArrayRestoreArgs()})["w"]
    assert_same_bits(restored, W)
    with open("/proc/self/maps") as maps:
        assert str(tmp_path / "saved") in maps.read()


@contextlib.contextmanager
def held_back():
    """No byte is written until the event that this yields is set."""
    real, go = os.pwritev, threading.Event()

    def wait(*args):
        assert go.wait(hang.SECONDS)
        return real(*args)

    with mock.patch.object(local.os, "pwritev", wait):
        try:
            yield go
        finally:
            go.set()


@pytest.mark.both_devices
def test_what_happens_to_leaves_does_not_change_a_save_in_the_background(tmp_path, tree):
    """It returns before any byte is written."""
    with ocp.AsyncCheckpointer(ost.SafetensorsHandler()) as checkpointer, held_back() as go:
        donated = jnp.arange(1000.0)
        expected = np.asarray(donated).copy()
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave({**tree, "d": donated}, max_file_bytes=1000))
        assert not (tmp_path / "saved").exists()
        tree["layer"]["b"][...] = 0
        tree["layer"]["w"].delete()
        overwritten = jax.jit(lambda x: x * 0, donate_argnums=0)(donated)
        overwritten.block_until_ready()
        go.set()
        checkpointer.wait_until_finished()
    assert_saved(tmp_path / "saved", VALUES | {"d": expected})


def test_saves_in_the_background_one_after_the_other(tmp_path):
    with ocp.AsyncCheckpointer(ost.SafetensorsHandler()) as checkpointer:
        for number in range(5):
            checkpointer.save(tmp_path / str(number), args=ost.SafetensorsSave({"w": W + number}))
    for number in range(5):
        assert_saved(tmp_path / str(number), {"w": W + number})


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_checkpoint_manager(tmp_path, mesh, background):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=background)
    handlers = {"params": ost.SafetensorsHandler(), "extra": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers, options=options) as manager:
        for step in range(4):
            host = W.copy()
            host[0, 0] = step
            # The array has its memory to itself: on CPU devices it could otherwise share that of `host`, which changes.
            tree = {"w": sharded(host.copy(), NamedSharding(mesh, P("y"))), "b": B.copy(), "n": host}
            args = ocp.args.Composite(params=ost.SafetensorsSave(tree), extra=ocp.args.JsonSave({"step": step}))
            assert manager.save(step, args=args)
            host[...] = 0
            tree["w"].delete()
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        item = {"w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh, P(None, "x")))}
        for step in (2, 3):
            expected = W.copy()
            expected[0, 0] = step
            args = ost.SafetensorsRestore(item=item, partial_restore=True)
            restored = manager.restore(step, args=ocp.args.Composite(params=args, extra=ocp.args.JsonRestore()))
            assert_same_bits(restored["params"]["w"], expected)
            assert restored["extra"] == {"step": step}
        assert manager.item_metadata(3)["params"].tree["b"].shape == B.shape


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_composite_handler(tmp_path, tree, background):
    handler = ocp.CompositeCheckpointHandler(params=ost.SafetensorsHandler(), other=ost.SafetensorsHandler())
    kind = ocp.AsyncCheckpointer if background else ocp.Checkpointer
    with kind(handler) as checkpointer:
        args = ocp.args.Composite(params=ost.SafetensorsSave(tree), other=ost.SafetensorsSave({"w": W}))
        checkpointer.save(tmp_path / "saved", args=args)
    assert_saved(tmp_path / "saved" / "params")
    assert_saved(tmp_path / "saved" / "other", {"w": W})


# --- there and back ---

Pair = collections.namedtuple("Pair", "w b")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: object
    b: object


keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="."), max_size=4)
hosts = st.builds(
    lambda dtype, shape, seed: random_bits(np.random.default_rng(seed), shape, dtype),
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=3).map(tuple),
    st.integers(0, 99),
)
trees = st.recursive(
    hosts,
    lambda inner: (
        st.dictionaries(keys, inner, max_size=3)
        | st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.builds(Pair, inner, inner)
        | st.builds(Layer, inner, inner | st.none())
        | st.dictionaries(keys, inner, max_size=2).map(flax.core.freeze)
    ),
    max_leaves=6,
)


def fitting(mesh, shape, order):
    """A sharding of `shape` that uses the axes of `mesh` in `order` wherever they divide."""
    axes = list(order)
    spec = [axes.pop() if axes and size % mesh.shape[axes[-1]] == 0 else None for size in shape]
    return NamedSharding(mesh, P(*spec))


@pytest.mark.both_devices
@examples(60)
@given(
    trees, st.integers(1, 400), st.permutations("xy"), st.permutations("xy"), st.permutations(range(8)), st.booleans()
)
def test_there_and_back_bit_for_bit(tree, max_file_bytes, saved_as, restored_as, order, on_devices):
    assume(jax.tree.leaves(tree))
    assume("__metadata__" not in tree if isinstance(tree, dict | flax.core.FrozenDict) else True)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    other = Mesh(np.array(jax.devices())[order].reshape(4, 2), ("x", "y"))
    with jax.enable_x64(True), tempfile.TemporaryDirectory() as directory:
        given_tree = jax.tree.map(lambda x: sharded(x, fitting(mesh, x.shape, saved_as)) if on_devices else x, tree)
        item = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=fitting(other, x.shape, restored_as)), tree
        )
        with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
            path = Path(directory, "saved")
            checkpointer.save(path, args=ost.SafetensorsSave(given_tree, max_file_bytes=max_file_bytes))
            restored = checkpointer.restore(path, item=item)
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        for found, expected, wanted in zip(*map(jax.tree.leaves, (restored, tree, item)), strict=True):
            assert found.sharding == wanted.sharding
            assert_same_bits(found, expected)


@pytest.mark.both_devices
def test_bits_that_arithmetic_does_not_keep(tmp_path, checkpointer, mesh):
    """NaNs with payloads and signs, negative zero, subnormals, infinities."""
    bits = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000], np.uint32)
    tree = {
        "f32": sharded(bits.view(np.float32), NamedSharding(mesh, P("x"))),
        "bf16": sharded((bits >> 16).astype(np.uint16).view(ml_dtypes.bfloat16), NamedSharding(mesh, P("y"))),
        "f8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
        "f64": (bits.astype(np.uint64) << 32).view(np.float64)[::-1],
    }
    checkpointer.save(tmp_path / "saved", tree)
    assert_saved(tmp_path / "saved", jax.tree.map(np.asarray, tree))


# --- what a failure leaves ---

# `tests/checkpoint/test_leaf.py` has all trees that cannot be saved.
REFUSED = {
    "a leaf of type str": ({"a": np.ones(2), "b": "text"}, {}),
    "__metadata__: expected text": ({"a": 1}, {"metadata": {"a": 1}}),
    "max_file_bytes is 0": ({"a": 1}, {"max_file_bytes": 0}),
    "save_args has leaves that item does not have": ({"a": 1}, {"save_args": {"b": ocp.SaveArgs()}}),
}


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_saved_leaves_no_file(tmp_path, message, background):
    tree, more = REFUSED[message]
    with (ocp.AsyncCheckpointer if background else ocp.Checkpointer)(ost.SafetensorsHandler()) as checkpointer:
        with pytest.raises(ost.SafetensorsError, match=message):
            checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree, **more))
        assert not (tmp_path / "saved").exists()
        assert not list(tmp_path.rglob("*.safetensors*"))
        # Elsewhere: Orbax may still be writing its own metadata there in the background.
        checkpointer.save(tmp_path / "next", args=ost.SafetensorsSave({"w": W}))
    assert_saved(tmp_path / "next", {"w": W})


@contextlib.contextmanager
def full_disk():
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(local.os, "pwritev", side_effect=error):
        yield


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_full_disk_and_then_room(tmp_path, tree, background):
    kind = ocp.AsyncCheckpointer if background else ocp.Checkpointer
    with nothing_left(tmp_path), kind(ost.SafetensorsHandler()) as checkpointer:
        with full_disk(), pytest.raises(ost.StorageError, match="No space left on device"):
            checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree))
            if background:
                checkpointer.wait_until_finished()
        assert not (tmp_path / "saved").exists()
        for left in tmp_path.iterdir():
            with pytest.raises(ost.SafetensorsError):
                ost.open_checkpoint(left)
            with pytest.raises(ValueError, match="incomplete"):
                checkpointer.restore(left, args=ost.SafetensorsRestore())
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree))
    assert_saved(tmp_path / "saved")


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_step_that_fails_is_no_step(tmp_path, tree, background):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=background)
    with ocp.CheckpointManager(tmp_path, item_handlers=ost.SafetensorsHandler(), options=options) as manager:
        manager.save(1, args=ost.SafetensorsSave(tree))
        manager.wait_until_finished()
        with full_disk(), pytest.raises(ost.StorageError, match="No space left on device"):
            manager.save(2, args=ost.SafetensorsSave(tree))
            manager.wait_until_finished()
        manager.reload()
        assert manager.all_steps() == [1]
        manager.save(2, args=ost.SafetensorsSave(tree))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
    assert_saved(tmp_path / "2" / "default")
