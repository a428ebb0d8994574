"""Local files: short reads, many buffers, files that end, change or are not files."""

import ctypes
import errno
import os
import threading

import numpy as np
import pytest

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage import local
from orbax_safetensors.storage.local import LocalFile, LocalStore
from tests.support.files import nothing_left


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 64)
    return str(path)


@pytest.fixture
def file(path):
    file = LocalFile(path)
    yield file
    file.close()


def read(file, offset, *sizes):
    buffers = [bytearray(size) for size in sizes]
    file.read([(offset, [memoryview(buffer) for buffer in buffers])])
    return [bytes(buffer) for buffer in buffers]


def test_buffers_are_filled_in_order(file):
    assert read(file, 3, 2, 0, 3) == [bytes([3, 4]), b"", bytes([5, 6, 7])]
    assert read(file, 0) == []


def test_more_buffers_than_one_call_takes(file):
    assert b"".join(read(file, 1, *[3] * 3000)) == (bytes(range(256)) * 64)[1:9001]


def test_short_reads_are_continued(file, monkeypatch):
    real, calls = os.preadv, []

    def short(descriptor, buffers, offset):
        calls.append(offset)
        return real(descriptor, [buffers[0][:5]], offset)

    monkeypatch.setattr(local.os, "preadv", short)
    assert read(file, 10, 7, 6) == [bytes(range(10, 17)), bytes(range(17, 23))]
    assert calls == [10, 15, 17, 22]


def test_a_closed_file_reads_no_other(path, tmp_path):
    file = LocalFile(path)
    file.close()
    with open(tmp_path / "other", "w+b") as other:
        other.write(bytes(100))
        other.flush()
        with pytest.raises(StorageError, match=rf"{path}: reading 3 bytes at offset 0 failed: Bad file descriptor"):
            read(file, 0, 3)


def test_a_file_whose_state_cannot_be_read(file, path, monkeypatch):
    """As that of a file which another client of a network file system has deleted."""

    def gone(descriptor):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched, pytest.raises(StorageError) as caught:
        patched.setattr(local.os, "fstat", gone)
        file.check(file.stamp)
    assert str(caught.value) == f"{path}: its state cannot be read: Stale file handle"


def test_the_end_of_the_file_is_an_error(file, path):
    with pytest.raises(StorageError, match=rf"{path}: expected 6 more bytes at offset 16384, found the file's end"):
        read(file, 64 * 256 - 4, 10)


def test_a_read_that_fails_names_file_and_place(file, path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(local.os, "preadv", fail)
    with pytest.raises(
        StorageError, match=rf"{path}: reading 5 bytes at offset 7 failed: Input/output error"
    ) as caught:
        read(file, 7, 2, 3)
    assert isinstance(caught.value.__cause__, OSError)


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(StorageError, match="cannot be opened: No such file"):
        LocalFile(str(tmp_path / "missing"))
    with pytest.raises(StorageError, match="is not a regular file"):
        LocalFile(str(tmp_path))


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with nothing_left(tmp_path), pytest.raises(StorageError, match="is not a regular file"):
        LocalFile(str(tmp_path / "pipe"))


def test_a_changed_file_is_noticed(file, path):
    before = file.stamp
    file.check(before)
    os.utime(path, ns=(0, os.stat(path).st_mtime_ns + 1))
    with pytest.raises(StorageError, match=rf"{path}: changed while it was in use"):
        file.check(before)
    os.truncate(path, 5)
    with pytest.raises(StorageError, match=r"expected 16384 bytes modified at .* found 5 bytes modified at"):
        file.check(before)


def test_a_replaced_file_is_noticed_when_it_is_opened_again(file, path):
    before, modified = file.stamp, os.stat(path).st_mtime_ns
    os.rename(path, path + ".old")
    with open(path, "wb") as out:
        out.write(bytes(before.nbytes))
    os.utime(path, ns=(modified, modified))
    file.check(before)
    other = LocalFile(path)
    with pytest.raises(StorageError, match="changed"):
        other.check(before)
    other.close()


def test_several_threads_read_one_file(file):
    found = {}

    def work(at):
        found[at] = b"".join(read(file, at, *[256] * 60))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {at: (bytes(range(256)) * 64)[at : at + 256 * 60] for at in range(8)}


def test_a_mapping_outlives_its_file(path):
    file = LocalFile(path)
    memory = file.map()
    file.close()
    assert bytes(memory[254:258]) == bytes([254, 255, 0, 1])
    assert memory.readonly


def test_an_empty_file_cannot_be_mapped(tmp_path):
    (tmp_path / "empty").touch()
    file = LocalFile(str(tmp_path / "empty"))
    with pytest.raises(StorageError, match="cannot be mapped"):
        file.map()
    file.close()


def test_listing(tmp_path, path):
    (tmp_path / "a").touch()
    assert list(LocalStore().list(str(tmp_path))) == ["a", "data"]
    assert LocalStore().list(path) is None
    with pytest.raises(StorageError, match="missing: no such file or directory"):
        LocalStore().list(str(tmp_path / "missing"))


def test_runs_are_filled_by_short_reads_too(tmp_path, monkeypatch):
    content = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    memory = np.zeros(9_000, np.uint8)
    ends = np.array([0, 1, 700, 1400, 5000, 9000])
    order = [3, 0, 4, 2, 1]
    runs = np.array([(memory.ctypes.data + ends[at], ends[at + 1] - ends[at]) for at in order], np.uintp)
    whole = local._preadv
    calls = []

    def short(descriptor, runs, count, offset):
        calls.append(count)
        return whole(descriptor, runs, 1, offset)

    monkeypatch.setattr(local, "_preadv", short)
    monkeypatch.setattr(local, "_MAX_BUFFERS", 3)
    file = LocalFile(tmp_path / "file")
    file.scatter(100, runs)
    expected = np.concatenate([memory[ends[at] : ends[at + 1]] for at in order])
    assert np.array_equal(expected, content[100:9100])
    assert calls == [3, 2, 1, 2, 1]
    with pytest.raises(StorageError, match="expected .* more bytes at offset .*, found the file's end"):
        file.scatter(2000, runs)
    file.close()
    with pytest.raises(StorageError, match="reading .* failed: Bad file descriptor"):
        file.scatter(0, runs)


def test_a_read_that_a_signal_interrupts_is_made_again(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"content")
    memory = np.zeros(7, np.uint8)
    whole, errors = local._preadv, [errno.EINTR]

    def interrupted(*args):
        if errors:
            ctypes.set_errno(errors.pop())
            return -1
        return whole(*args)

    monkeypatch.setattr(local, "_preadv", interrupted)
    file = LocalFile(tmp_path / "file")
    assert file.scatter(0, np.array([[memory.ctypes.data, 7]], np.uintp))
    file.close()
    assert memory.tobytes() == b"content"
