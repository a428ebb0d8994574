"""Reshards of whole steps: all items, their names and what is recorded of them, as stock Orbax restores them."""

import os

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store import (
    OrbaxItem,
    OrbaxLeaf,
    UnfinishedCheckpoint,
    item_writer,
    open_orbax,
    open_step,
)
from tests.support.orbax_items import FORMATS
from tests.support.sinks import AnySink
from tests.support.steps import F4, OPT, PARAMS, SMALL, B, W, arrays, files, is_whole, same, save

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture
def root(request, tmp_path):
    """A directory of this machine; with `BOTH` an object store, too."""
    store = getattr(request, "param", "local") == "gs"
    return epath.Path(request.getfixturevalue("orbax_gcs").url if store else tmp_path)


BOTH = pytest.mark.parametrize("root", ["local", pytest.param("gs", marks=pytest.mark.server)], indirect=True)


@BOTH
@pytest.mark.parametrize("given", ["", "7"])
def test_all_items_of_a_step(root, given):
    save(root / "from")
    step, made = root / "from" / "7", root / "to" / "7"
    (step / "notes.txt").write_text("of the step")
    done = ost.reshard(
        root / "from" / given, root / "to", mesh={"x": 4}, spec={"^layers.w": ("x",), "^b$": ("x",)}, memory_bytes=SMALL
    )
    assert done.path == str(made)
    assert done.nbytes == 2 * PARAMS["layers"]["w"].nbytes + PARAMS["b"].nbytes
    is_whole(root / "to")
    for name in ("metadata", "metrics"):
        assert files(made / name) == files(step / name)
    assert (made / "notes.txt").read_text() == "of the step"
    own, other = open_step(made), open_step(step)
    assert own.metadata == other.metadata
    assert {name.rsplit(".", 1)[1] for name in own.metadata["item_handlers"].values()} == {
        "StandardCheckpointHandler",
        "PyTreeCheckpointHandler",
        "JsonCheckpointHandler",
    }
    for item in ("params", "opt"):
        leaf = own.items[item].leaves["layers.w"]
        assert leaf.sharding.partition_spec == ("x",)
        assert (4 % leaf.chunk_shape[0], leaf.chunk_shape[1] % 1) == (0, 0)
        assert own.items[item].ocdbt == other.items[item].ocdbt
        assert own.items[item].recorded.zarr3 == other.items[item].recorded.zarr3
    # Orbax 0.11 leaves this one on Google Cloud Storage only.
    assert {path.name for path in made.iterdir()} == {path.name for path in step.iterdir()} | {"commit_success.txt"}


def test_one_item_of_a_step(root):
    save(root / "from")
    ost.reshard(root / "from" / "7" / "opt", root / "to")
    made = root / "to" / "7"
    assert {path.name for path in made.iterdir()} == {"opt", "_CHECKPOINT_METADATA", "commit_success.txt"}
    step = open_step(made)
    assert step.metadata["custom_metadata"] == {"scan_layers": True}
    assert list(step.metadata["item_handlers"]) == ["opt"]
    with ocp.CheckpointManager(root / "to") as manager:
        same(manager.restore(7, args=ocp.args.Composite(opt=ocp.args.PyTreeRestore()))["opt"], OPT)


def test_an_item_is_restored_by_the_handler_that_saved_it(tmp_path):
    with ocp.CheckpointManager(tmp_path / "from") as manager:
        manager.save(5, args=ocp.args.StandardSave(arrays(PARAMS)))
    ost.reshard(tmp_path / "from", tmp_path / "to")
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays(PARAMS))
    with ocp.CheckpointManager(tmp_path / "to") as manager:
        same(manager.restore(5), PARAMS)
        same(manager.restore(5, args=ocp.args.StandardRestore(target)), PARAMS)


def test_an_item_without_leaves_is_copied(tmp_path):
    with ocp.CheckpointManager(tmp_path / "from") as manager:
        items = {"params": ocp.args.PyTreeSave(arrays(PARAMS)), "none": ocp.args.PyTreeSave({"a": {}})}
        manager.save(0, args=ocp.args.Composite(**items))
    ost.reshard(tmp_path / "from", tmp_path / "to")
    with ocp.CheckpointManager(tmp_path / "to") as manager:
        found = manager.restore(0, args=ocp.args.Composite(none=ocp.args.PyTreeRestore()))
    assert found["none"] == {"a": {}}
    with pytest.raises(ost.SafetensorsError, match=f"^{tmp_path}/from/0/none: holds no arrays"):
        ost.reshard(tmp_path / "from" / "0" / "none", tmp_path / "again")


def test_recorded_shardings_are_kept_without_a_mesh(tmp_path, mesh):
    there = {"a": jax.device_put(PARAMS["layers"]["w"], NamedSharding(mesh, P("y", "x"))), "b": PARAMS["b"]}
    ocp.PyTreeCheckpointer().save(tmp_path / "from", there)
    ost.reshard(tmp_path / "from", tmp_path / "to")
    leaf = open_orbax(tmp_path / "to").leaves["a"]
    assert leaf.chunk_shape == (16, 512)
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "to")
    assert found["a"].sharding == there["a"].sharding
    same(found, {"a": PARAMS["layers"]["w"], "b": PARAMS["b"]})


@pytest.mark.parametrize(
    ("name", "options"),
    [("ckpt_7", {"step_prefix": "ckpt"}), ("00000007", {"step_format_fixed_length": 8})],
)
@pytest.mark.parametrize("given", ["", "{}", "{}/opt"])
def test_the_names_of_steps(tmp_path, name, options, given):
    save(tmp_path / "from", options=options)
    done = ost.reshard(tmp_path / "from" / given.format(name), tmp_path / "to")
    made = tmp_path / "to" / name
    assert done.path == str(made / "opt" if given.endswith("opt") else made)
    if given.endswith("opt"):
        same(ocp.PyTreeCheckpointer().restore(tmp_path / "to" / name / "opt"), OPT)
    else:
        is_whole(tmp_path / "to", **options)


@pytest.mark.parametrize("path", ["model_7", "runs/final", "3", "runs_3/items"])
def test_an_item_of_no_step(root, path):
    """What has loaded it from where it was loads it from where it is."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "from" / path, arrays(PARAMS), custom_metadata={"why": 1})
    done = ost.reshard(root / "from" / path, root / "to")
    assert done.path == str(root / "to")
    with ocp.StandardCheckpointer() as checkpointer:
        same(checkpointer.restore(root / "to"), PARAMS)
        metadata = checkpointer.metadata(root / "to")
    assert metadata.custom_metadata == {"why": 1}
    assert metadata.item_handlers.endswith("StandardCheckpointHandler")
    with pytest.raises(ost.StorageError, match="to: already exists"):
        ost.reshard(root / "from" / path, root / "to", resume=True)


def test_a_step_that_is_an_item(root):
    """It has a name where it is found as one of several steps."""
    for step in (3, 12):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(root / "from" / str(step), {"a": np.array([step])})
    assert ost.reshard(root / "from", root / "to").path == str(root / "to" / "12")
    with ocp.StandardCheckpointer() as checkpointer:
        assert checkpointer.restore(root / "to" / "12")["a"] == [12]


@pytest.mark.parametrize("given", ["final", "final/params"])
def test_items_of_no_step(root, given):
    handler = ocp.CompositeCheckpointHandler()
    items = {"params": ocp.args.StandardSave(arrays(PARAMS)), "metadata": ocp.args.JsonSave({"tokens": 10})}
    ocp.Checkpointer(handler).save(root / "from" / "final", args=ocp.args.Composite(**items))
    ost.reshard(root / "from" / given, root / "to")
    if given == "final":
        found = ocp.Checkpointer(ocp.CompositeCheckpointHandler()).restore(root / "to")
        same(found["params"], PARAMS)
        assert found["metadata"] == {"tokens": 10}
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            same(checkpointer.restore(root / "to"), PARAMS)
        assert open_step(root / "to").metadata["item_handlers"].endswith("StandardCheckpointHandler")


@BOTH
def test_a_destination_in_a_step(root):
    save(root / "from")
    before = files(root / "from")
    for source in ("", "7/opt"):
        for inside in ("7", "7/0", "7/opt/new"):
            with pytest.raises(ost.StorageError, match=f"from/{inside}: is in the source, {root}/from/7$"):
                ost.reshard(root / "from" / source, root / "from" / inside)
        with pytest.raises(ost.StorageError, match="from/7: already exists"):
            ost.reshard(root / "from" / source, root / "from")
    assert files(root / "from") == before
    ost.reshard(root / "from", root / "from" / "8")  # which has a step 7 of its own
    ost.reshard(root / "from" / "7", root / "from" / "anew")
    assert {name: content for name, content in files(root / "from").items() if name.startswith("7/")} == before


def test_a_destination_in_an_item(root):
    ocp.PyTreeCheckpointer().save(root / "model", arrays(PARAMS))
    for inside in ("model", "model/0"):
        with pytest.raises(ost.StorageError, match=f"{inside}: is in the source, {root}/model$"):
            ost.reshard(root / "model", root / inside)
    ost.reshard(root / "model", root / "model2")
    same(ocp.PyTreeCheckpointer().restore(root / "model2"), PARAMS)


def stop(done, total):
    if done > total * 0.6:  # in the second item, if there is one
        raise InterruptedError


def not_there(directory):
    with pytest.raises(ost.StorageError):
        open_step(directory)
    with ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.latest_step() is None


@BOTH
def test_several_items_are_resumed(root):
    save(root / "from")
    with pytest.raises(InterruptedError):
        ost.reshard(root / "from", root / "to", memory_bytes=SMALL, progress=stop)
    not_there(root / "to")
    done = ost.reshard(root / "from", root / "to", memory_bytes=SMALL, resume=True)
    assert 0 < done.nbytes < PARAMS["layers"]["w"].nbytes
    is_whole(root / "to")


@pytest.mark.parametrize("item", ["params", "opt"])
def test_items_that_cannot_be_finished(root, item, monkeypatch):
    """Whichever of them has been finished by then."""
    save(root / "from")
    finish = item_writer.ItemWriter.finish

    def fail(self):
        if item in self.directory.name:
            raise RuntimeError("nothing works")
        finish(self)

    with monkeypatch.context() as patched, pytest.raises(ost.StorageError, match="nothing works"):
        patched.setattr(item_writer.ItemWriter, "finish", fail)
        ost.reshard(root / "from", root / "to")
    not_there(root / "to")
    assert ost.reshard(root / "from", root / "to", resume=True).nbytes == 0
    is_whole(root / "to")


def test_an_item_on_its_own_is_resumed(root):
    ocp.PyTreeCheckpointer().save(root / "model", arrays(OPT))
    with pytest.raises(InterruptedError):
        ost.reshard(root / "model", root / "to", memory_bytes=SMALL, progress=stop)
    with pytest.raises(ost.StorageError):
        open_orbax(root / "to")
    done = ost.reshard(root / "model", root / "to", memory_bytes=SMALL, resume=True)
    assert 0 < done.nbytes < OPT["layers"]["w"].nbytes
    same(ocp.PyTreeCheckpointer().restore(root / "to"), OPT)


@BOTH
def test_copies_are_made_anew(root):
    """As one may have been cut short, and none goes through a link."""
    save(root / "from")
    with pytest.raises(InterruptedError):
        ost.reshard(root / "from", root / "to", memory_bytes=SMALL, progress=stop)
    (copy,) = (path for path in (root / "to").glob("*/metadata/metadata"))
    copy.write_text("{")
    if "://" not in str(root):
        (copy.parent / "more").write_text("")
        copy.unlink()
        (root / "mine").write_text("mine")
        os.symlink(root / "mine", copy)
    ost.reshard(root / "from", root / "to", memory_bytes=SMALL, resume=True)
    assert files(root / "to" / "7" / "metadata") == files(root / "from" / "7" / "metadata")
    assert not (root / "mine").exists() or (root / "mine").read_text() == "mine"


def test_other_items_that_change(root):
    save(root / "from")
    file = root / "from" / "7" / "metadata" / "metadata"
    with pytest.raises(InterruptedError):
        ost.reshard(root / "from", root / "to", memory_bytes=SMALL, progress=stop)
    file.write_text("{}")
    with pytest.raises(ost.TensorMismatchError, match="cannot be resumed: it was begun from another source"):
        ost.reshard(root / "from", root / "to", memory_bytes=SMALL, resume=True)

    def change(done, total):
        if done == total:
            file.write_text('{"tokens": 11}')

    with pytest.raises(ost.StorageError, match="from/7: metadata/metadata changed while the checkpoint was in use"):
        ost.reshard(root / "from", root / "to", progress=change)
    not_there(root / "to")


def test_a_copy_that_fails(tmp_path):
    save(tmp_path / "from")
    (tmp_path / "from" / "7" / "gone").symlink_to("nothing")
    with pytest.raises(ost.StorageError, match="from/7: .*gone"):
        ost.reshard(tmp_path / "from", tmp_path / "to")
    not_there(tmp_path / "to")


TREES = {
    "one leaf": W,
    "an empty key": {"": W, "b": B},
    "in the middle": {"": {"b": B}, "a": {"": W}},
    "scalars": {"": 3, "a": {"": "text"}, "w": W},
}


@pytest.mark.skipif(ocp.__version__.startswith("0.11."), reason="Orbax 0.11 does not store empty names")
@pytest.mark.parametrize(("tree", "ocdbt", "zarr3"), [(tree, *FORMATS[number]) for number, tree in enumerate(TREES)])
def test_empty_names(tmp_path, tree, ocdbt, zarr3):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    ocp.Checkpointer(handler).save(tmp_path / "from", arrays(TREES[tree]))
    with pytest.raises(InterruptedError):
        ost.reshard(tmp_path / "from", tmp_path / "to", memory_bytes=SMALL, progress=stop)
    done = ost.reshard(tmp_path / "from", tmp_path / "to", memory_bytes=SMALL, resume=True)
    assert 0 < done.nbytes < W.nbytes
    restore = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore
    same(restore(tmp_path / "to"), TREES[tree])
    assert jax.tree.structure(restore(tmp_path / "to")) == jax.tree.structure(restore(tmp_path / "from"))


def test_errors_name_the_item(tmp_path):
    leaf = OrbaxLeaf((4,), F4, (4,))
    with pytest.raises(ost.TensorMismatchError, match="to/opt: 'w': expected an OrbaxLeaf"):
        UnfinishedCheckpoint(tmp_path / "to", {"params": OrbaxItem({"w": leaf}), "opt": OrbaxItem({"w": b""})})
    layout = UnfinishedCheckpoint(tmp_path / "to", {"params": OrbaxItem({"w": leaf}), "opt": OrbaxItem({"w": leaf})})
    with AnySink(layout).begin(resume=False) as sink:
        assert list(sink.leaves) == ["params/w", "opt/w"]
        sink.write_box("params/w", Box(((0, 4),)), np.zeros(4, F4))
        with pytest.raises(ost.TensorMismatchError, match="to/opt: 1 of 1 arrays are not complete: 1 chunks of 'w'"):
            sink.commit()


def test_items_of_our_handlers_are_orbax_s_afterwards(tmp_path, caplog):
    """A manager without handlers restores with those that are recorded; a warning names what is no model any more."""
    handlers = {name: ost.SafetensorsHandler() for name in ("params", "opt", "empty")}
    trees = {"params": arrays(PARAMS), "opt": arrays({**OPT, "name": None}), "empty": [None, {}]}
    with ocp.CheckpointManager(tmp_path / "from", item_handlers=handlers) as manager:
        manager.save(7, args=ocp.args.Composite(**{name: ost.SafetensorsSave(tree) for name, tree in trees.items()}))
    with caplog.at_level("WARNING", "orbax_safetensors.convert.into_orbax"):
        ost.reshard(tmp_path / "from", tmp_path / "to", mesh={"x": 4}, spec={"^layers.w": ("x",)})
    assert f"{tmp_path}/from/7/params: is a model of Hugging Face and becomes a tree of Orbax" in caplog.text
    with ocp.CheckpointManager(tmp_path / "to") as manager:
        restored = manager.restore(7)
    assert restored["params"]["layers"]["w"].sharding.spec == P("x")
    for name, tree in trees.items():
        same(restored[name], tree)
