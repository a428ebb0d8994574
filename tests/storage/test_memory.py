"""Memory to read into: aligned, zeroed, apart, given back."""

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.storage import memory
from orbax_safetensors.storage.memory import allocate


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_buffers_are_aligned_zeroed_and_apart(sizes):
    buffers = allocate(sizes)
    assert [buffer.nbytes for buffer in buffers] == sizes
    for number, buffer in enumerate(buffers):
        assert buffer.dtype == np.uint8
        assert buffer.ctypes.data % 64 == 0
        assert not buffer.any()
        buffer[:] = number + 1
    for number, buffer in enumerate(buffers):
        assert (buffer == number + 1).all()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 5, 2**16 - 1, 2**16, 70_001]),
            st.none() | st.integers(0, 2**40) | st.integers(0, 2**30).map((64).__mul__),
        )
    ),
    st.sampled_from([2**17, 2**27]),
)
def test_buffers_begin_in_a_page_where_the_bytes_of_the_file_do(buffers, arena):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "ARENA_BYTES", arena)
        offsets = {number: offset for number, (_, offset) in enumerate(buffers) if offset is not None}
        made = allocate([size for size, _ in buffers], offsets)
    assert [buffer.nbytes for buffer in made] == [size for size, _ in buffers]
    for number, buffer in enumerate(made):
        assert buffer.ctypes.data % 64 == 0
        offset = offsets.get(number, 1)
        if buffer.nbytes >= memory.DIRECT_BYTES and offset % 64 == 0:
            assert (buffer.ctypes.data - offset) % memory.PAGE_BYTES == 0
        buffer[:] = number % 256
    assert all((buffer == number % 256).all() for number, buffer in enumerate(made))


def test_buffers_of_a_stretch_of_a_file_follow_one_another():
    first, second, third = allocate([70_400, 64, 2**16], {0: 640, 1: 71_040, 2: 71_104})
    assert (first.ctypes.data % memory.PAGE_BYTES, second.ctypes.data - first.ctypes.data) == (640, 70_400)
    assert third.ctypes.data - second.ctypes.data == 64


def test_a_long_list_takes_several_arenas(monkeypatch):
    monkeypatch.setattr(memory, "ARENA_BYTES", 4096)
    buffers = allocate([1000, 10_000, 3000, 1000, 500])
    bases = [id(buffer.base) for buffer in buffers]
    assert len(set(bases)) == 4
    assert bases[2] == bases[3]


def test_an_arena_goes_with_its_last_buffer():
    first, second = allocate([100, 100])
    gone = weakref.ref(first.base)
    del first
    assert gone() is not None
    del second
    assert gone() is None


def test_memory_is_private_so_that_it_can_have_huge_pages():
    (buffer,) = allocate([5 * 2**20])
    address = buffer.ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            ends, permissions = line.split()[:2]
            first, last = (int(end, 16) for end in ends.split("-"))
            if first <= address < last:
                assert permissions == "rw-p"
                return
    raise AssertionError("the buffer is in no mapping")
