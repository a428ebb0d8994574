"""Reads past the page cache: the same bytes as usual reads, from the cache if they are there, whatever is refused."""

import errno
import fcntl
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbax_safetensors as ost
from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage import direct
from orbax_safetensors.storage.direct import DirectFile, DirectStore, reading
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.storage.memory import PAGE_BYTES, allocate
from orbax_safetensors.storage.schemes import store_of
from tests.support.disks import page_cache, skip_if_refused
from tests.support.files import nothing_left

MIB = 2**20
CONTENT = np.random.default_rng(0).integers(0, 256, 5 * MIB + 1234, np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("direct") / "data"
    CONTENT.tofile(path)
    skip_if_refused(path)
    return str(path)


@pytest.fixture
def file(path):
    file = DirectFile(path)
    yield file
    file.close()


@pytest.fixture
def cold(monkeypatch):
    page_cache(monkeypatch, full=False)


@pytest.fixture
def calls(file, monkeypatch):
    """The direct reads of `file`: offset, bytes and the address of each."""
    made, real = [], os.preadv

    def preadv(descriptor, buffers, offset, *flags):
        if is_direct(descriptor):
            made.append((offset, buffers[0].nbytes, address(buffers[0])))
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(direct.os, "preadv", preadv)
    return made


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def address(memory):
    return np.frombuffer(memory, np.uint8).ctypes.data


def read(file, offset, *buffers):
    file.read([(offset, [buffer.data for buffer in buffers])])


def of(offset, *sizes):
    """Buffers of `sizes`, the first of which is as far from the beginning of a page as `offset`."""
    memory = allocate([sum(sizes) + PAGE_BYTES])[0][offset % PAGE_BYTES :]
    ends = np.cumsum(sizes)
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def check(offset, buffers):
    for buffer in buffers:
        assert np.array_equal(buffer, CONTENT[offset : offset + buffer.nbytes])
        offset += buffer.nbytes


@settings(max_examples=60)
@given(st.data())
def test_any_range_into_any_memory(path, data):
    offset = data.draw(st.integers(0, CONTENT.nbytes - 1) | st.sampled_from([0, PAGE_BYTES, 3 * PAGE_BYTES]))
    left = CONTENT.nbytes - offset
    size = st.sampled_from([0, 1, 100, PAGE_BYTES, 2**16, 2**16 + 8, MIB, 3 * MIB]) | st.integers(0, 4 * MIB)
    buffers = []
    for wanted in data.draw(st.lists(size, max_size=5)):
        nbytes = min(wanted, left)
        left -= nbytes
        shift = data.draw(st.sampled_from([0, 64, 8, 1, offset % PAGE_BYTES]))
        buffers.append(allocate([nbytes + PAGE_BYTES])[0][shift : shift + nbytes])
    file = DirectFile(path)
    if data.draw(st.booleans()):  # as many pages as the kernel lets go
        os.posix_fadvise(file._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        read(file, offset, *buffers)
    finally:
        file.close()
    check(offset, buffers)


@pytest.mark.usefixtures("cold")
def test_whole_blocks_go_straight_to_memory_that_agrees_with_the_file(file, calls):
    for offset in (0, 8 * 64, PAGE_BYTES, 12345 * 64):
        calls.clear()
        (buffer,) = of(offset, MIB)
        read(file, offset, buffer)
        check(offset, [buffer])
        first = -offset % PAGE_BYTES
        blocks = (MIB - first) // PAGE_BYTES * PAGE_BYTES
        assert calls == [(offset + first, blocks, address(buffer) + first)]


@pytest.mark.usefixtures("cold")
def test_buffers_that_follow_one_another_are_read_at_once(file, calls):
    buffers = of(PAGE_BYTES, 100, 64, 2 * MIB, 3, MIB)
    read(file, PAGE_BYTES, *buffers)
    check(PAGE_BYTES, buffers)
    assert [call[:2] for call in calls] == [(PAGE_BYTES, 3 * MIB)]


@pytest.mark.usefixtures("cold")
def test_other_memory_is_filled_from_a_buffer(file, calls):
    buffers = [allocate([size])[0] for size in (100, 3 * MIB, 5)]
    read(file, 8, *buffers)
    check(8, buffers)
    assert [call[:2] for call in calls] == [(0, 2 * MIB), (2 * MIB, MIB + PAGE_BYTES)]
    assert len({call[2] for call in calls}) == 1


def test_what_is_in_the_page_cache_is_read_from_there(file, calls, monkeypatch):
    page_cache(monkeypatch, full=True)
    (buffer,) = of(MIB, 2 * MIB)
    read(file, MIB, buffer)
    check(MIB, [buffer])
    assert calls == []


@pytest.mark.usefixtures("cold")
def test_short_reads_go_through_the_page_cache(file, calls):
    (buffer,) = of(0, 2**16 - 1)
    read(file, 0, buffer)
    check(0, [buffer])
    assert calls == []


def test_a_file_system_that_cannot_tell_what_is_cached_is_read_directly(file, calls, monkeypatch):
    real = direct.os.preadv

    def untold(descriptor, buffers, offset, *flags):
        if flags:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(direct.os, "preadv", untold)
    (buffer,) = of(0, MIB)
    read(file, 0, buffer)
    check(0, [buffer])
    assert len(calls) == 1


def test_a_file_system_that_refuses_direct_reads_is_read_as_usual(path, monkeypatch):
    real = os.open

    def refuse(name, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags, *rest)

    monkeypatch.setattr(direct.os, "open", refuse)
    file = DirectFile(path)
    (buffer,) = of(0, MIB)
    read(file, 0, buffer)
    file.close()
    check(0, [buffer])


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("aligned", [True, False])
def test_direct_reads_that_end_early_or_fail_are_continued_as_usual(file, monkeypatch, aligned):
    real, left = os.preadv, iter([PAGE_BYTES, 3 * PAGE_BYTES + 17])

    def short(descriptor, buffers, offset, *flags):
        if not is_direct(descriptor):
            return real(descriptor, buffers, offset, *flags)
        count = next(left, None)
        if count is None:
            raise OSError(errno.EIO, "Input/output error")
        return min(count, real(descriptor, buffers, offset))

    monkeypatch.setattr(direct.os, "preadv", short)
    (buffer,) = of(0 if aligned else 8, 3 * MIB)
    read(file, 0, buffer)
    check(0, [buffer])


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("shift", [0, 8])
def test_the_end_of_the_file_is_an_error(file, path, shift):
    offset = 4 * MIB
    (buffer,) = of(offset + shift, 2 * MIB)
    with pytest.raises(
        StorageError, match=rf"{path}: expected \d+ more bytes at offset {CONTENT.nbytes}, found the file's end"
    ):
        read(file, offset, buffer)


def test_a_disk_that_fails_is_reported_by_the_usual_read(file, path, monkeypatch):
    def fail(descriptor, buffers, offset, *flags):
        raise OSError(errno.EAGAIN if flags else errno.EIO, "Input/output error")

    monkeypatch.setattr(direct.os, "preadv", fail)
    (buffer,) = of(0, MIB)
    with pytest.raises(StorageError, match=rf"{path}: reading {MIB} bytes at offset 0 failed: Input/output error"):
        read(file, 0, buffer)


@pytest.mark.usefixtures("cold")
def test_direct_reads_are_of_the_file_that_was_opened(file, path, tmp_path, calls):
    name = tmp_path / "renamed"
    os.rename(path, name)
    try:
        (tmp_path / "other").write_bytes(bytes(CONTENT.nbytes))
        os.link(tmp_path / "other", path)
        (buffer,) = of(0, MIB)
        read(file, 0, buffer)
    finally:
        os.replace(name, path)
    check(0, [buffer])
    assert calls


@pytest.mark.usefixtures("cold")
def test_a_file_has_one_descriptor_between_reads(path):
    with nothing_left(path):
        file = DirectFile(path)
        read(file, 0, *of(0, MIB))
        descriptors = os.listdir("/proc/self/fd")  # other threads may open and close theirs
        assert [os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in descriptors].count(path) == 1
        file.close()


def test_a_directory_is_refused_and_closed(tmp_path):
    with nothing_left(tmp_path), pytest.raises(StorageError, match="is not a regular file"):
        DirectFile(str(tmp_path))


def test_runs_of_memory_are_filled_from_the_page_cache_only(file, monkeypatch):
    (buffer,) = of(0, MIB)
    runs = np.array([[address(buffer), 1000], [address(buffer) + 2000, MIB - 3000]], np.uintp)
    page_cache(monkeypatch, full=False)
    assert not file.scatter(7, runs)
    assert not buffer.any()
    page_cache(monkeypatch, full=True)
    assert file.scatter(7, runs)
    check(7, [buffer[:1000], buffer[2000 : MIB - 1000]])


@pytest.mark.usefixtures("cold")
def test_threads_have_their_buffers(file):
    buffers = [allocate([MIB])[0] for _ in range(4)]
    threads = [
        threading.Thread(target=read, args=(file, 8 + number * MIB, buffer)) for number, buffer in enumerate(buffers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(8, buffers)


def test_the_rule_for_the_page_cache(monkeypatch):
    monkeypatch.setattr(direct.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    local = LocalStore()
    assert reading(local, "auto", 1024 * 1000) is local
    assert isinstance(reading(local, "auto", 1024 * 1000 + 1), DirectStore)
    assert reading(local, False, 10**15) is local
    assert isinstance(reading(local, True, 1), DirectStore)
    web, _ = store_of("http://localhost/file.safetensors", None)
    assert reading(web, True, 10**15) is web


def test_options_that_are_wrong():
    for value in ["yes", None, 3]:
        with pytest.raises(ost.SafetensorsError, match=f"direct is {value!r}, must be True, False or 'auto'"):
            ost.SafetensorsOptions(direct=value)
