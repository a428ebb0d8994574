"""Conversions on disks that fail and machines that crash: what is there in the end was on the disk."""

import contextlib
import errno
import os
import shutil
import threading
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

import orbax_safetensors as ost
from orbax_safetensors.storage import local
from orbax_safetensors.streaming import partial_directory
from tests.support import tiers
from tests.support.files import nothing_left
from tests.support.interrupted import CALLS
from tests.support.killed_conversions import check, make_source
from tests.support.tiers import cross

MANY_FILES = "in files of at most some size"
CALLS = {
    **CALLS,
    MANY_FILES: lambda *args, **more: ost.reshard(*args, max_file_bytes=30_000, memory_bytes=40_000, **more),
}
KINDS = ("to_safetensors", "reshard_safetensors", MANY_FILES)
TO_ORBAX = ("to_orbax", "reshard_orbax")


class Disk:
    """What a crash of the machine leaves of the files of a draft: what was flushed, by name.

    A flush that fails loses the bytes that it should have flushed; a later flush reports nothing, as Linux does.
    """

    def __init__(self, draft):
        self.draft = draft
        self.files: dict[str, bytes] = {}
        self.lost: dict[str, dict[int, int]] = {}
        self.names: set[str] = set()
        self.lock = threading.Lock()

    @property
    def directory(self):
        return next(self.draft.glob("run-*/files"), None)

    def flushed(self, descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        with self.lock:
            if path.parent == self.directory:
                content = bytearray(path.read_bytes())
                for at, byte in self.lost.get(path.name, {}).items():
                    content[at] = byte
                self.files[path.name] = bytes(content)
            elif path == self.directory:
                self.names = set(os.listdir(path))

    def not_flushed(self, descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        with self.lock:
            if path.parent == self.directory:
                now = path.read_bytes()
                before = self.files.get(path.name, b"").ljust(len(now), b"\0")
                self.lost[path.name] = {at: before[at] for at in range(len(now)) if now[at] != before[at]}

    def crash(self, directory=None):
        """Loses all that was not flushed, and nothing of the record of what was written."""
        for path in (directory or self.directory).iterdir():
            size = path.stat().st_size
            path.write_bytes(self.files.get(path.name, b"").ljust(size, b"\0")[:size])
            if path.name not in self.names:
                path.unlink()


@contextlib.contextmanager
def failing(disk, function, number, code, only):
    """The `number`-th call of `os.<function>` for which `only` holds fails; yields a list of these calls."""
    real, fsync, calls = getattr(os, function), os.fsync, []

    def maybe(*args, **kwargs):
        if only(*args):
            with disk.lock:
                calls.append(args)
                fails = len(calls) == number
            if fails:
                if function == "fsync":
                    disk.not_flushed(*args)
                raise OSError(code, os.strerror(code))
        if function == "fsync":
            disk.flushed(*args)
        return real(*args, **kwargs)

    def flush(descriptor):
        disk.flushed(descriptor)
        fsync(descriptor)

    with mock.patch.object(os, "fsync", flush), mock.patch.object(os, function, maybe):
        yield calls


def anything(*_):
    return True


def in_the_draft(path, flags=0, *_):
    return bool(flags & os.O_CREAT) and ".partial" in str(path)


OPERATIONS = {
    "writes": ("pwritev", errno.ENOSPC, anything),
    "writes, badly": ("pwritev", errno.EIO, anything),
    "creates": ("open", errno.EDQUOT, in_the_draft),
    "flushes": ("fsync", errno.EIO, anything),
    "flushes on a full disk": ("fsync", errno.ENOSPC, anything),
    "renames": ("rename", errno.EIO, anything),
    "replaces": ("replace", errno.EIO, anything),
}


@pytest.fixture
def source(tmp_path):
    def make(kind):
        path = make_source("reshard_safetensors" if kind == MANY_FILES else kind, tmp_path / "from")
        if kind == MANY_FILES:
            (path / "config.json").write_text('{"model_type": "mine"}')
            (path / "tokenizer.json").write_text("{}")
        return path

    return make


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        *(("to_safetensors", operation) for operation in OPERATIONS),
        *(
            pytest.param(MANY_FILES, operation, marks=pytest.mark.cross)
            for operation in ("writes", "creates", "flushes")
        ),
    ],
)
def test_whatever_fails_the_next_one_goes_on(kind, operation, source, tmp_path):
    """Even where the machine then crashes: one error, nothing that opens, and the same bytes in the end."""
    function, code, only = OPERATIONS[operation]
    path, whole = source(kind), tmp_path / "whole"
    with failing(Disk(tmp_path / "whole.partial"), function, -1, code, only) as calls:
        CALLS[kind](path, whole)
    check(kind, whole)
    assert calls
    parts = 4 if tiers.only_fast else 8
    few = {*range(1, len(calls) + 1, 1 + len(calls) // parts), *range(max(len(calls) - 2, 1), len(calls) + 1)}
    for number in sorted(few):
        destination = tmp_path / str(number)
        disk = Disk(tmp_path / f"{number}.partial")
        with (
            nothing_left(tmp_path),
            failing(disk, function, number, code, only),
            pytest.raises(ost.StorageError, match=os.strerror(code)) as caught,
        ):
            CALLS[kind](path, destination)
        if destination.exists():
            assert (function, number) == ("fsync", len(calls))
            assert "is complete, but may not outlive a crash" in str(caught.value)
        else:
            if disk.directory is not None:
                disk.crash()
            CALLS[kind](path, destination, resume=True)
        assert content(destination) == content(whole)
        assert [name for name in os.listdir(tmp_path) if "partial" in name] == []


@pytest.mark.parametrize("kind", ["to_safetensors", MANY_FILES])
def test_recorded_tiles_outlive_a_crash(kind, source, tmp_path):
    """Right after each record, while another thread is writing the next batch."""
    path, destination = source(kind), tmp_path / "to"
    disk, crashed = Disk(tmp_path / "to.partial"), []
    add = partial_directory.PartialDirectory.add

    def added(self, numbers):
        add(self, numbers)
        crashed.append(tmp_path / str(len(crashed)))
        copy = f"{crashed[-1]}.partial"
        shutil.copytree(disk.draft, copy)
        disk.crash(next(Path(copy).glob("run-*/files")))

    with (
        failing(disk, "replace", -1, 0, anything),
        mock.patch.object(partial_directory.PartialDirectory, "add", added),
    ):
        whole = CALLS[kind](path, destination)
    left = [CALLS[kind](path, one, resume=True).nbytes for one in crashed]
    assert left == sorted(left, reverse=True)
    assert 0 == left[-1] < left[0] < whole.nbytes
    for one in crashed:
        assert content(one) == content(destination)


def test_a_full_disk_for_a_config_that_was_given(source, tmp_path, monkeypatch):
    path, destination = source("to_safetensors"), tmp_path / "to"

    create = local.LocalStore.create

    def full(self, where, nbytes=None, **more):
        return create(self, "/dev/full" if os.path.basename(where) == "config.json" else where, nbytes, **more)

    with monkeypatch.context() as patched:
        patched.setattr(local.LocalStore, "create", full)
        with pytest.raises(ost.StorageError, match="No space left"):
            CALLS["to_safetensors"](path, destination, config={"model_type": "mine"})
    assert not destination.exists()
    assert CALLS["to_safetensors"](path, destination, config={"model_type": "mine"}, resume=True).nbytes == 0
    assert (destination / "config.json").read_text() == '{\n  "model_type": "mine",\n  "dtype": "float32"\n}\n'


def test_a_record_that_cannot_be_written(source, tmp_path, monkeypatch):
    """Tiles that are not recorded are written again."""
    path, destination = source(MANY_FILES), tmp_path / "to"

    def full(where, mode="r", **more):
        return open("/dev/full" if "done-" in str(where) and mode == "a" else where, mode, **more)

    with nothing_left(tmp_path, "/dev/full"), monkeypatch.context() as patched:
        patched.setattr(partial_directory, "open", full, raising=False)
        with pytest.raises(ost.StorageError, match="No space left"):
            CALLS[MANY_FILES](path, destination)
    CALLS[MANY_FILES](path, destination, resume=True)
    check(MANY_FILES, destination)


def test_a_draft_that_cannot_be_deleted_when_all_is_there(source, tmp_path, monkeypatch, caplog):
    path, destination = source(MANY_FILES), tmp_path / "to"

    def refuse(_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(partial_directory.shutil, "rmtree", refuse)
    CALLS[MANY_FILES](path, destination)
    check(MANY_FILES, destination)
    assert f"{destination}.partial is not needed any more and cannot be deleted" in caplog.text


class Flushed(dict):
    """What a crash of the machine leaves of anything: bytes of files and names in directories, by path, as flushed."""

    def __init__(self):
        self.events: list[tuple[str, Path]] = []

    def fsync(self, descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self[path] = self.now(path)
        self.events.append(("fsync", path))

    @staticmethod
    def now(path):
        return set(os.listdir(path)) if path.is_dir() else path.read_bytes()

    def has_all(self, directory):
        return [path for path in (directory, *directory.rglob("*")) if self.get(path) != self.now(path)] == []


@contextlib.contextmanager
def watched(flushed, step, fails=("", 0)):
    """The calls of `os.fsync` and, of the step, `os.rename`, with which `flushed` is kept; that call of one fails."""
    calls = {"fsync": os.fsync, "rename": os.rename}
    counts = dict.fromkeys(calls, 0)

    def counted(name, *args):
        counts[name] += 1
        number = "last" if flushed.events[-1:] == [("rename", step)] else counts[name]
        if (name, number) == fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fsync(descriptor):
        counted("fsync")
        calls["fsync"](descriptor)
        flushed.fsync(descriptor)

    def rename(old, new):
        if Path(new) == step:
            counted("rename")
            assert flushed.has_all(Path(old))
            flushed.events.append(("rename", step))
        calls["rename"](old, new)

    with mock.patch.object(os, "fsync", fsync), mock.patch.object(os, "rename", rename):
        yield counts


@pytest.mark.parametrize("kind", [*KINDS, *TO_ORBAX])
def test_all_is_on_the_disk_before_it_has_its_name(kind, source, tmp_path):
    path, destination = source(kind), tmp_path / "new" / "directory" / "to"
    named = destination / "0" if kind in TO_ORBAX else destination
    flushed, seen = Flushed(), []

    def begun(*_):
        (unfinished,) = destination.glob("0.*")
        above = [unfinished, *unfinished.parents]
        seen.append(all(below.name in flushed[at] for below, at in pairwise(above[:5])))
        seen.append({path.name for path in unfinished.iterdir()} <= flushed[unfinished])
        seen.append(flushed[unfinished / "_in_progress.json.new"] == flushed.now(unfinished / "_in_progress.json"))

    with watched(flushed, named):
        CALLS[kind](path, destination, progress=begun if kind in TO_ORBAX else None)
    assert all(seen)
    assert bool(seen) == (kind in TO_ORBAX)  # a conversion to files has its record elsewhere
    check(kind, destination)
    assert flushed.events[-2:] == [("rename", named), ("fsync", named.parent)]
    assert [event for event, _ in flushed.events].count("rename") == 1
    # Directories that were made, in the one that was there.
    assert {tmp_path, tmp_path / "new"} <= flushed.keys()


def test_files_are_flushed_where_something_was_written(source, tmp_path):
    """And not every file after every tile."""
    flushed, told = Flushed(), []
    with watched(flushed, tmp_path / "to"):
        CALLS[MANY_FILES](source(MANY_FILES), tmp_path / "to", progress=lambda *now: told.append(now))
    files = list((tmp_path / "to").glob("*.safetensors"))
    flushes = [path for _, path in flushed.events if path.suffix == ".safetensors"]
    assert len(files) > 2
    assert len(flushes) <= len(told) + 2 * len(files)  # the tiles that end one and begin another, and the headers


@pytest.mark.parametrize("kind", cross(TO_ORBAX, {"to_orbax"}))
def test_whatever_fails_the_next_one_to_orbax_goes_on(kind, source, tmp_path):
    path = source(kind)
    with watched(Flushed(), tmp_path / "whole" / "0") as counts:
        CALLS[kind](path, tmp_path / "whole")
    assert min(counts.values()) > 0
    most = counts["fsync"] * 3 // 4  # Orbax's database is in more files, or fewer
    for name, number in [("rename", 1), *(("fsync", number) for number in (*range(1, most, 1 + most // 12), "last"))]:
        destination = tmp_path / f"{name} {number}"
        with (
            nothing_left(tmp_path),
            watched(Flushed(), destination / "0", (name, number)),
            pytest.raises(ost.StorageError, match=os.strerror(errno.EIO)) as caught,
        ):
            CALLS[kind](path, destination)
        if (destination / "0").exists():
            assert (name, number) == ("fsync", "last")
            assert "0: is complete, but may not outlive a crash: " in str(caught.value)
        else:
            assert number != "last"
            CALLS[kind](path, destination, resume=True)
        check(kind, destination)
        assert sorted(os.listdir(destination / "0")) == sorted(os.listdir(tmp_path / "whole" / "0"))
