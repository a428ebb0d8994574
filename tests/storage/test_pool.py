"""Memory that is used again: buffers of a pool against a model of what is taken."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.storage import memory
from orbax_safetensors.storage.memory import ALIGNMENT, PAGE_BYTES, Pool, arena_of

SIZES = st.lists(st.integers(0, 70_000), min_size=1, max_size=4)


@given(st.lists(SIZES | st.integers(0, 8), max_size=30))
def test_buffers_that_are_taken_do_not_overlap(steps):
    """A list takes buffers of its sizes, a number gives the buffers back that were taken at that turn."""
    pool = Pool(arena_of(2**18))
    taken = []
    for number, step in enumerate(steps):
        if isinstance(step, int):
            if taken:
                buffers, mark = taken.pop(step % len(taken))
                assert all((buffer == mark).all() for buffer in buffers.buffers)
                pool.give_back(buffers)
        elif (buffers := pool.take(step)) is not None:
            assert [buffer.nbytes for buffer in buffers.buffers] == step
            assert all(buffer.ctypes.data % ALIGNMENT == 0 for buffer in buffers.buffers if buffer.nbytes)
            for buffer in buffers.buffers:
                buffer[:] = number
            taken.append((buffers, number))
    for buffers, mark in taken:
        assert all((buffer == mark).all() for buffer in buffers.buffers)


def test_the_lowest_memory_is_used_again():
    pool = Pool(arena_of(2**20))
    first, second = pool.take([2**18]), pool.take([2**18])
    pool.give_back(first)
    third = pool.take([2**17])
    assert third.buffers[0].ctypes.data == first.buffers[0].ctypes.data
    fourth = pool.take([2**18])
    assert fourth.buffers[0].ctypes.data == second.buffers[0].ctypes.data + 2**18


def test_a_full_pool_gives_nothing():
    pool = Pool(arena_of(2**20))
    taken = pool.take([2**20])
    assert pool.take([1]) is None
    pool.give_back(taken)
    assert pool.take([1]) is not None


def test_more_than_the_pool_is_fresh_memory_of_an_empty_pool():
    pool = Pool(arena_of(2**16))
    small = pool.take([10])
    assert pool.take([2**17]) is None
    pool.give_back(small)
    large = pool.take([2**17, 5])
    assert [buffer.nbytes for buffer in large.buffers] == [2**17, 5]
    assert pool.take([2**17]) is None
    pool.give_back(large)
    assert pool.take([2**17]) is not None


def test_buffers_lie_in_their_pages_as_direct_reads_need_them():
    pool = Pool(arena_of(2**22))
    pool.take([100])
    taken = pool.take([2**17, 2**17, 100], {0: 64 * 5, 1: 64 * 7})
    assert [buffer.ctypes.data % PAGE_BYTES for buffer in taken.buffers[:2]] == [64 * 5, 64 * 7]


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]], ids=str)
def test_nothing_takes_no_memory(sizes, monkeypatch):
    pool = Pool(arena_of(2**20))
    monkeypatch.setattr(memory, "allocate", None)
    taken = [pool.take(sizes) for _ in range(3)]
    assert all(np.sum([buffer.nbytes for buffer in each.buffers]) == 0 for each in taken)
