"""Files mapped under a read lease: other programs wait, and nothing ends this process."""

import errno
import mmap
import os
import threading
from pathlib import Path

import pytest

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage import leased_mapping
from orbax_safetensors.storage.direct import DirectFile
from orbax_safetensors.storage.local import LocalFile

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return str(path)


@pytest.fixture
def leased(path):
    file = LocalFile(path)
    mapped = file.lease()
    if mapped is None:
        pytest.skip("the file system of temporary files has no leases")
    yield mapped
    mapped.close()
    file.close()


def test_memory_is_the_file(leased):
    leased.populate(100, 9000)
    assert leased.memory.tobytes() == CONTENT
    assert not leased.memory.flags.writeable


def test_who_truncates_the_file_waits_until_the_lease_is_given_up(path, leased):
    assert not leased.is_wanted
    other = threading.Thread(target=os.truncate, args=(path, 10))
    other.start()
    while not leased.is_wanted:
        assert other.is_alive()
    leased.populate(0, len(CONTENT))
    assert leased.memory.tobytes() == CONTENT
    assert os.path.getsize(path) == len(CONTENT)
    leased.close()
    other.join()
    assert os.path.getsize(path) == 10


def test_a_file_that_is_open_for_writing_is_not_leased(path):
    file = LocalFile(path)
    with open(path, "r+b"):
        assert file.lease() is None
    file.close()


def test_an_empty_file_is_not_leased(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    file = LocalFile(str(tmp_path / "empty"))
    assert file.lease() is None
    file.close()


@pytest.mark.parametrize("magic", [0x6969, 0x65735546, 0x01021997, 0], ids=["NFS", "FUSE", "9p", "unknown"])
def test_other_file_systems_are_read(path, monkeypatch, magic):
    monkeypatch.setattr(leased_mapping, "_file_system", lambda descriptor: magic)
    file = LocalFile(path)
    assert file.lease() is None
    file.close()


def test_the_file_system_is_the_one_that_linux_says(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    found = leased_mapping._LOCAL_FILE_SYSTEMS.get(leased_mapping._file_system(descriptor))
    os.close(descriptor)
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    (*_, (_, _, kind, *_)) = sorted(
        (mount for mount in mounts if str(tmp_path).startswith(mount[1])), key=lambda mount: len(mount[1])
    )
    assert found is None or found.removesuffix("fs") == kind.removesuffix("fs")


def test_a_kernel_that_cannot_populate_makes_no_mapping(path, monkeypatch):
    monkeypatch.setattr(leased_mapping, "_MADV_POPULATE_READ", 12345)
    file = LocalFile(path)
    assert file.lease() is None
    file.close()


def test_files_for_direct_reads_serve_what_is_in_the_page_cache(path, monkeypatch):
    file = DirectFile(path)
    if (mapped := file.lease()) is None:
        pytest.skip("the file system of temporary files has no leases")
    assert mapped.serves(0, len(CONTENT))
    assert not mapped.serves(0, len(CONTENT) + 1)
    monkeypatch.setattr(mapped, "_seems_cached", lambda begin, end: begin >= 4096)
    assert mapped.serves(4096, 8192)
    assert not mapped.serves(0, 8192)
    mapped.close()
    file.close()


def test_a_page_that_the_disk_does_not_give_is_the_error_of_a_read(path, leased, monkeypatch):
    def refused(begin, end):
        raise OSError(errno.EFAULT, "Bad address")

    def broken(descriptor, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(leased, "_is_cached", lambda begin, end: False)
    monkeypatch.setattr(leased, "_populate", refused)
    with pytest.raises(StorageError, match="file: mapping 4096 bytes at offset 8192 failed: Bad address"):
        leased.populate(8192, 12288)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match="file: reading 4096 bytes at offset 8192 failed: Input/output error"):
        leased.populate(8192, 12288)


def test_a_page_that_comes_at_the_second_attempt_is_no_error(leased, monkeypatch):
    attempts = []
    populate = leased._populate

    def once_refused(begin, end):
        attempts.append(begin)
        if len(attempts) == 1:
            raise OSError(errno.EFAULT, "Bad address")
        populate(begin, end)

    monkeypatch.setattr(leased, "_is_cached", lambda begin, end: False)
    monkeypatch.setattr(leased, "_populate", once_refused)
    leased.populate(0, 100)
    assert len(attempts) == 2


def test_cached_pages_are_not_brought_in(leased, monkeypatch):
    monkeypatch.setattr(leased, "_populate", None)
    assert leased._is_cached(0, len(CONTENT))
    leased.populate(4000, 5000)


def test_pages_that_only_seem_to_be_cached_are_brought_in(leased, monkeypatch):
    populated = []
    monkeypatch.setattr(leased, "_is_cached", lambda begin, end: False)
    monkeypatch.setattr(leased, "_populate", lambda begin, end: populated.append((begin, end)))
    assert leased._seems_cached(0, len(CONTENT))
    leased.populate(4000, 5000)
    assert populated == [(4000, 5000)]


def test_touching_a_page_that_is_gone_ends_no_process(path):
    file = LocalFile(path)
    if (mapped := file.lease()) is None:
        pytest.skip("the file system of temporary files has no leases")
    mapped.close()
    os.truncate(path, 0)
    mapped._touch(0, len(CONTENT))
    file.close()


def test_released_pages_come_again(leased):
    leased.populate(0, len(CONTENT))
    leased.release(100, len(CONTENT) - 100)
    leased.release(5000, 5001)
    assert leased.memory.tobytes() == CONTENT


def test_threads_populate_at_once(leased):
    threads = [threading.Thread(target=leased.populate, args=(at, at + mmap.PAGESIZE)) for at in range(0, 16384, 4096)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert leased.memory.tobytes() == CONTENT


def test_a_lease_that_nobody_gives_up_ends_with_the_memory(path):
    file = LocalFile(path)
    if (mapped := file.lease()) is None:
        pytest.skip("the file system of temporary files has no leases")
    memory = mapped.memory[10:20]
    del mapped
    file.close()
    other = threading.Thread(target=os.truncate, args=(path, 0))
    other.start()
    other.join(0.1)
    assert other.is_alive()
    assert memory.tobytes() == CONTENT[10:20]
    del memory
    other.join(20)
    assert not other.is_alive()


def test_leases_that_do_not_last_are_not_taken(path, monkeypatch):
    monkeypatch.setattr(leased_mapping, "_break_seconds", lambda: 1)
    file = LocalFile(path)
    assert file.lease() is None
    file.close()


def test_no_descriptor_and_no_lease_is_left(path):
    before = os.listdir("/proc/self/fd")
    file = LocalFile(path)
    if (mapped := file.lease()) is not None:
        mapped.close()
        mapped.close()
    file.close()
    del mapped
    assert os.listdir("/proc/self/fd") == before
    with open(path, "r+b") as writer:  # which would wait for a lease
        writer.truncate(5)


def test_the_kernel_is_asked_for_its_own_pages(leased, monkeypatch):
    class Recording:
        @staticmethod
        def madvise(address, nbytes, advice):
            begins.append(address - leased.memory.ctypes.data)
            return 0

        @staticmethod
        def syscall(*arguments):
            return -1

        @staticmethod
        def mincore(address, nbytes, pages):
            assert (address - leased.memory.ctypes.data) % 2**16 == 0
            return -1

    begins = []
    monkeypatch.setattr(leased_mapping, "_libc", Recording)
    monkeypatch.setattr(mmap, "PAGESIZE", 2**16)  # of many ARM systems
    leased.populate(2**16 + 4096, 2**17)
    leased.release(4096, 2**18)
    assert begins == [2**16, 2**16]
