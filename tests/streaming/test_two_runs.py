"""Two conversions into one destination, each in a process of its own: one of them makes it, and it is right."""

import fcntl
import os

import pytest

import orbax_safetensors as ost
from orbax_safetensors.storage.workspace import Lock
from tests.support import interrupted
from tests.support.files import everything, nothing_left
from tests.support.interrupted import CALLS
from tests.support.killed_conversions import TO_ORBAX, arrays, check, make_source, opens

pytestmark = pytest.mark.process

NBYTES = sum(array.nbytes for array in arrays().values())
SEVERAL_FILES = "reshard_safetensors"
OTHERS = "to: another save or conversion is writing here"


@pytest.fixture
def no_locks(monkeypatch):
    monkeypatch.setattr(fcntl, "flock", interrupted.no_locks)


def is_alone(kind, tmp_path, seed=0):
    """The destination is right, and nothing else is left."""
    check(kind, tmp_path / "to", seed)
    assert {path.name for path in tmp_path.iterdir()} <= {"from", "to"}
    if kind in TO_ORBAX:
        assert os.listdir(tmp_path / "to") == ["0"]


def half(kind, source, destination, **more):
    """A conversion that fails in its middle."""

    def stop(done, total):
        if done > total // 2:
            raise ost.StorageError("enough")

    with pytest.raises(ost.StorageError, match="enough"):
        CALLS[kind](source, destination, progress=stop, **more)


@pytest.mark.parametrize("kind", ["to_safetensors", "reshard_orbax"])
def test_the_second_is_refused(forks, kind, tmp_path):
    """However far the first is, and whatever the second is to begin with."""
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    with forks.stopped(kind, source, destination, 3) as first:
        before = everything(tmp_path)
        for resume in (False, True):
            with pytest.raises(ost.StorageError, match=OTHERS.replace("to", "to/0") if kind in TO_ORBAX else OTHERS):
                CALLS[kind](source, destination, resume=resume)
        assert everything(tmp_path) == before
        assert first.go_on() == (0, "")
    is_alone(kind, tmp_path)


@pytest.mark.parametrize(("kind", "resume"), [("to_safetensors", True), ("to_orbax", False)])
def test_a_kill_gives_the_lock_back(forks, kind, resume, tmp_path):
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    with forks.stopped(kind, source, destination, 3) as first:
        first.kill()
        moved = CALLS[kind](source, destination, resume=resume).nbytes
    assert 0 < moved < NBYTES if resume else moved == NBYTES
    is_alone(kind, tmp_path)


@pytest.mark.parametrize("kind", ["reshard_safetensors", "to_orbax"])
def test_a_failure_gives_the_lock_back(kind, tmp_path):
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    with nothing_left(tmp_path):
        half(kind, source, destination)
    assert [path for path in tmp_path.rglob("*.lock") if "from" not in path.parts] == []
    CALLS[kind](source, destination, resume=True)
    is_alone(kind, tmp_path)


def test_one_that_waits_does_not_take_a_file_that_is_gone(tmp_path, monkeypatch):
    """The one before deletes its file between the opening of that file and its locking."""
    path, flock = str(tmp_path / "lock"), fcntl.flock
    first = Lock(path, "it")

    def late(*args):
        first.release()
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", late)
    second = Lock(path, "it")
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ost.StorageError, match="it: another save or conversion is writing here"):
        Lock(path, "it")
    second.release()
    assert os.listdir(tmp_path) == []


# Without locks the second takes all over, and the first finds out.


@pytest.mark.parametrize(("where", "resume"), [(3, True), ("before_the_end", False), ("before_the_end", True)])
def test_without_locks_the_first_fails_and_the_second_goes_on(forks, where, resume, tmp_path, no_locks):
    kind = SEVERAL_FILES
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    told = None
    with forks.stopped(kind, source, destination, where, "none") as first:

        def let_the_first_go_on(done, total):
            nonlocal told
            if done > total // 2 or total == 0:
                told = told or first.go_on()

        moved = CALLS[kind](source, destination, resume=resume, progress=let_the_first_go_on).nbytes
    assert told == (1, f"StorageError: {destination}: another save or conversion is writing here\n")
    assert moved == NBYTES if not resume else 0 < moved < NBYTES if where == 3 else moved == 0
    is_alone(kind, tmp_path)


@pytest.mark.parametrize(
    ("where", "resume"), [("after_it_began", False), (0, True), (3, False), (3, True), ("before_the_rename", True)]
)
def test_without_locks_the_first_leaves_the_second_to_be_resumed(forks, where, resume, tmp_path, no_locks):
    """No tile is recorded that only the first has written, to a file that is not there any more."""
    kind = SEVERAL_FILES
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    with forks.stopped(kind, source, destination, where, "none") as first:
        if resume and where == "before_the_rename":
            with pytest.raises(ost.StorageError, match="enough"):  # there is nothing to be moved
                CALLS[kind](source, destination, resume=True, progress=fail)
        else:
            half(kind, source, destination, resume=resume)
        status, told = first.go_on()
        assert (status, told) == (1, f"StorageError: {destination}: another save or conversion is writing here\n")
    assert not opens(kind, destination)
    CALLS[kind](source, destination, resume=True)
    is_alone(kind, tmp_path)


def fail(done, total):
    raise ost.StorageError("enough")


def test_without_locks_another_source_is_not_mixed_in(forks, tmp_path, no_locks):
    kind, where = SEVERAL_FILES, 3
    source, other = make_source(kind, tmp_path / "from"), make_source(kind, tmp_path / "from" / "other", seed=1)
    with forks.stopped(kind, source, tmp_path / "to", where, "none") as first:
        half(kind, other, tmp_path / "to")
        assert first.go_on()[0] == 1
    CALLS[kind](other, tmp_path / "to", resume=True)
    is_alone(kind, tmp_path, seed=1)


@pytest.mark.parametrize("kind", ["to_safetensors", "to_orbax"])
def test_without_locks_what_is_finished_stays(forks, kind, tmp_path, no_locks):
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    # Writes of TensorStore that were under way may make the directory of the unfinished step anew.
    finished = destination / "0" if kind in TO_ORBAX else destination
    with forks.stopped(kind, source, destination, 3, "none") as first:
        CALLS[kind](source, destination)
        before = everything(finished)
        assert first.go_on()[0] == 1
    assert everything(finished) == before
    check(kind, destination)


@pytest.mark.parametrize(("where", "resume"), [("after_it_began", False), (3, True), ("before_the_end", True)])
def test_without_locks_one_at_most_makes_a_checkpoint(forks, where, resume, tmp_path, no_locks):
    """Both write to one store; the last that began makes the checkpoint, or a later one that resumes."""
    kind = "reshard_orbax"
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    with forks.stopped(kind, source, destination, where, "none") as first:
        if resume and where == "before_the_end":
            with pytest.raises(ost.StorageError, match="enough"):
                CALLS[kind](source, destination, resume=True, progress=fail)
        else:
            half(kind, source, destination, resume=resume)
        assert first.go_on()[0] == 1
    assert not opens(kind, destination)
    CALLS[kind](source, destination, resume=True)
    is_alone(kind, tmp_path)


def test_two_that_begin_at_once_without_locks(forks, tmp_path, no_locks):
    """Neither sees the other's directory: each has tiles and a record of its own, and the second has come too late."""
    kind = SEVERAL_FILES
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    with forks.stopped(kind, source, destination, 3, "none") as first, pytest.MonkeyPatch.context() as patched:
        patched.setattr("orbax_safetensors.streaming.partial_directory.PartialDirectory._runs", lambda self: [])
        CALLS[kind](source, destination)
        assert first.go_on()[0] == 1
    is_alone(kind, tmp_path)
