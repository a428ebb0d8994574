"""`statistics` against NumPy on the whole array."""

import contextlib
import math

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

from orbax_safetensors import TensorMismatchError
from orbax_safetensors.streaming import statistics as module
from orbax_safetensors.streaming.open_source import open_source
from orbax_safetensors.streaming.statistics import statistics
from orbax_safetensors.transfer import progress

RNG = np.random.default_rng(1)
ARRAYS = {
    "plain": RNG.standard_normal((50, 30)).astype(np.float32),
    "short": RNG.standard_normal((9, 70)).astype(ml_dtypes.bfloat16),
    "long": np.array([2**63 - 1, 2**63 - 2, -(2**63)]),
    "flags": RNG.integers(0, 2, 40).astype(bool),
}
ARRAYS["holes"] = ARRAYS["plain"].copy()
ARRAYS["holes"][::3, 1] = np.nan


@pytest.fixture(params=["files", "orbax"])
def path(request, tmp_path):
    if request.param == "orbax":
        ocp.PyTreeCheckpointer().save(tmp_path / "0", ARRAYS)
        return tmp_path / "0"
    save_file(ARRAYS, tmp_path / "a.safetensors")
    return tmp_path


def stats(path, name, memory_bytes=2**13):
    source = open_source(path, memory_bytes, decode=True)
    try:
        return statistics(source, name, memory_bytes)
    finally:
        source.close()


@pytest.mark.parametrize("name", ARRAYS)
def test_of_every_dtype(path, name, monkeypatch):
    monkeypatch.setattr(module, "_PART", 64)
    found, array = stats(path, name), ARRAYS[name]
    values = array.astype(np.float64) if array.dtype.kind in "fV" else array
    assert (found.shape, found.dtype, found.nans) == (array.shape, array.dtype, np.isnan(values).sum())
    assert (found.minimum, found.maximum) == (np.nanmin(values), np.nanmax(values))
    assert found.mean == pytest.approx(np.nanmean(values.astype(np.float64)), rel=1e-12)
    np.testing.assert_array_equal(found.first, values.reshape(-1, values.shape[-1])[0, :8])


def test_nothing_but_nans(tmp_path):
    save_file({"nan": np.full(3, np.nan), "empty": np.zeros((0, 2))}, tmp_path / "a.safetensors")
    found = stats(tmp_path, "nan")
    assert (found.minimum, found.maximum, found.mean, found.nans) == (None, None, None, 3)
    assert all(map(math.isnan, found.first))
    assert stats(tmp_path, "empty")[2:] == (None, None, None, 0, [])


def test_names_and_kinds_that_have_none(tmp_path):
    save_file({"layer.weight": np.zeros(3)}, tmp_path / "a.safetensors")
    with pytest.raises(TensorMismatchError, match=r"has no array 'layer.wait' \(nearest: 'layer.weight'\)"):
        stats(tmp_path, "layer.wait")
    ocp.PyTreeCheckpointer().save(tmp_path / "1", {"c": np.zeros(3, np.complex64)})
    with pytest.raises(TensorMismatchError, match="expected real numbers, found complex64"):
        stats(tmp_path / "1", "c")


def test_its_bytes_are_told(path, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    told, source = [], open_source(path, 2**13, decode=True)
    with contextlib.closing(source):
        statistics(source, "plain", 2**13, lambda *now: told.append(now))
    size = ARRAYS["plain"].nbytes
    assert told == sorted(set(told))
    assert (told[0], told[-1]) == ((0, size), (size, size))
    assert len(told) >= 3
