"""The directory of a conversion that is not finished: what may be in its place, and what is never deleted."""

import json
import os
import shutil
from pathlib import Path

import pytest

import orbax_safetensors as ost
from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.streaming import partial_directory
from orbax_safetensors.streaming.partial_directory import PartialDirectory
from tests.support.files import everything
from tests.support.interrupted import CALLS
from tests.support.killed_conversions import check, make_source

KIND = "reshard_safetensors"


class Run(PartialDirectory):
    """A directory with a run at work on it, which is over at the end of the block."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self.release()


@pytest.fixture
def draft(tmp_path):
    """A function that makes one, of a run of its own."""
    return lambda name="to": Run(str(tmp_path / name), "of this", nbytes=0)


def begun(draft, tiles=()):
    """The directory of a draft that was begun, and recorded some tiles, by a run that is over."""
    with draft:
        draft.begin(resume=False)
        draft.open(0)
        draft.add(tiles)
    return Path(draft.directory).parent


def test_from_its_beginning_to_its_end(draft, tmp_path):
    with draft() as first:
        first.begin(resume=False)
        first.open(0)
        Path(first.directory, "a").write_text("a")
        first.add([1, 2])
        first.add([5])
    with draft() as again:
        again.begin(resume=True)
        again.open(1)
        again.add([7])
        again.close()
        assert again.done() == {1, 2, 5, 7}
        again.finish()
    assert everything(tmp_path) == {"to": False, "to/a": b"a"}


@pytest.mark.parametrize("lacking", [[], [3], [0, 6]])
def test_all_tiles_have_to_be_recorded(draft, lacking):
    with draft() as own:
        own.begin(resume=False)
        own.open(0)
        own.add([number for number in range(7) if number not in lacking])
        own.close()
        if lacking:
            with pytest.raises(StorageError, match=f"{len(lacking)} of 7 parts are not recorded as written"):
                own.check_complete(7)
        else:
            own.check_complete(7)


@pytest.mark.parametrize(
    ("place", "kind"),
    [("file", "file"), ("link", "link"), ("dangling", "link"), ("pipe", "file"), ("run", "link"), ("files", "link")],
)
def test_what_is_no_directory(draft, tmp_path, place, kind):
    """A link is not followed, even to a draft."""
    other = begun(draft("other"))
    path = tmp_path / "to.partial"
    if place == "file":
        path.write_text("mine")
    elif place == "pipe":
        os.mkfifo(path)
    elif place == "run":
        path.mkdir()
        path = path / other.name
        path.symlink_to(other)
    elif place == "files":
        path = begun(draft()) / "files"
        path.rmdir()
        path.symlink_to(other / "files")
    else:
        path.symlink_to("nothing" if place == "dangling" else "other.partial")
    before = everything(tmp_path)
    for resume in (False, True):
        with pytest.raises(StorageError, match=f"{path}: is a {kind} and not an unfinished conversion; move it away"):
            draft().begin(resume=resume)
        assert everything(tmp_path) == before


@pytest.mark.parametrize("inside", [False, True])
def test_what_somebody_else_has_there(draft, tmp_path, inside):
    path = begun(draft()) if inside else tmp_path / "to.partial"
    path.mkdir(exist_ok=True)
    (path / "mine").write_text("mine")
    before = everything(tmp_path)
    message = f"{path}: is not an unfinished conversion, it holds 'mine'; move it away"
    for resume in (False, True):
        with pytest.raises(StorageError, match=message):
            draft().begin(resume=resume)
        assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (b"", StorageError, "is not JSON: .*; begin anew without resume"),
        (b'{"digest": "of th', StorageError, "is not JSON"),
        (b"\0\0\0", StorageError, "is not JSON"),
        (b"\xff", StorageError, "is not JSON"),
        (b'["of this"]', StorageError, r"expected a dict, found \['of this'\]; begin anew"),
        (b"null", StorageError, "expected a dict, found None"),
        (b'{"digest": "of that"}', TensorMismatchError, "cannot be resumed: it was begun from another source"),
        (b"{}", TensorMismatchError, "cannot be resumed"),
    ],
)
def test_records_that_are_not_of_this(draft, text, error, message):
    record = begun(draft()) / "record.json"
    record.write_bytes(text)
    with pytest.raises(error, match=message):
        draft().begin(resume=True)
    assert record.read_bytes() == text
    assert json.loads((begun(draft()) / "record.json").read_text()) == {"digest": "of this"}
    assert not record.parent.exists()


def test_a_record_that_is_a_directory(draft, tmp_path):
    (tmp_path / "to.partial" / "run-1" / "record.json").mkdir(parents=True)
    with pytest.raises(StorageError, match="is not a regular file"):
        draft().begin(resume=True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"[1, 2]\n[3", {1, 2}),
        (b"[1]\n[2, 3\n[4]\n", {1, 4}),
        (b"\0\0\0\n[4]\n", {4}),
        (b"[1]\n\xff\xfe\n[2]\n", {1, 2}),
    ],
)
def test_tiles_of_which_the_record_was_not_whole(draft, text, found):
    (begun(draft()) / "done-0").write_bytes(text)
    with draft() as again:
        again.begin(resume=True)
        assert again.done() == found
        again.open(0)
        again.add([9])
        again.close()
        assert again.done() == found | {9}


def test_a_deletion_that_is_cut_short(draft, monkeypatch):
    """What is half deleted is not taken up."""
    (begun(draft(), [1, 2]) / "files" / "a").write_text("a")
    rmtree = shutil.rmtree

    def cut_short(path):
        rmtree(os.path.join(path, "files"))
        raise OSError("killed")

    with monkeypatch.context() as patched, pytest.raises(StorageError, match="killed"):
        patched.setattr(partial_directory.shutil, "rmtree", cut_short)
        draft().begin(resume=False)
    with draft() as again:
        again.begin(resume=True)
        assert again.done() == set()


def test_a_draft_whose_files_have_become_a_destination(draft, tmp_path):
    """And this was moved before the rest could be deleted."""
    (begun(draft(), [1, 2]) / "files").rename(tmp_path / "moved")
    with draft() as again:
        again.begin(resume=True)
        assert again.done() == set()


@pytest.mark.parametrize("place", ["file", "directory", "link", "dangling"])
def test_destinations_that_are_there(draft, tmp_path, place):
    path = tmp_path / "to"
    if place == "file":
        path.write_text("mine")
    elif place == "directory":
        path.mkdir()
    else:
        path.symlink_to("nothing" if place == "dangling" else tmp_path)
    for resume in (False, True):
        with pytest.raises(StorageError, match=f"{path}: already exists"):
            draft().begin(resume=resume)
        assert os.listdir(tmp_path) == ["to"]


def test_a_destination_that_comes_meanwhile(draft, tmp_path):
    with draft() as own:
        own.begin(resume=False)
        (tmp_path / "to").symlink_to("nothing")
        with pytest.raises(StorageError, match="already exists"):
            own.finish()
        assert os.path.isdir(own.directory)


@pytest.mark.parametrize("name", ["to/", "to//", "there/../to", "new/directories/to", "new/directories/to/", "ö\n to"])
def test_ways_to_name_a_destination(tmp_path, name):
    source = make_source(KIND, tmp_path / "from")
    (tmp_path / "there").mkdir()
    result = CALLS[KIND](source, f"{tmp_path}/{name}")
    check(KIND, tmp_path / os.path.normpath(name))
    assert result.path == str(tmp_path / os.path.normpath(name))
    assert not list(tmp_path.rglob("*.partial"))


def test_a_destination_in_a_file(tmp_path):
    source = make_source(KIND, tmp_path / "from")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match=r"file/to.partial: cannot be made: .*Not a directory"):
        CALLS[KIND](source, tmp_path / "file" / "to")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_draft_that_was_moved_with_its_destination(tmp_path):
    """It is taken up where it is now."""
    source = make_source(KIND, tmp_path / "from")
    with pytest.raises(ost.StorageError, match="enough"):
        stopped_at_half(source, tmp_path / "to")
    (tmp_path / "to.partial").rename(tmp_path / "elsewhere.partial")
    assert 0 < CALLS[KIND](source, tmp_path / "elsewhere", resume=True).nbytes < 60_000
    check(KIND, tmp_path / "elsewhere")


def stopped_at_half(source, destination):
    def stop(done, total):
        if done > total // 2:
            raise StorageError("enough")

    CALLS[KIND](source, destination, progress=stop)
