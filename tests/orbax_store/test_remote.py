"""Checkpoints of Orbax on an object store, with Orbax's own handlers as the oracle in both directions."""

import json
import re

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

import orbax_safetensors as ost
from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store import OrbaxLeaf, directories, item_writer, open_orbax, unfinished
from tests.support.files import random_bits
from tests.support.files import write as write_files
from tests.support.orbax_items import (
    LEAVES,
    fill,
    is_values,
    leaf_of,
    plain_registry,
    restore_args,
    same_bits,
    sharded,
    tree_of,
    values,
)
from tests.support.roots import TESTDATA
from tests.support.servers.faults import Answer
from tests.support.sinks import missing, step_sink
from tests.support.steps import step_of

# `test_items.py` has all of them on a disk.
two_formats = pytest.mark.parametrize(
    ("ocdbt", "zarr3"), [(True, True), (False, False)], ids=["ocdbt zarr3", "files zarr2"]
)


@pytest.fixture
def url(orbax_gcs):
    return f"{orbax_gcs.url}/steps"


@pytest.fixture
def objects(orbax_gcs, gcs_for_all):
    """What is stored, by name."""
    return gcs_for_all[0].buckets[orbax_gcs.url.removeprefix("gs://")]


def write(url, **options):
    with step_sink(url, tree_of(leaf_of), **options) as sink:
        fill(sink, values())
        sink.commit()


def give_up(url, names, **options):
    with step_sink(url, tree_of(leaf_of), **options) as sink:
        fill(sink, values(), names)


def opened_values(path):
    checkpoint = open_orbax(path)
    is_values(checkpoint.tree(lambda name, leaf: checkpoint.value(name)))
    return checkpoint


def is_not_there(url):
    for path in (url, f"{url}/0", f"{url}/0/items"):
        with pytest.raises(StorageError, match=f"^{url}.* never finished"):
            open_orbax(path)
    with ocp.CheckpointManager(url, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.latest_step() is None


def names_of(objects):
    """Names, except those that OCDBT chooses at random, of which there may be any number."""
    return {re.sub(r"/d/[0-9a-f]{32}$", "/d/*", name).partition("/")[2] for name in objects}


@two_formats
def test_what_orbax_has_written(url, mesh, ocdbt, zarr3):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.CheckpointManager(url, item_handlers={"items": handler}) as manager:
        for step in (3, 12):
            args = ocp.args.Composite(items=ocp.args.PyTreeSave(sharded(mesh)))
            manager.save(step, args=args, custom_metadata={"of": step})
    for path, step in {url: 12, f"{url}/": 12, f"{url}/3": 3, f"{url}/3/items/": 3, epath.Path(url): 12}.items():
        checkpoint = opened_values(path)
        assert (checkpoint.path, step_of(checkpoint)) == (f"{url}/{step}/items", step)
        assert checkpoint.custom_metadata == {"of": step}
        assert (checkpoint.ocdbt, checkpoint.recorded.zarr3) == (ocdbt, zarr3)
    assert checkpoint.leaves["params.kernel"].sharding == leaf_of("params.kernel").sharding
    out = np.empty((3, 5), LEAVES["params.kernel"][0])
    checkpoint.read("params.kernel", Box(((2, 5), (1, 6))), out).result()
    same_bits(out, values()["params.kernel"][2:5, 1:6])


@two_formats
def test_orbax_restores_what_is_written(url, mesh, objects, ocdbt, zarr3):
    write(url, ocdbt=ocdbt, zarr3=zarr3, custom_metadata={"scan_layers": True})
    opened_values(url)
    args = restore_args(NamedSharding(mesh, PartitionSpec("y")))
    is_values(ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(f"{url}/0/items", restore_args=args))
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, sharded(mesh))
    with ocp.CheckpointManager(url, item_names=("items",)) as manager:
        assert manager.latest_step() == 0
        is_values(manager.restore(0, args=ocp.args.Composite(items=ocp.args.StandardRestore(target)))["items"])
        assert manager.metadata(0).custom_metadata == {"scan_layers": True}
    ours = names_of(objects)
    objects.clear()
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3, type_handler_registry=plain_registry())
    with ocp.CheckpointManager(f"{url}/stock", item_handlers={"items": handler}) as manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(sharded(mesh))))
    assert ours == {name.removeprefix("stock/") for name in names_of(objects)}


def test_a_checkpoint_without_steps(url):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{url}/saved", {"a": np.arange(3)}, custom_metadata={"why": 1})
    checkpoint = open_orbax(f"{url}/saved")
    assert (step_of(checkpoint), checkpoint.custom_metadata) == (None, {"why": 1})
    assert checkpoint.value("a").tolist() == [0, 1, 2]


# What is not finished.


def test_nothing_opens_before_it_is_done(url):
    names = list(LEAVES)
    give_up(url, names[:5])
    is_not_there(url)
    with step_sink(url, tree_of(leaf_of), resume=True) as sink:
        assert [name for name in names if missing(sink, name)] == names[5:]
        fill(sink, values())
        sink.commit()
    opened_values(url)


@pytest.mark.parametrize("left", ["step", "item", "neither"])
def test_a_file_says_that_it_is_finished(url, objects, left):
    write(url)
    write(url, step=1)
    for name in {"step": ["1/items/"], "item": ["1/"], "neither": ["1/", "1/items/"]}[left]:
        del objects[f"steps/{name}commit_success.txt"]
    with pytest.raises(StorageError, match="/1.*was never finished: Orbax writes commit_success.txt"):
        open_orbax(f"{url}/1/items")
    if left != "step":
        with pytest.raises(StorageError, match="/1: was never finished"):
            open_orbax(f"{url}/1")
        assert step_of(opened_values(url)) == 0  # as CheckpointManager has it


def test_begun_anew(url, objects):
    give_up(url, LEAVES)
    chunks = {name for name in objects if "/d/" in name}
    with step_sink(url, tree_of(leaf_of)) as sink:
        assert len(missing(sink, "params.kernel")) == 8
        assert chunks
        assert not chunks & objects.keys()
        fill(sink, values())
        sink.commit()
    opened_values(url)
    assert "steps/0/_in_progress.json" not in objects


def test_what_was_left_behind_by_another_sink(url, objects):
    give_up(url, LEAVES)
    before = dict(objects)
    with pytest.raises(TensorMismatchError, match="gs://.*cannot be resumed: it was begun from another source"):
        step_sink(url, tree_of(leaf_of), resume=True, source="another")
    assert objects == before


def test_a_step_that_is_there(url, objects):
    write(url)
    before = dict(objects)
    for resume in (False, True):
        with pytest.raises(StorageError, match=f"^{url}/0: already exists"):
            step_sink(url, tree_of(leaf_of), resume=resume)
    assert objects == before


def test_what_is_no_unfinished_checkpoint_is_left_alone(url, objects):
    (epath.Path(url) / "0" / "model.bin").write_text("precious")
    with pytest.raises(StorageError, match="is not an unfinished checkpoint, it holds 'model.bin'; move it away"):
        step_sink(url, tree_of(leaf_of))
    assert list(objects) == ["steps/0/model.bin"]


def test_what_was_finished_elsewhere_is_left_alone(url, objects):
    """A checkpoint of a file system may have been copied without the file that says that it is finished."""
    write(url)
    del objects["steps/0/commit_success.txt"]
    before = dict(objects)
    with pytest.raises(StorageError, match="is a checkpoint that was finished"):
        step_sink(url, tree_of(leaf_of))
    assert objects == before


STAGES = {
    "scalars": (item_writer.ItemWriter, "_write_scalars"),
    "metadata": (item_writer, "item_files"),
    "merge": (item_writer, "merge"),
    "the step's metadata": (unfinished, "finished_record"),
    "listing": (item_writer.ItemWriter, "_keys"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_commit_that_fails(url, objects, stage, monkeypatch):
    with step_sink(url, tree_of(leaf_of)) as sink:
        fill(sink, values())
        with monkeypatch.context() as patched:

            def fail(*_, **__):
                raise RuntimeError("nothing works")

            patched.setattr(*STAGES[stage], fail)
            with pytest.raises(StorageError, match="nothing works"):
                sink.commit()
    is_not_there(url)
    with step_sink(url, tree_of(leaf_of), resume=True) as sink:
        assert not any(missing(sink, name) for name in LEAVES)
        sink.commit()
    opened_values(url)
    ours = names_of(objects)
    objects.clear()
    write(url)
    assert ours == names_of(objects)


def test_the_last_file_cannot_be_written(url, orbax_gcs):
    """All is there but the file that says so; nothing is written twice."""
    with step_sink(url, tree_of(leaf_of)) as sink:
        fill(sink, values())
        refused = Answer(403, {"Content-Type": "application/json"}, json.dumps({"error": {"message": "no"}}).encode())
        rule = orbax_gcs.server.fail(
            refused, method="POST", when=lambda request: b"steps/0/commit_success.txt" in request.body, times=None
        )
        with pytest.raises(StorageError, match=f"^{url}/0: "):
            sink.commit()
    assert rule.hits
    is_not_there(url)
    orbax_gcs.server.clear()
    with step_sink(url, tree_of(leaf_of), resume=True) as sink:
        assert not any(missing(sink, name) for name in LEAVES)
        sink.commit()
    opened_values(url)


# What others do.


def test_what_others_have_written_since(url, objects):
    """gcsfs would never see it, as it has listed the directory before."""
    write(url)
    assert step_of(open_orbax(url)) == 0
    later = {name.replace("steps/0/", "steps/1/"): stored for name, stored in objects.items()}
    objects.update(later)
    assert step_of(opened_values(url)) == 1
    for name in [name for name in objects if name.startswith("steps/")]:
        del objects[name]
    with pytest.raises(StorageError, match="found nothing"):
        open_orbax(url)


def test_the_state_tells_what_has_changed(url, objects):
    write(url)
    write(url, step=1)
    checkpoint = open_orbax(f"{url}/0")
    state = checkpoint.state()
    assert {f"steps/0/items/{name}" for name in state} == {name for name in objects if "0/items/" in name}
    assert checkpoint.state() == state
    name = min(name for name in objects if name.startswith("steps/0/items/") and objects[name].data)
    file = epath.Path(url).parent / name
    file.write_bytes(objects[name].data)
    changed = checkpoint.state()
    assert {own for own in state if changed[own] != state[own]} == {name.removeprefix("steps/0/items/")}


# What goes wrong.


def test_where_nothing_is(orbax_gcs, url):
    with pytest.raises(
        FileNotFoundError, match=f"^{url}: expected the directory of an Orbax checkpoint, found nothing"
    ):
        open_orbax(url)
    (epath.Path(url) / "file").write_text("")
    with pytest.raises(StorageError, match="found a file"):
        open_orbax(f"{url}/file")
    with pytest.raises(StorageError, match="holds no finished checkpoint"):
        open_orbax(url)
    with pytest.raises(StorageError, match="^gs://no-such-bucket/steps/0: "):
        step_sink("gs://no-such-bucket/steps", tree_of(leaf_of))


def test_nothing_to_reach_it_with(monkeypatch):
    monkeypatch.setattr(directories, "_CLIENTS", ("no_such_client",))
    for use in (open_orbax, lambda url: step_sink(url, tree_of(leaf_of))):
        with pytest.raises(StorageError, match=r"^gs://bucket/steps.*: Orbax needs gcsfs .*: pip install gcsfs"):
            use("gs://bucket/steps")


def test_reads_that_are_refused(url, orbax_gcs):
    write(url, ocdbt=False)
    checkpoint = open_orbax(url)
    orbax_gcs.server.fail(Answer(403), path="*/items/*", times=None)
    with pytest.raises(StorageError, match=f"^{url}/0/items: 'params.kernel': .*PERMISSION_DENIED"):
        checkpoint.value("params.kernel")
    with pytest.raises(StorageError, match=f"^{url}"):
        open_orbax(url)
    with pytest.raises(StorageError, match=f"^{url}/0/items: "):
        checkpoint.state()


def test_writes_that_are_refused(url, orbax_gcs):
    array = np.arange(64).reshape(8, 8)
    sink = step_sink(url, {"a": OrbaxLeaf((8, 8), array.dtype, (1, 8))})
    orbax_gcs.server.fail(Answer(403), method="POST", times=None)
    with pytest.raises(StorageError, match=f"^{url}/0: 'a': .*PERMISSION_DENIED"):
        sink.write_box("a", Box(((0, 1), (0, 8))), array[:1])
    orbax_gcs.server.clear()
    with pytest.raises(TensorMismatchError, match="8 chunks of 'a'"):
        sink.commit()
    is_not_there(url)


# Conversions.

QWEN3 = TESTDATA / "maxtext" / "qwen3"
TENSORS = {
    "wide": random_bits(np.random.default_rng(0), (8, 512), np.dtype(np.float32)),
    "tall": random_bits(np.random.default_rng(1), (512, 8), np.dtype(np.uint16)),
}
SMALL = 40_000  # bytes of memory with which everything takes many tiles


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    write_files(tmp_path / "model" / "model.safetensors", TENSORS)
    return tmp_path / "model"


def restored(path):
    tree = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path)
    return {
        jax.tree_util.keystr(at, simple=True, separator="."): np.asarray(leaf)
        for at, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def all_same(found, expected):
    assert sorted(found) == sorted(expected)
    for name in expected:
        same_bits(found[name], np.asarray(expected[name]))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_maxtext_there_and_back(url, tmp_path):
    done = ost.convert(QWEN3 / "hf", url, to="orbax", family="maxtext", memory_bytes=SMALL)
    assert done.path == f"{url}/0/items"
    found = restored(f"{url}/0/items")
    assert found.pop("step") == 0
    with np.load(QWEN3 / "mt_scanned.npz") as arrays:
        all_same(found, {f"params.{key.replace('-', '.')}": arrays[key] for key in arrays})
    ost.reshard(f"{url}/", f"{url}-for-4", mesh={"fsdp": 4}, spec={"mlp": ("fsdp",)}, memory_bytes=SMALL)
    resharded = restored(f"{url}-for-4/0/items")
    assert resharded.pop("step") == 0
    all_same(resharded, found)
    ost.convert(f"{url}-for-4", tmp_path / "back", to="safetensors", family="maxtext", config=QWEN3 / "hf")
    handler = ost.SafetensorsHandler()
    all_same(handler.restore(epath.Path(tmp_path / "back")), handler.restore(epath.Path(QWEN3 / "hf")))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_conversion_that_is_stopped(url, model, orbax_gcs):
    def stop(done, total):
        if done >= total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ost.convert(model, url, to="orbax", memory_bytes=SMALL, progress=stop)
    is_not_there(url)
    moved = ost.convert(model, url, to="orbax", memory_bytes=SMALL, resume=True)
    assert 0 < moved.nbytes < sum(array.nbytes for array in TENSORS.values())
    all_same(restored(f"{url}/0/items"), TENSORS)
    with pytest.raises(StorageError, match=f"^{url}/0: already exists"):
        ost.convert(model, url, to="orbax", memory_bytes=SMALL, resume=True)


def test_a_source_that_changes_meanwhile(url, model, tmp_path, objects):
    ost.convert(model, url, to="orbax")
    manifest = epath.Path(url) / "0" / "items" / "manifest.ocdbt"

    def change(done, total):
        if done == total:
            manifest.write_bytes(manifest.read_bytes())

    with pytest.raises(StorageError, match=f"^{url}/0: items/manifest.ocdbt changed while the checkpoint was in use"):
        ost.reshard(url, tmp_path / "new", progress=change)
    assert not (tmp_path / "new" / "0").exists()


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_to_safetensors_and_back_beside_it(url, model):
    ost.convert(model, url, to="orbax", memory_bytes=SMALL)
    ost.convert(url, f"{url}-files", to="safetensors", memory_bytes=SMALL)
    assert ost.verify(f"{url}-files") == []
    ost.convert(f"{url}-files", f"{url}-back", to="orbax", memory_bytes=SMALL)
    all_same(restored(f"{url}-back/0/items"), TENSORS)


def test_what_a_conversion_cannot_have_there(url, model, tmp_path, orbax_gcs):
    with pytest.raises(StorageError, match="in file systems and below gs://bucket only"):
        ost.convert(model, "s3://bucket/steps", to="orbax")
    with pytest.raises(ost.SafetensorsError, match="nothing: cannot be opened: there is no such object"):
        ost.convert(f"{url}/nothing", tmp_path / "new", to="safetensors")
    assert not (tmp_path / "new").exists()
