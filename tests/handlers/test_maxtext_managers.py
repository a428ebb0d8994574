"""MaxText's trees through what Orbax builds around handlers."""

import jax
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from tests.multiprocess.workers_families import (
    config_of,
    made_by_maxtext,
    sharded,
    stored_directory,
    target,
    variant,
)
from tests.support.maxtext_trees import MODES, assert_restored, checkpointer, content, save

SAMPLE = "deepseek3_mtp"


def handler(mode="scanned"):
    return ost.SafetensorsHandler(family="maxtext", variant=variant(mode))


def test_async_checkpointer(tmp_path, mesh):
    tree = made_by_maxtext(SAMPLE, "unscanned")
    with checkpointer("unscanned") as ckptr:
        save(ckptr, tmp_path / "expected", SAMPLE, tree)
    with ocp.AsyncCheckpointer(handler("unscanned")) as ckptr:
        given = sharded(tree, mesh, (None, "y", "x"))
        given["params"]["token_embedder"]["embedding"] = tree["params"]["token_embedder"]["embedding"].copy()
        save(ckptr, tmp_path / "saved", SAMPLE, given)
        given["params"]["token_embedder"]["embedding"][...] = 0  # once the call returns, the leaves may be changed
        jax.tree.map(lambda leaf: leaf.delete(), given["params"]["decoder"])
        ckptr.wait_until_finished()
        item = target(tree, mesh, ("x", None, "y"))
        restored = ckptr.restore(stored_directory(SAMPLE), args=ost.SafetensorsRestore(item=item))
    assert content(tmp_path / "saved") == content(tmp_path / "expected")
    assert_restored(restored, item, tree, "with the same checkpointer")


def test_checkpoint_manager(tmp_path, mesh):
    tree = made_by_maxtext(SAMPLE, "scanned")
    item = target(tree, mesh, ("y", "x"))
    with ocp.CheckpointManager(tmp_path, item_handlers=handler()) as manager:
        for step in (1, 2):
            assert manager.save(step, args=ost.SafetensorsSave(sharded(tree, mesh, ("x",)), config=config_of(SAMPLE)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
        restored = manager.restore(2, args=ost.SafetensorsRestore(item=item))
        metadata = manager.item_metadata(2)
    # Not what was given: what the families compute is rounded on its way to the file.
    with checkpointer() as ckptr:
        assert_restored(restored, item, ckptr.restore(tmp_path / "1" / "default"), "step 2")
    assert jax.tree.map(lambda leaf: leaf.shape, metadata.tree) == jax.tree.map(lambda leaf: leaf.shape, tree)


def test_items_of_a_manager(tmp_path, mesh):
    tree = made_by_maxtext(SAMPLE, "scanned")
    handlers = {"params": handler(), "extra": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        args = ost.SafetensorsSave(tree, config=config_of(SAMPLE))
        manager.save(7, args=ocp.args.Composite(params=args, extra=ocp.args.JsonSave({"step": 7})))
        manager.wait_until_finished()
        item = target(tree, mesh, ("x", "y"))
        args = ost.SafetensorsRestore(item=item)
        found = manager.restore(7, args=ocp.args.Composite(params=args, extra=ocp.args.JsonRestore()))
    assert found["extra"] == {"step": 7}
    with checkpointer() as ckptr:
        assert_restored(found["params"], item, ckptr.restore(tmp_path / "7" / "params"), "step 7")


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_composite_handler(tmp_path, background, mesh):
    """Two items of one step, and each its own tree of the same model."""
    trees = {mode: made_by_maxtext(SAMPLE, mode) for mode in MODES}
    kind = ocp.AsyncCheckpointer if background else ocp.Checkpointer
    with kind(ocp.CompositeCheckpointHandler(**{mode: handler(mode) for mode in MODES})) as ckptr:
        args = {mode: ost.SafetensorsSave(tree, config=config_of(SAMPLE)) for mode, tree in trees.items()}
        ckptr.save(tmp_path / "saved", args=ocp.args.Composite(**args))
        if background:
            ckptr.wait_until_finished()
        items = {mode: target(tree, mesh, ("x", None, "y")) for mode, tree in trees.items()}
        args = {mode: ost.SafetensorsRestore(item=item) for mode, item in items.items()}
        found = ckptr.restore(tmp_path / "saved", args=ocp.args.Composite(**args))
    assert content(tmp_path / "saved" / "scanned") == content(tmp_path / "saved" / "unscanned")
    for mode, item in items.items():
        with checkpointer(mode) as ckptr:
            assert_restored(found[mode], item, ckptr.restore(tmp_path / "saved" / mode), mode)
