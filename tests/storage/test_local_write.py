"""Local files that are written: short writes, many buffers, modes, and disks that fail."""

import ctypes
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage import local
from orbax_safetensors.storage.local import LocalStore, NewLocalFile, check_makeable
from tests.support.files import nothing_left

BYTES = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "data")


@pytest.fixture
def file(path):
    file = NewLocalFile(path)
    yield file
    file.close()


def write(file, offset, *parts):
    file.write(offset, [memoryview(part) for part in parts])


def content(path):
    with open(path, "rb") as opened:
        return opened.read()


def test_buffers_are_written_in_order(file, path):
    write(file, 3, b"ab", b"", b"cde")
    assert content(path) == b"\0\0\0abcde"
    write(file, 0)
    write(file, 0, b"")
    write(file, 1, b"xy")
    assert content(path) == b"\0xyabcde"


def test_more_buffers_than_one_call_takes(file, path):
    write(file, 1, *(BYTES[at : at + 3] for at in range(0, 9000, 3)))
    assert content(path) == b"\0" + BYTES[:9000]


def test_short_writes_are_continued(file, path, monkeypatch):
    real, calls = os.pwritev, []

    def short(descriptor, buffers, offset):
        calls.append(offset)
        return real(descriptor, [buffers[0][:5]], offset)

    monkeypatch.setattr(local.os, "pwritev", short)
    write(file, 10, BYTES[:7], BYTES[7:13])
    assert content(path) == bytes(10) + BYTES[:13]
    assert calls == [10, 15, 17, 22]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG])
def test_a_write_that_fails_names_file_and_place(file, path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local.os, "pwritev", fail)
    with pytest.raises(StorageError) as caught:
        write(file, 7, b"ab", b"cde")
    assert str(caught.value) == f"{path}: writing 5 bytes at offset 7 failed: {os.strerror(code)}"
    assert caught.value.__cause__.errno == code


def test_a_file_that_is_there_is_written_into(path):
    """Another process may have made it first."""
    with open(path, "wb") as out:
        out.write(b"0123456789")
    file = NewLocalFile(path)
    write(file, 2, b"xx")
    file.close()
    assert content(path) == b"01xx456789"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o000, 0o666)])
def test_the_mode_is_what_the_umask_leaves(path, umask, mode):
    before = os.umask(umask)
    try:
        NewLocalFile(path).close()
    finally:
        os.umask(before)
    assert os.stat(path).st_mode & 0o777 == mode


def test_files_that_cannot_be_created(tmp_path):
    with pytest.raises(StorageError, match="missing/data: cannot be created: No such file"):
        NewLocalFile(str(tmp_path / "missing" / "data"))
    with pytest.raises(StorageError, match="cannot be created: Is a directory"):
        NewLocalFile(str(tmp_path))


def test_descriptors_are_not_inherited(file):
    assert not os.get_inheritable(file._descriptor)


def test_a_closed_file_writes_into_no_other(path, tmp_path):
    """As a thread might that a second interrupt has left behind: descriptors are numbers that are used again."""
    file = NewLocalFile(path)
    file.close()
    with open(tmp_path / "other", "wb"), pytest.raises(StorageError, match=rf"{path}: writing 3 bytes .* failed"):
        write(file, 0, b"abc")
    assert content(tmp_path / "other") == b""


def test_several_threads_write_one_file(file, path):
    threads = [
        threading.Thread(target=write, args=(file, at * 1000, BYTES[at * 1000 : (at + 1) * 1000])) for at in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert content(path) == BYTES[:16000]


def test_threads_write_into_a_file_in_turn(file, monkeypatch):
    """In the kernel, the others would wait for the file at the price of a core."""
    writing = threading.Semaphore(1)
    overlaps = []

    def pwritev(descriptor, buffers, offset):
        overlaps.append(not writing.acquire(timeout=0))
        os.sched_yield()
        writing.release()
        return buffers[0].nbytes

    monkeypatch.setattr(local.os, "pwritev", pwritev)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: write(file, at, b"x"), range(20)))
    assert overlaps == [False] * 20


@pytest.mark.parametrize("sync", [False, True])
def test_long_writes_begin_to_go_to_the_disk_if_the_file_will_be_synced(path, monkeypatch, sync):
    begun = []
    monkeypatch.setattr(local, "_SYNC_FILE_RANGE", lambda *args: begun.append(args))
    file = LocalStore().create(path, sync=sync)
    long = bytes(2**20)
    write(file, 2**32, long, b"x")
    write(file, 0, long[:-1])
    begun = [(descriptor, begin.value, nbytes.value, what) for descriptor, begin, nbytes, what in begun]
    assert begun == ([(file._descriptor, 2**32, 2**20 + 1, 2)] if sync else [])
    file.close()


def test_bytes_go_to_the_disk_before_the_file_is_synced(path):
    file = NewLocalFile(path, sync=True)
    write(file, 1, BYTES * 64)
    file.sync()
    file.close()
    assert content(path) == b"\0" + BYTES * 64


def test_flushing(file, path, tmp_path, monkeypatch):
    real, flushed = os.fsync, []

    def fsync(descriptor):
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return real(descriptor)

    monkeypatch.setattr(local.os, "fsync", fsync)
    with nothing_left(tmp_path):
        file.sync()
        LocalStore().sync(str(tmp_path))
        assert flushed == [path, str(tmp_path)]


def test_flushing_that_fails(file, path, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(local.os, "fsync", fail)
    with nothing_left(tmp_path):
        for call, name in ((file.sync, path), (lambda: LocalStore().sync(str(tmp_path)), tmp_path)):
            with pytest.raises(StorageError, match=f"{name}: flushing to the disk failed: Input/output error"):
                call()


def test_flushing_what_is_no_directory(tmp_path, file, path):
    for name in (path, str(tmp_path / "missing")):
        with pytest.raises(StorageError, match=f"{name}: cannot be opened"):
            LocalStore().sync(name)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_that_do_not_flush_directories(file, tmp_path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local.os, "fsync", fail)
    LocalStore().sync(str(tmp_path))
    with pytest.raises(StorageError, match="flushing to the disk failed"):
        file.sync()


def test_a_directory_that_may_not_be_read_is_not_flushed(tmp_path, monkeypatch):
    """As a user has it who may add files to a directory and not list them."""

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(local.os, "open", refuse)
    LocalStore().sync(str(tmp_path))


def test_closing_that_fails(path, monkeypatch):
    file, real = NewLocalFile(path), os.close

    def close(descriptor):
        real(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(local.os, "close", close)
    with pytest.raises(StorageError, match=f"{path}: closing failed: Disk quota exceeded"):
        file.close()


def test_what_the_system_says_of_a_place(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    os.symlink("nowhere", tmp_path / "dangling")
    os.symlink("loop", tmp_path / "loop")
    check_makeable(f"{tmp_path}/a/b/c")
    for name, code in {"file": errno.ENOTDIR, "dangling": errno.ENOENT, "loop": errno.ELOOP}.items():
        with pytest.raises(StorageError, match=f"a/b: cannot be made: {tmp_path}/{name}: {os.strerror(code)}"):
            check_makeable(f"{tmp_path}/{name}/a/b")
    monkeypatch.setattr(local, "_access", lambda path, mode: ctypes.set_errno(errno.EROFS) or -1)
    with pytest.raises(StorageError, match=f"cannot be made: {tmp_path}: Read-only file system"):
        check_makeable(f"{tmp_path}/a")
