"""Writes of a checkpoint that were given up: they are no checkpoint, and the next write deletes or resumes them."""

import errno
import os
import shutil
from dataclasses import replace

import numpy as np
import orbax.checkpoint as ocp
import pytest

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store import (
    open_orbax,
)
from tests.support.files import everything
from tests.support.orbax_items import LEAVES, fill, is_not_there, is_values, leaf_of, tree_of, values, write
from tests.support.sinks import missing, step_sink


def test_chunks_that_are_missing(tmp_path):
    sink = step_sink(tmp_path, tree_of(leaf_of))
    fill(sink, values(), [name for name in LEAVES if name != "params.cube"])
    sink.write_box("params.cube", Box(((0, 4), (0, 6), (0, 3))), values()["params.cube"][..., :3])
    with pytest.raises(
        TensorMismatchError, match=r"5 chunks of 'params.cube' .* the first is \(\(0, 4\), .* \(3, 4\)\)"
    ):
        sink.commit()
    is_not_there(tmp_path)
    with step_sink(tmp_path, tree_of(leaf_of), resume=True) as sink:
        assert {name for name in LEAVES if not sink.written(name, Box.whole(LEAVES[name][1]))} == {"params.cube"}
        assert len(missing(sink, "params.cube")) == 5
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
        assert len(missing(sink, "params.kernel")) == 8


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tree": {"step": 7}}, "leaves was"),
        (
            {"tree": tree_of(lambda name: replace(leaf_of(name), chunk_shape=LEAVES[name][1]))},
            r"'layers\.0\.bias' was cut into \[.*\] and would be cut into \[.*\]; pass the mesh, spec and memory of "
            r"the first run \(--mesh, --spec, --memory\), or begin anew without resume$",
        ),
        ({"ocdbt": False}, "ocdbt was True when it was begun and is False now"),
        ({"zarr3": False}, "zarr3 was True"),
        ({"compression": False}, "compression was True"),
        ({"source": "another"}, "it was begun from another source, or with other arguments; begin anew"),
    ],
)
def test_what_was_left_behind_by_another_sink(tmp_path, change, why):
    with step_sink(tmp_path, tree_of(leaf_of)) as sink:
        fill(sink, values())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TensorMismatchError, match=f"cannot be resumed: {why}"):
        step_sink(tmp_path, change.pop("tree", tree_of(leaf_of)), resume=True, **change)
    assert sorted(tmp_path.rglob("*")) == before


UNFINISHED = f"0{ocp.path.atomicity.TMP_DIR_SUFFIX}"


@pytest.mark.parametrize(("kind", "resume"), [("empty", False), ("step", True), ("items", True), ("items", False)])
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


@pytest.mark.parametrize("finished", [False, True])
def test_what_is_no_unfinished_checkpoint_is_never_deleted(tmp_path, finished, caplog):
    if finished:
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "mine", {"a": np.ones(3)})
        (tmp_path / "mine").rename(tmp_path / UNFINISHED)
        why = "is a checkpoint that was finished, as its _CHECKPOINT_METADATA says; move it away"
    else:
        (tmp_path / UNFINISHED).mkdir()
        (tmp_path / UNFINISHED / "model.safetensors").write_text("mine")
        why = "is not an unfinished checkpoint, it holds 'model.safetensors'; move it away"
    before = everything(tmp_path)
    for resume in (False, True):
        with pytest.raises(StorageError, match=f"{UNFINISHED}: {why}"):
            step_sink(tmp_path, tree_of(leaf_of), resume=resume)
        assert everything(tmp_path) == before
    assert "deleted" not in caplog.text


@pytest.mark.parametrize(
    ("place", "kind"), [("file", "file"), ("link", "link"), ("dangling", "link"), ("item", "link"), ("items", "link")]
)
def test_what_is_no_directory(tmp_path, place, kind):
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
    before = everything(tmp_path)
    for resume in (False, True):
        with pytest.raises(StorageError, match=f"{path}: is a {kind} and not an unfinished checkpoint; move it away"):
            step_sink(tmp_path / "to", tree_of(leaf_of), resume=resume)
        assert everything(tmp_path) == before


@pytest.mark.parametrize("text", [b"", b'{"leav', b"\xff", b"\0\0", b"[1]", b"null", b'"leaves"'])
def test_a_record_that_is_damaged(tmp_path, text):
    with step_sink(tmp_path, tree_of(leaf_of)) as sink:
        fill(sink, values())
    (tmp_path / UNFINISHED / "_in_progress.json").write_bytes(text)
    with pytest.raises(StorageError, match=r"_in_progress.json: cannot be read: .*; begin anew without resume"):
        step_sink(tmp_path, tree_of(leaf_of), resume=True)
    write(tmp_path)


@pytest.mark.parametrize(("left", "ocdbt"), [(0, True), (1, False), (2, True), (3, False)])
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
        assert len(missing(sink, "params.kernel")) == 8
        fill(sink, values())
        sink.commit()
