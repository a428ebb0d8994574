"""CRC-32 of parts: whatever the parts and their order, they add up to what zlib makes of all bytes at once."""

import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.geometry import crc


@given(st.binary(max_size=3000), st.lists(st.integers(0, 3000), max_size=12))
def test_consecutive_parts(data, cuts):
    cuts = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    ends = cuts[1:] or [len(data)]
    parts = [crc.remainder(data[begin:end]) for begin, end in pairwise(cuts)] or [0]
    assert crc.crc_of(crc.combined(parts, ends), len(data)) == zlib.crc32(data)


@given(st.data())
def test_rows_of_several_processes(data):
    rows, widths = data.draw(st.integers(1, 40)), data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))
    whole = np.frombuffer(data.draw(st.randoms(use_true_random=False)).randbytes(rows * sum(widths)), np.uint8)
    table = whole.reshape(rows, -1)
    total = 0
    for begin, end in pairwise(np.cumsum([0, *widths]).tolist()):
        ends = [row * table.shape[1] + end for row in range(rows)]
        part = crc.combined([crc.remainder(table[row, begin:end].tobytes()) for row in range(rows)], ends)
        total ^= crc.moved(part, whole.size - ends[-1])
    assert crc.crc_of(total, whole.size) == zlib.crc32(whole)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.binary(max_size=40)), min_size=1, max_size=30))
def test_parts_at_any_distance(gaps):
    ends, at = [], 0
    for gap, part in gaps:
        at += gap + len(part)
        ends.append(at)
    expected = 0
    for (_, part), end in zip(gaps, ends, strict=True):
        expected ^= crc.moved(crc.remainder(part), at - end)
    assert crc.combined([crc.remainder(part) for _, part in gaps], ends) == expected


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, 100_003])
def test_zeros(nbytes):
    assert crc.crc_of(0, nbytes) == zlib.crc32(bytes(nbytes))
    assert crc.crc_of(crc.moved(crc.remainder(b"abc"), nbytes), nbytes + 3) == zlib.crc32(b"abc" + bytes(nbytes))


@pytest.mark.parametrize("data", [b"", b"123456789", bytes(range(256)) * 1000])
def test_the_library_agrees_with_zlib(data):
    assert crc.crc32(data) == zlib.crc32(data)
    assert crc.crc32(memoryview(bytearray(data)), 17) == zlib.crc32(data, 17)
