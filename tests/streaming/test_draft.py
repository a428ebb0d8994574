"""The directory of a conversion that is not finished: what may be in its place, and what is never deleted."""

import json
import os
import shutil

import pytest

import orbax_safetensors as ost
from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.streaming import draft as drafts
from orbax_safetensors.streaming.draft import Draft
from tests.streaming.interrupted import CALLS
from tests.streaming.test_resume import check, make_source

KIND = "reshard_safetensors"
both = pytest.mark.parametrize("resume", [False, True])


@pytest.fixture
def draft(tmp_path):
    return Draft(str(tmp_path / "to"), "of this")


def everything(root):
    """All names with what they are of, as a change would show."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in root.rglob("*")
    }


def test_from_its_beginning_to_its_end(draft, tmp_path):
    draft.begin(resume=False)
    (tmp_path / "to.partial" / "files" / "a").write_text("a")
    draft.add(0, [1, 2])
    draft.add(0, [5])
    draft.close()
    again = Draft(str(tmp_path / "to"), "of this")
    again.begin(resume=True)
    again.add(1, [7])
    again.close()
    assert again.done() == {1, 2, 5, 7}
    again.finish()
    assert everything(tmp_path) == {"to": False, "to/a": b"a"}


@both
@pytest.mark.parametrize(
    ("place", "kind"), [("file", "file"), ("link", "link"), ("dangling", "link"), ("pipe", "file"), ("files", "link")]
)
def test_what_is_no_directory(draft, tmp_path, place, kind, resume):
    """A link is not followed, even to a draft."""
    other = Draft(str(tmp_path / "other"), "of this")
    other.begin(resume=False)
    path = tmp_path / "to.partial"
    if place == "file":
        path.write_text("mine")
    elif place == "pipe":
        os.mkfifo(path)
    elif place == "files":
        draft.begin(resume=False)
        (path / "files").rmdir()
        (path / "files").symlink_to(tmp_path / "other.partial")
        path = path / "files"
    else:
        path.symlink_to("nothing" if place == "dangling" else "other.partial")
    before = everything(tmp_path)
    with pytest.raises(StorageError, match=f"{path}: is a {kind} and no unfinished conversion; move it away"):
        draft.begin(resume=resume)
    assert everything(tmp_path) == before


@both
def test_what_somebody_else_has_there(draft, tmp_path, resume):
    (tmp_path / "to.partial").mkdir()
    (tmp_path / "to.partial" / "mine").write_text("mine")
    with pytest.raises(StorageError, match="is no unfinished conversion, it holds 'mine'; move it away"):
        draft.begin(resume=resume)
    assert everything(tmp_path / "to.partial") == {"mine": b"mine"}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (b"", StorageError, "is not JSON: .*; begin anew without resume"),
        (b'{"digest": "of th', StorageError, "is not JSON"),
        (b"\0\0\0", StorageError, "is not JSON"),
        (b"\xff", StorageError, "is not JSON"),
        (b'["of this"]', StorageError, r"expected a dict, found \['of this'\]; begin anew"),
        (b"null", StorageError, "expected a dict, found None"),
        (b'{"digest": "of that"}', TensorMismatchError, "cannot be taken up again: it was begun of another source"),
        (b"{}", TensorMismatchError, "cannot be taken up again"),
    ],
)
def test_records_that_are_not_of_this(draft, tmp_path, text, error, message):
    draft.begin(resume=False)
    record = tmp_path / "to.partial" / "record.json"
    record.write_bytes(text)
    with pytest.raises(error, match=message):
        draft.begin(resume=True)
    assert record.read_bytes() == text
    draft.begin(resume=False)
    assert json.loads(record.read_text()) == {"digest": "of this"}


def test_a_record_that_is_a_directory(draft, tmp_path):
    (tmp_path / "to.partial" / "record.json").mkdir(parents=True)
    with pytest.raises(StorageError, match="Is a directory"):
        draft.begin(resume=True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"[1, 2]\n[3", {1, 2}),
        (b"[1]\n[2, 3\n[4]\n", {1, 4}),
        (b"\0\0\0\n[4]\n", {4}),
        (b"[1]\n\xff\xfe\n[2]\n", {1, 2}),
    ],
)
def test_tiles_of_which_the_record_was_not_whole(draft, tmp_path, text, found):
    draft.begin(resume=False)
    (tmp_path / "to.partial" / "done-0").write_bytes(text)
    assert draft.done() == found
    draft.add(0, [9])
    draft.close()
    assert draft.done() == found | {9}


def test_a_deletion_that_is_cut_short(draft, tmp_path, monkeypatch):
    """What is half deleted is not taken up."""
    draft.begin(resume=False)
    (tmp_path / "to.partial" / "files" / "a").write_text("a")
    draft.add(0, [1, 2])
    draft.close()
    rmtree = shutil.rmtree

    def cut_short(path):
        rmtree(os.path.join(path, "files"))
        raise OSError("killed")

    with monkeypatch.context() as patched, pytest.raises(StorageError, match="killed"):
        patched.setattr(drafts.shutil, "rmtree", cut_short)
        draft.begin(resume=False)
    draft.begin(resume=True)
    assert draft.done() == set()


def test_a_draft_whose_files_have_become_a_destination(draft, tmp_path):
    """And this was moved before the rest could be deleted."""
    draft.begin(resume=False)
    draft.add(0, [1, 2])
    draft.close()
    (tmp_path / "to.partial" / "files").rename(tmp_path / "moved")
    draft.begin(resume=True)
    assert draft.done() == set()


@both
@pytest.mark.parametrize("place", ["file", "directory", "link", "dangling"])
def test_destinations_that_are_there(draft, tmp_path, place, resume):
    path = tmp_path / "to"
    if place == "file":
        path.write_text("mine")
    elif place == "directory":
        path.mkdir()
    else:
        path.symlink_to("nothing" if place == "dangling" else tmp_path)
    with pytest.raises(StorageError, match=f"{path}: already exists"):
        draft.begin(resume=resume)
    assert os.listdir(tmp_path) == ["to"]


def test_a_destination_that_comes_meanwhile(draft, tmp_path):
    draft.begin(resume=False)
    (tmp_path / "to").symlink_to("nothing")
    with pytest.raises(StorageError, match="already exists"):
        draft.finish()
    assert (tmp_path / "to.partial" / "files").is_dir()


@pytest.mark.parametrize("name", ["to/", "to//", "there/../to", "new/directories/to", "new/directories/to/", "ö\n to"])
def test_ways_to_name_a_destination(tmp_path, name):
    source = make_source(KIND, tmp_path / "from")
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
