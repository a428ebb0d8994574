"""`compare` and `differences` against NumPy on whole arrays, for tiles of any size."""

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from safetensors.numpy import save_file

from orbax_safetensors.streaming import comparison
from orbax_safetensors.streaming.comparison import compare, differences
from orbax_safetensors.streaming.open_source import open_source
from tests.support.strategies import examples

RNG = np.random.default_rng(0)
BASE = {
    "a": RNG.standard_normal((300, 40)).astype(np.float32),
    "b.c": RNG.integers(-9, 9, (70, 5)).astype(np.int32),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(3, np.int64),
}
MEMORY_BYTES = 2**17  # tiles are shorter than the arrays


def write(directory, tensors, kind):
    if kind == "orbax":
        stored = {name: array for name, array in tensors.items() if array.size}  # Orbax refuses empty arrays
        ocp.PyTreeCheckpointer().save(directory, stored)
    else:
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors")
    return directory


def compared(first, second, **options):
    sources = [open_source(path, MEMORY_BYTES, **options) for path in (first, second)]
    try:
        return compare(*sources, MEMORY_BYTES)
    finally:
        for source in sources:
            source.close()


@pytest.mark.parametrize("kinds", [("files", "files"), ("files", "orbax"), ("orbax", "files"), ("orbax", "orbax")])
def test_every_difference_is_found(tmp_path, kinds):
    changed = {name: array.copy() for name, array in BASE.items()}
    changed["a"][299, 39] += 2
    changed["a"][0, 0] -= 1
    changed["b.c"] = changed["b.c"].reshape(5, 70)
    del changed["scalar"]
    changed["new"] = np.ones(2, np.float32)
    found = compared(write(tmp_path / "1", BASE, kinds[0]), write(tmp_path / "2", changed, kinds[1]))
    assert ("scalar" in found.only[0], "new" in found.only[1], found.same) == (True, True, False)
    by_name = {array.name: array for array in found.different}
    assert by_name.keys() == {"a", "b.c"}
    largest = np.abs(BASE["a"].astype(np.float64) - changed["a"]).max()
    assert (by_name["a"].changed, by_name["a"].elements, by_name["a"].largest) == (2, 12000, largest)
    assert (by_name["b.c"].shapes, by_name["b.c"].changed) == (((70, 5), (5, 70)), None)


@pytest.mark.parametrize("kinds", [("files", "files"), ("files", "orbax"), ("orbax", "files"), ("orbax", "orbax")])
def test_equal_checkpoints(tmp_path, kinds):
    tensors = {name: array for name, array in BASE.items() if array.size}
    found = compared(write(tmp_path / "1", tensors, kinds[0]), write(tmp_path / "2", tensors, kinds[1]))
    assert (found.same, found.equal) == (True, 3)


def test_a_cast_that_keeps_every_value_is_still_a_difference(tmp_path):
    values = {"a": np.arange(100, dtype=np.float32)}
    first = write(tmp_path / "1", values, "files")
    second = write(tmp_path / "2", {"a": values["a"].astype(np.float64)}, "files")
    (array,) = compared(first, second).different
    assert (array.changed, array.largest, array.dtypes) == (0, 0, ("float32", "float64"))


def test_progress_counts_all_bytes(tmp_path):
    path = write(tmp_path / "1", BASE, "files")
    sources = [open_source(path, MEMORY_BYTES) for _ in range(2)]
    reports = []
    compare(*sources, 2**14, lambda *report: reports.append(report))
    total = sum(array.nbytes for array in BASE.values())
    assert reports[0] == (0, total)
    assert reports[-1] == (total, total)
    assert len(reports) > 3
    for source in sources:
        source.close()


DTYPES = ["float32", "float64", "int8", "int64", "uint64", "bool", "complex64"]
DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 50), st.randoms(use_true_random=False))
@examples(150)
def test_differences_are_those_of_numpy(one, two, size, random):
    rng = np.random.default_rng(random.randrange(2**32))
    first = rng.integers(0, 7, size).astype(one)
    second = rng.integers(0, 7, size).astype(two)
    before, comparison._ELEMENTS = comparison._ELEMENTS, 7
    try:
        changed, largest = differences(first, second)
    finally:
        comparison._ELEMENTS = before
    wide = np.abs(first.astype(np.complex128) - second.astype(np.complex128))
    assert (changed, largest) == (int((wide != 0).sum()), wide.max(initial=0))


def test_bits_nans_and_long_integers():
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    assert differences(np.array([0.0, nan]), np.array([-0.0, nan])) == (1, 0)  # a zero's sign is a bit
    assert differences(np.array([nan, 1], "f4"), np.array([nan, 1], "f8")) == (0, 0)
    assert differences(np.array([nan, 1.0]), np.array([2.0, 3.0])) == (2, 2)
    assert differences(np.array([inf, inf]), np.array([-inf, 1.0]))[1] == np.inf
    assert differences(np.array([2**63 - 1]), np.array([2**63 - 2])) == (1, 1)
    assert differences(np.array([-(2**63)]), np.array([2**63 - 1])) == (1, 2**64 - 1)
    assert differences(np.array([2**64 - 1], "u8"), np.array([2**62], "i8")) == (1, 2**64 - 1 - 2**62)
