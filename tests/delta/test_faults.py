"""Damaged deltas, other bases, kills and full disks: never half a version, and never a wrong model in silence."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.delta import applying
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.storage import replace
from tests.support.damage import damages
from tests.support.deltas import changed, copied, save_steps, tensor_files
from tests.support.interrupts import crashes
from tests.support.roots import ROOT

TREE = {"a": np.arange(300, dtype=np.float16).reshape(3, 100), "b": np.arange(40, dtype=np.int32)}
NEW = {"a": changed(TREE["a"], 20), "b": TREE["b"]}
ONE = ost.SafetensorsOptions(threads=1)
DELTA, FILE = "weight_v000001", "model-00001-of-00001.safetensors"


@pytest.fixture
def delta(tmp_path):
    """The directory of a delta of `old` and `new`, in one file."""
    for name, tree in (("old", TREE), ("new", NEW)):
        ost.save(tmp_path / name, tree)
    ost.delta(tmp_path / "old", tmp_path / "new", tmp_path / "published", version=1, options=ONE)
    return tmp_path / "published" / DELTA


def is_refused(delta, base, expected, destinations=("made", None)):
    """Whether a delta is refused, and changes nothing; if it is not, it makes the expected checkpoint.

    It is applied to `base`, for each name of `destinations`; None stands for `base` itself.
    """
    before = tensor_files(base)
    made = base.parent / "made"
    for name in destinations:
        try:
            ost.apply_delta(base, delta, made if name else base)
        except ost.SafetensorsError:
            assert tensor_files(base) == before
            assert not made.exists()
            return True
        finally:
            assert not [path for path in base.parent.iterdir() if path.name.startswith(".")]
        assert tensor_files(made if name else base) == expected
        shutil.rmtree(made, ignore_errors=True)
    return False


@pytest.mark.parametrize("name", [INDEX_NAME, CHECKSUMS_NAME, FILE])
def test_a_damaged_delta_changes_nothing(delta, tmp_path, name):
    expected = tensor_files(tmp_path / "new")
    refused = []
    for what, damaged in damages((delta / name).read_bytes(), 30):
        (delta / name).unlink(missing_ok=True)
        if damaged is not None:
            (delta / name).write_bytes(damaged)
        if name == CHECKSUMS_NAME and damaged is None:  # as other publishers leave it
            del expected[name]
        if is_refused(delta, tmp_path / "old", expected, ["made"]):
            refused.append(what)
        expected = tensor_files(tmp_path / "new")
    assert len(refused) >= 30
    assert ("deleted" in refused) == (name != CHECKSUMS_NAME)


def test_each_flipped_byte_of_a_frame_is_noticed_without_a_record(delta, tmp_path):
    """As in deltas of other publishers: only the checksums of what changed."""
    (delta / CHECKSUMS_NAME).unlink()
    (tmp_path / "old" / CHECKSUMS_NAME).unlink()
    path = delta / FILE
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    accepted = 0
    expected = tensor_files(tmp_path / "new")
    del expected[CHECKSUMS_NAME]
    for at in range(begin, len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        accepted += not is_refused(delta, tmp_path / "old", expected, ["made"])
    assert accepted <= 8  # bits of a frame's header that mean nothing


def test_a_missing_or_another_file_is_refused(delta, tmp_path):
    path = delta / FILE
    base = tmp_path / "old"
    other = copied(delta, tmp_path / "published" / "weight_v000002")
    with pytest.raises(ost.IndexFileError, match="the version of the directory, 000002"):
        ost.apply_delta(base, other, tmp_path / "made")
    path.write_bytes((tmp_path / "new" / "model.safetensors").read_bytes())
    with pytest.raises(ost.HeaderError, match="not those that the index names"):
        ost.apply_delta(base, delta, tmp_path / "made")
    path.unlink()
    with pytest.raises(ost.MissingError):
        ost.apply_delta(base, delta, tmp_path / "made")
    with pytest.raises(ost.MissingError):
        ost.apply_delta(base, tmp_path / "published" / "weight_v000003", tmp_path / "made")
    with pytest.raises(ost.MissingError, match="a delta has an index"):
        ost.apply_delta(base, tmp_path / "new", tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("delta_encoding", "overwrite"),
        ("compression_format", "lz4"),
        ("checksum_format", "xxh3-128"),
        ("base_version", "000001"),
        ("version", "1"),
        ("version", 1),
        ("version", "000000"),
    ],
)
def test_other_encodings_and_versions_are_refused(delta, tmp_path, key, value):
    index = json.loads((delta / INDEX_NAME).read_text())
    index["metadata"][key] = value
    (delta / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ost.IndexFileError, match=key):
        ost.apply_delta(tmp_path / "old", delta, tmp_path / "made")


def test_an_index_that_names_nothing_of_what_is_there(delta, tmp_path):
    """A delta of nothing has files as well, but nothing is in them."""
    index = json.loads((delta / INDEX_NAME).read_text())
    (delta / CHECKSUMS_NAME).unlink()
    for weight_map in ({}, {"a": FILE}):
        (delta / INDEX_NAME).write_text(json.dumps(index | {"weight_map": weight_map}))
        if weight_map:
            shutil.copy(delta / FILE, delta / "model-00002-of-00002.safetensors")
        with pytest.raises(ost.HeaderError, match="its tensors are not those that the index names: {'a'}"):
            ost.apply_delta(tmp_path / "old", delta, tmp_path / "made")
    done = ost.delta(tmp_path / "old", tmp_path / "old", tmp_path / "nothing", version=1)
    ost.apply_delta(tmp_path / "old", done.path, tmp_path / "made")
    assert tensor_files(tmp_path / "made") == tensor_files(tmp_path / "old")


def test_a_base_that_may_not_be_changed(delta, tmp_path):
    """No mode of it is copied, which would forbid to finish the copy, or to delete it."""
    base = tmp_path / "old"
    (base / "more").mkdir()
    (base / "more" / "notes.txt").write_text("of the model")
    for path in (base, *base.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    ost.apply_delta(base, delta, tmp_path / "made")
    assert tensor_files(tmp_path / "made") == tensor_files(tmp_path / "new")
    for path in (tmp_path / "made", *(tmp_path / "made").rglob("*")):
        assert path.stat().st_mode & 0o600 == 0o600


@pytest.mark.parametrize("place", ["missing/parents/made", "dangling", "dangling/made"])
def test_what_fails_leaves_nothing_in_a_place_that_is_not_there(delta, tmp_path, place):
    (tmp_path / "dangling").symlink_to(tmp_path / "no" / "such")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ost.SafetensorsError):
        ost.apply_delta(tmp_path / "new", delta, tmp_path / place)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("same", [False, True])
def test_a_delta_is_not_a_model(delta, tmp_path, same):
    """Its tensors are compressed differences, and its checksums are those of the model that it makes."""
    if same:  # its index names no file, but there is one
        delta = Path(ost.delta(tmp_path / "old", tmp_path / "old", tmp_path / "again", version=1, options=ONE).path)
    for read in (ost.load, ost.open_checkpoint, partial(ost.delta, tmp_path / "old", publish=tmp_path, version=1)):
        with pytest.raises(ost.IndexFileError, match="weight_v000001: is a delta of version 0; apply_delta makes the"):
            read(delta)
    assert ost.verify(delta) == []
    with pytest.raises(ost.ChecksumError, match="is a delta"):
        ost.verify(delta, data=True)
    (delta / FILE).write_bytes((delta / FILE).read_bytes() + b"more")
    assert len(ost.verify(delta)) == 1


def test_another_base_is_told_which_one_the_delta_needs(delta, tmp_path):
    ost.save(tmp_path / "other", {"a": changed(TREE["a"], 7), "b": TREE["b"]})
    with pytest.raises(ost.ChecksumError, match="the delta is damaged, or the base is not version 0"):
        ost.apply_delta(tmp_path / "other", delta, tmp_path / "made")


def test_a_base_that_is_replaced_meanwhile_changed(delta, tmp_path, monkeypatch):
    """It is not another base, and the delta is not damaged."""
    ost.save(tmp_path / "other", {"a": changed(TREE["a"], 7), "b": TREE["b"]})
    real = applying._copy

    def copy(base, directory):
        replace.replace(os.fspath(tmp_path / "other"), base)
        real(base, directory)

    monkeypatch.setattr(applying, "_copy", copy)
    with pytest.raises(ost.StorageError, match="changed while it was in use"):
        ost.apply_delta(tmp_path / "old", delta, tmp_path / "made")


def test_a_full_version_is_not_a_delta(tmp_path):
    (step,) = save_steps(tmp_path, 0, max_file_bytes=20_000)
    with pytest.raises(ost.IndexFileError, match="is of a full version"):
        ost.apply_delta(step, step, tmp_path / "made")


def test_a_base_whose_tensor_has_no_bytes_to_change(delta, tmp_path):
    ost.save(tmp_path / "empty", {"a": TREE["a"][:0], "b": TREE["b"]})
    with pytest.raises(ost.TensorMismatchError, match="'a': a delta changes tensors that are in one piece"):
        ost.apply_delta(tmp_path / "empty", delta, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_another_base_is_refused(delta, tmp_path):
    """Also if it differs only in a tensor that did not change."""
    for number, tree in enumerate(
        [{"a": NEW["a"], "b": TREE["b"]}, {"a": TREE["a"], "b": changed(TREE["b"])}, {"a": TREE["a"]}]
    ):
        base = tmp_path / f"base-{number}"
        ost.save(base, tree)
        assert is_refused(delta, base, None)
    # What a step changed it does not change once more.
    ost.apply_delta(tmp_path / "old", delta, tmp_path / "old")
    assert is_refused(delta, tmp_path / "old", None)


def test_what_is_at_the_destination_stays(delta, tmp_path):
    (tmp_path / "made").mkdir()
    with pytest.raises(ost.StorageError, match="already exists"):
        ost.apply_delta(tmp_path / "old", delta, tmp_path / "made")
    for base, destination in (("gs://bucket/old", tmp_path / "new"), (tmp_path / "old", "gs://bucket/new")):
        with pytest.raises(ost.StorageError, match="a directory of this machine"):
            ost.apply_delta(base, delta, destination)
    file = tmp_path / "old" / "model.safetensors"
    with pytest.raises(ost.StorageError):
        ost.apply_delta(file, delta, file)
    assert file.is_file()


def test_a_link_stays_a_link(delta, tmp_path):
    (tmp_path / "current").symlink_to(tmp_path / "old")
    ost.apply_delta(tmp_path / "current", delta, tmp_path / "current")
    assert (tmp_path / "current").is_symlink()
    assert tensor_files(tmp_path / "old") == tensor_files(tmp_path / "new")


def publish(root):
    ost.delta(root / "old", root / "new", root / "made", version=1, options=ONE)


def test_a_publisher_that_ends_at_any_change_leaves_nothing_to_see(delta, tmp_path):
    whole = tensor_files(delta)
    there = []
    for _ in crashes(lambda: publish(tmp_path)):
        made = [path for path in (tmp_path / "made").glob("*") if not path.name.startswith(".")]
        there.append(len(made))
        if made:  # its publisher may have ended right then
            assert [path.name for path in made] == [DELTA]
            assert tensor_files(made[0]) == whole
            shutil.rmtree(tmp_path / "made")
    assert there == sorted(there)
    assert there.count(0) > 8
    assert there[-1] == 1


def test_an_apply_that_ends_at_any_change_leaves_the_old_or_the_new_version(delta, tmp_path):
    versions = [tensor_files(tmp_path / name) for name in ("old", "new")]
    engine, seen = copied(tmp_path / "old", tmp_path / "made" / "engine"), []
    for _ in crashes(lambda: ost.apply_delta(engine, delta, engine, options=ONE)):
        seen.append(versions.index(tensor_files(engine)))
        if seen[-1]:
            shutil.rmtree(tmp_path / "made")
            copied(tmp_path / "old", engine)
    assert seen == sorted(seen)
    assert seen.count(0) > 8
    assert seen[-1] == 1


@pytest.mark.parametrize("job", ["publish", "apply"])
def test_a_full_disk_leaves_nothing_to_see(delta, tmp_path, monkeypatch, job):
    def run():
        if job == "publish":
            publish(tmp_path)
        else:
            ost.apply_delta(tmp_path / "old", delta, tmp_path / "old", options=ONE)

    old, real = tensor_files(tmp_path / "old"), os.pwritev
    for number in itertools.count():
        room = iter(range(number))

        def pwritev(*args, room=room):
            if next(room, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", pwritev)
            try:
                run()
            except ost.StorageError as error:
                assert "No space left on device" in str(error)  # noqa: PT017, the alternative is no error
            else:
                assert number > 1
                return
        assert tensor_files(tmp_path / "old") == old
        assert not list(tmp_path.glob("made/*"))


@pytest.mark.process
def test_a_killed_apply_is_made_again(delta, tmp_path):
    old, new = (tensor_files(tmp_path / name) for name in ("old", "new"))
    code = (
        "import os, signal, sys, orbax_safetensors as ost\n"
        "os.fsync = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "ost.apply_delta(sys.argv[1], sys.argv[2], sys.argv[1])"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path / "old", delta], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert tensor_files(tmp_path / "old") == old
    ost.apply_delta(tmp_path / "old", delta, tmp_path / "old")
    assert tensor_files(tmp_path / "old") == new
