"""Saves that replace a checkpoint, and saves that fail: the old checkpoint stays whole, and nothing is left behind."""

import errno
import json
import os
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from orbax_safetensors.save import new_directory
from orbax_safetensors.save.new_files import NewFiles
from orbax_safetensors.storage import local, replace
from tests.support.disks import file_system
from tests.support.files import write

OLD = {"a": np.arange(100_000, dtype=np.float32), "b": np.arange(7)}
NEW = {"a": -np.arange(100_000, dtype=np.float32), "c": np.arange(5)}


def by_function(path, tree, **more):
    ost.save(path, tree, **more)


def by_checkpointer(path, tree, **more):
    with ost.SafetensorsCheckpointer() as checkpointer:
        checkpointer.save(path, args=ost.SafetensorsSave(tree), **more)


@pytest.fixture
def save(request):
    """How to save: with the function, unless a test is for both ways."""
    return getattr(request, "param", by_function)


EITHER_WAY = pytest.mark.parametrize("save", [by_function, by_checkpointer], indirect=True)


def holds(path, tree):
    found = ost.load(path)
    assert found.keys() == tree.keys()
    for name, array in tree.items():
        np.testing.assert_array_equal(found[name], array)
    assert ost.verify(path, data=True) == []
    assert ocp.StandardCheckpointer().restore(path).keys() == tree.keys()  # by its index


def there(path):
    return sorted(os.listdir(path))


def fails(error):
    def raises(*_, **__):
        raise error

    return raises


@pytest.fixture
def old(tmp_path):
    ost.save(tmp_path / "model", OLD)
    (tmp_path / "model" / "notes.txt").write_text("mine")
    return tmp_path / "model"


# --- what is replaced ---


@EITHER_WAY
def test_a_forced_save_takes_the_place_of_all_that_was_there(old, save):
    save(old, NEW, force=True)
    holds(old, NEW)
    assert there(old.parent) == ["model"]
    assert "notes.txt" not in there(old)
    assert str(old) in (old / "commit_success.txt").read_text()
    assert ".orbax-checkpoint-tmp" not in (old / "commit_success.txt").read_text()


def test_a_forced_save_needs_no_old_one(tmp_path, save):
    save(tmp_path / "below" / "model", NEW, force=True)
    holds(tmp_path / "below" / "model", NEW)
    assert there(tmp_path / "below") == ["model"]


def test_a_link_stays_and_leads_to_the_new_checkpoint(old, save):
    link = old.parent / "latest"
    link.symlink_to(old)
    save(link, NEW, force=True)
    assert link.is_symlink()
    holds(old, NEW)
    assert there(old.parent) == ["latest", "model"]


def test_custom_metadata_of_a_forced_save(old):
    by_checkpointer(old, NEW, force=True, custom_metadata={"epoch": 3})
    with ost.SafetensorsCheckpointer() as checkpointer:
        assert checkpointer.metadata(old).custom_metadata == {"epoch": 3}


@EITHER_WAY
def test_a_file_is_not_replaced(tmp_path, save):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ost.StorageError, match="model: is not a directory, and a save replaces nothing else"):
        save(tmp_path / "model", NEW, force=True)
    assert (tmp_path / "model").read_text() == "mine"
    assert there(tmp_path) == ["model"]


@EITHER_WAY
def test_only_a_checkpoint_is_replaced(old, save):
    """A `..` too many is not the end of all that lies beside the checkpoint."""
    (old.parent / "empty").mkdir()
    (old.parent / "mine").mkdir()
    (old.parent / "mine" / "notes.txt").write_text("mine")
    for path, name in ((old / "..", "model"), (old.parent / "mine", "notes.txt")):
        with pytest.raises(ost.StorageError, match=f"is not a checkpoint, it holds .*{name}.*; a save replaces"):
            save(path, NEW, force=True)
    assert there(old.parent) == ["empty", "mine", "model"]
    assert (old.parent / "mine" / "notes.txt").read_text() == "mine"
    save(old.parent / "empty", NEW, force=True)
    holds(old.parent / "empty", NEW)


@pytest.mark.parametrize(
    ("inside", "others"),
    [
        (["src/main.py"], "src/main.py"),
        (["checkpoint-500/trainer_state.json", "checkpoint-500/config.json"], "checkpoint-500/config.json"),
        (["1_Dense/config.json", "1_Dense/model.safetensors"], "1_Dense/model.safetensors"),
        ([".git/config"], ".git/config"),
        (["1_Pooling/config.json", "additional_chat_templates/rag.jinja", ".cache/huggingface/x"], None),
    ],
    ids=str,
)
def test_other_things_below_a_checkpoint_are_not_replaced(tmp_path, inside, others):
    directory, name = tmp_path / "mine", "stray.safetensors"
    for file in inside:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text("{}")
    write(directory / name, {"a": np.ones(1)})
    if others is None:
        by_function(directory, NEW, force=True)
        holds(directory, NEW)
        return
    with pytest.raises(ost.StorageError, match=f"mine: holds more than a checkpoint: {others}.*; a save replaces"):
        by_function(directory, NEW, force=True)
    assert all((directory / file).exists() for file in [name, *inside])


def test_a_save_replaces_what_an_earlier_one_has_copied(tmp_path, old):
    (old / "package" / "deep").mkdir(parents=True)
    (old / "package" / "deep" / "code.py").write_text("x = 1")
    ost.save(tmp_path / "like", OLD, like=old)
    ost.save(tmp_path / "like", OLD, like=old, force=True)
    assert (tmp_path / "like" / "package" / "deep" / "code.py").exists()


@EITHER_WAY
@pytest.mark.parametrize("force", [False, True])
def test_what_a_conversion_has_begun_stays(old, save, force):
    """It can be resumed, and has the name that Orbax gives to what is unfinished."""
    begun = old.parent / "made.orbax-checkpoint-tmp"
    begun.mkdir()
    (begun / "_in_progress.json").write_text("{}")
    with pytest.raises(ost.StorageError, match=r"is not an unfinished save, it holds '_in_progress.json'; move it"):
        save(old.parent / "made", NEW, force=force)
    assert there(begun) == ["_in_progress.json"]
    assert there(old.parent) == [begun.name, "model"]


def test_a_checkpoint_of_orbax_is_replaced(tmp_path, save):
    """An item on its own, and a step."""
    for path in (tmp_path / "item", tmp_path / "step"):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path if path.name == "item" else path / "default", OLD)
    (tmp_path / "step" / "_CHECKPOINT_METADATA").write_text("{}")
    for path in (tmp_path / "item", tmp_path / "step"):
        save(path, NEW, force=True)
        holds(path, NEW)


def test_what_has_come_meanwhile_is_not_replaced(tmp_path, save, monkeypatch):
    """In the place that was free when the save began."""
    real = new_directory.flush

    def flush(path):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "notes.txt").write_text("mine")
        real(path)

    monkeypatch.setattr(new_directory, "flush", flush)
    with pytest.raises(ost.StorageError, match=r"model: is not a checkpoint, it holds notes.txt;"):
        save(tmp_path / "model", NEW, force=True)
    assert there(tmp_path) == ["model"]
    assert there(tmp_path / "model") == ["notes.txt"]


def test_a_mount_point_is_refused_before_anything_is_written(tmp_path, save):
    with file_system(tmp_path / "disk", "1m") as disk:
        (disk / "notes.txt").write_text("mine")
        with pytest.raises(ost.StorageError, match="disk: is a mount point, which cannot be renamed"):
            save(disk, NEW, force=True)
        assert there(disk) == ["notes.txt"]
        assert there(tmp_path) == ["disk"]


# --- saves that fail ---

# What fails, and where. A disk is full, or worse, at a write, at the flush before the old checkpoint goes, ...
FAULTS = {
    "data": (local.os, "pwritev"),
    "open": (local, "NewLocalFile"),
    "rename": (replace.os, "rename"),
    "flush": (new_directory, "flush"),
    "exchange": (replace, "_exchange"),
}


@EITHER_WAY
@pytest.mark.parametrize(
    ("fault", "force", "code"),
    [
        ("data", True, errno.ENOSPC),
        ("open", True, errno.EROFS),
        ("rename", True, errno.EIO),
        ("flush", True, errno.EDQUOT),
        ("exchange", True, errno.EIO),
        ("data", False, errno.EIO),
        ("open", False, errno.ENOSPC),
        ("rename", False, errno.EROFS),
    ],
)
def test_a_save_that_fails_loses_and_leaves_nothing(old, save, monkeypatch, fault, force, code):
    place = old if force else old.parent / "other"
    if fault == "rename":  # of Orbax, of the file that makes it a checkpoint, or of the directory
        monkeypatch.setattr(os, "replace", fails(OSError(code, os.strerror(code))))
        monkeypatch.setattr(os, "rename", fails(OSError(code, os.strerror(code))))
    else:
        monkeypatch.setattr(*FAULTS[fault], fails(OSError(code, os.strerror(code))))
    with pytest.raises(OSError, match=os.strerror(code)):
        save(place, NEW, force=force)
    monkeypatch.undo()
    holds(old, OLD)
    assert (old / "notes.txt").read_text() == "mine"
    assert there(old.parent) == ["model"]


def test_a_full_disk_has_room_again_after_a_save_that_failed(tmp_path, save):
    with file_system(tmp_path / "disk", "1m") as disk:
        save(disk / "model", OLD)
        for place, force in ((disk / "model", True), (disk / "other", False)):
            with pytest.raises(OSError, match="No space left on device"):
                save(place, {**NEW, "d": np.ones(2**20, np.uint8)}, force=force)
            assert there(disk) == ["model"]
        holds(disk / "model", OLD)
        save(disk / "other", {"c": NEW["c"]})
        holds(disk / "other", {"c": NEW["c"]})


@pytest.mark.parametrize("force", [True, False])
def test_a_tree_that_is_refused_leaves_nothing(old, save, force):
    with pytest.raises(ost.SafetensorsError):
        save(old if force else old.parent / "other", {"a": object()}, force=force)
    assert there(old.parent) == ["model"]
    holds(old, OLD)


@EITHER_WAY
def test_an_interrupt_leaves_nothing(old, save, monkeypatch):
    monkeypatch.setattr(local.os, "pwritev", fails(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save(old, NEW, force=True)
    monkeypatch.undo()
    assert there(old.parent) == ["model"]
    holds(old, OLD)


def test_two_saves_at_once_are_one(old, save):
    """A job that is tried again while it still runs, say: the second one is refused, and harms nothing."""
    both, done = threading.Barrier(2), []

    def replaces(number):
        both.wait()
        try:
            ost.save(old, {"a": np.full(100_000, number)}, force=True)
            done.append(number)
        except ost.StorageError as error:
            assert "another save or conversion is writing here" in str(error)  # noqa: PT017, one may succeed

    for _ in range(5):
        threads = [threading.Thread(target=replaces, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done
        holds(old, {"a": np.full(100_000, ost.load(old)["a"][0])})
        assert there(old.parent) == ["model"]


def test_what_cannot_be_deleted_is_named(old, save, monkeypatch):
    """An old checkpoint of somebody else, say, which could be renamed."""
    left = old.parent / "model.orbax-checkpoint-tmp"
    left.mkdir()
    monkeypatch.setattr(replace.shutil, "rmtree", fails(OSError(errno.EACCES, os.strerror(errno.EACCES))))
    with pytest.raises(ost.StorageError, match=f"{left}: is what an earlier save has left, and cannot be deleted"):
        save(old, NEW, force=True)
    monkeypatch.undo()
    holds(old, OLD)


@EITHER_WAY
def test_a_refused_save_does_not_touch_one_that_is_at_work(old, save):
    """Two programs must not save to one name, but the one that is refused must not harm the other."""
    at_work = old.parent / "model.orbax-checkpoint-tmp"
    at_work.mkdir()
    with pytest.raises((ValueError, ost.StorageError), match="already exists"):
        save(old, NEW)
    assert at_work.exists()


def test_handlers_take_back_their_files_and_no_others(tmp_path, monkeypatch):
    """Orbax's checkpointer leaves its temporary directory; the next save to its name deletes that."""
    real = NewFiles.write

    def write(files, name, *content):
        if name.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(files, name, *content)

    monkeypatch.setattr(NewFiles, "write", write)
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer, pytest.raises(ost.StorageError, match="No space"):
        checkpointer.save(tmp_path / "model", args=ost.SafetensorsSave(OLD, config={"model_type": "x"}))
    (left,) = tmp_path.iterdir()
    assert there(left) == ["_CHECKPOINT_METADATA"]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text('{"model_type": "x"}')
    with pytest.raises(ost.StorageError, match="No space"):
        ost.SafetensorsHandler().save(tmp_path / "plain", ost.SafetensorsSave(OLD, config=tmp_path / "plain"))
    assert there(tmp_path / "plain") == ["config.json"]


def test_a_longer_file_that_was_there_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "x"}' + 1000 * " " + "y")
    ost.SafetensorsHandler().save(tmp_path, ost.SafetensorsSave(OLD, config={"z": "z"}))
    assert json.loads((tmp_path / "config.json").read_text()) == {"z": "z"}


def test_handlers_replace_no_directory(old):
    with pytest.raises(ost.StorageError, match="model: is replaced as a whole, by SafetensorsCheckpointer or save"):
        ost.SafetensorsHandler().save(old, ost.SafetensorsSave(NEW), existing="replaced")
    holds(old, OLD)


def test_what_killed_saves_left_is_gone_after_the_next(old, save):
    for left in ("model.orbax-checkpoint-tmp", "model.orbax-checkpoint-tmp.orbax-checkpoint-tmp"):
        (old.parent / left).mkdir()
        (old.parent / left / "model.safetensors").write_bytes(bytes(1000))
    save(old, NEW, force=True)
    assert there(old.parent) == ["model"]
    holds(old, NEW)


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(old, save, monkeypatch, caplog):
    monkeypatch.setattr(replace.shutil, "rmtree", fails(OSError(errno.EIO, os.strerror(errno.EIO))))
    save(old, NEW, force=True)
    monkeypatch.undo()
    holds(old, NEW)
    assert "is not needed any more and cannot be deleted" in caplog.text
    save(old, OLD, force=True)
    assert there(old.parent) == ["model"]


# --- file systems that do not exchange names ---


@pytest.fixture
def no_exchange(monkeypatch):
    monkeypatch.setattr(replace, "_exchange", fails(OSError(errno.EINVAL, "Invalid argument")))


@pytest.mark.usefixtures("no_exchange")
def test_a_forced_save_without_an_exchange_of_names(old, save):
    save(old, NEW, force=True)
    holds(old, NEW)
    assert there(old.parent) == ["model"]


class Killed(BaseException):
    pass


@pytest.mark.usefixtures("no_exchange")
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("then", ["load", "restore", "save", "forced save"])
def test_what_a_kill_leaves_aside_is_put_back(old, monkeypatch, at, then):
    """A kill before, between and after the two renames: the directory has the old or the new checkpoint again."""
    real, done = os.rename, []

    def rename(path, new):
        if len(done) == at:
            raise Killed
        real(path, new)
        done.append(new)

    new = old.parent / "new"
    ost.save(new, NEW)
    monkeypatch.setattr(replace.os, "rename", rename)
    with pytest.raises(Killed):
        replace.replace(os.fspath(new), os.fspath(old))
    monkeypatch.undo()
    expected = NEW if at == 2 else OLD
    if then == "load":
        assert ost.load(old).keys() == expected.keys()
    elif then == "restore":
        with ost.SafetensorsCheckpointer() as checkpointer:
            assert checkpointer.restore(old).keys() == expected.keys()
    elif then == "save":
        with pytest.raises(ost.StorageError, match="already exists"):
            ost.save(old, NEW)
        holds(old, expected)
    else:
        ost.save(old, {"d": NEW["c"]}, force=True)
        holds(old, {"d": NEW["c"]})
        assert there(old.parent) == (["model"] if at == 2 else ["model", "new"])
