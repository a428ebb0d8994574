"""Byte ranges against sets of bytes."""

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from orbax_safetensors.cli.byte_map import amounts, owners, requested, union
from orbax_safetensors.geometry.view import View
from orbax_safetensors.transfer.plan import Block, Location, transfer_plan

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: tuple(sorted(pair))), max_size=8)


def bytes_of(ranges):
    return {at for begin, end in ranges for at in range(begin, end)}


@given(RANGES)
def test_union(ranges):
    found = union(ranges).tolist()
    assert bytes_of(found) == bytes_of(ranges)
    flat = [at for pair in found for at in pair]
    assert flat == sorted(set(flat))  # in order, none touches another


@given(RANGES, RANGES, st.integers(0, 40), st.integers(0, 40))
def test_owners(first, second, begin, end):
    regions = owners([union(first), union(second)], 40)
    expected = [(at in bytes_of(first)) + 2 * (at in bytes_of(second)) for at in range(40)]
    assert [owner for start, stop, owner in regions for _ in range(start, stop)] == expected
    assert all(a[2] != b[2] for a, b in itertools.pairwise(regions))
    found = amounts(regions, begin, end)
    assert found == {owner: expected[begin:end].count(owner) for owner in set(expected[begin:end])}


def test_what_a_plan_asks_for():
    view = View.tensor("t", (64, 100), np.dtype(np.uint8))
    rows = Block(view, ((0, 8), (0, 100)), (8, 100), view.dtype)
    columns = Block(view, ((32, 64), (90, 100)), (32, 10), view.dtype)
    plan = transfer_plan([rows, columns], lambda _: Location(3, 1000, view.dtype), max_gap_bytes=0)
    asked = requested(plan)
    assert list(asked) == [3]
    assert sum(end - begin for begin, end in asked[3]) == plan.moved_bytes
    expected = [(1000, 1800), *((1000 + row * 100 + 90, 1000 + row * 100 + 100) for row in range(32, 64))]
    assert bytes_of(asked[3]) == bytes_of(expected)
