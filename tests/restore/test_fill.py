"""Restores and conversions past the page cache: the bits of the reference, read straight into arrays."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.storage import direct
from tests.support.disks import page_cache, skip_if_refused
from tests.support.files import write
from tests.support.saves import assert_same_bits

SHAPES = {"a": (64, 4096), "b": (8, 4), "c": (512, 1024), "e": (1000, 33), "z": ()}


@pytest.fixture(params=[64, 8], ids=["aligned", "as others write"])
def path(request, tmp_path):
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    path = tmp_path / "model.safetensors"
    if request.param == 64:
        ost.save(tmp_path / "saved", tensors)
        path = tmp_path / "saved" / "model.safetensors"
    else:
        write(path, tensors)
    skip_if_refused(path)
    return path


@pytest.fixture
def direct_bytes(monkeypatch):
    """How many bytes were read directly, and how many of them into a thread's buffer."""
    found = {"all": 0, "copied": 0}
    blocks, through = direct.DirectFile._read_blocks, direct.DirectFile._read_through_buffer

    def read_blocks(self, offset, memory):
        count = blocks(self, offset, memory)
        found["all"] += count
        return count

    def read_through_buffer(self, offset, parts):
        before = found["all"]
        through(self, offset, parts)
        found["copied"] += found["all"] - before

    monkeypatch.setattr(direct.DirectFile, "_read_blocks", read_blocks)
    monkeypatch.setattr(direct.DirectFile, "_read_through_buffer", read_through_buffer)
    return found


def sharded(path, spec):
    mesh = jax.sharding.Mesh(jax.devices(), "x")

    def sharding_of(name, shape):
        return NamedSharding(mesh, spec if len(shape) == 2 and shape[0] % 8 == shape[1] % 8 == 0 else PartitionSpec())

    return ost.load(path, sharding_of, options=ost.SafetensorsOptions(direct=True, threads=1))


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("x"), PartitionSpec(None, "x")], ids=str)
@pytest.mark.both_devices
def test_cold_files_are_read_directly_in_every_layout(path, spec, direct_bytes, monkeypatch):
    page_cache(monkeypatch, full=False)
    tree = sharded(path, spec)
    for name, expected in load_file(path).items():
        assert_same_bits(tree[name], expected)
    assert direct_bytes["all"] > 0


@pytest.mark.parametrize("path", [64], indirect=True, ids=["aligned"])
def test_aligned_files_are_read_straight_into_arrays(path, direct_bytes, monkeypatch):
    page_cache(monkeypatch, full=False)
    sharded(path, PartitionSpec("x"))
    assert direct_bytes["all"] > 0
    assert direct_bytes["copied"] < 4096  # the number at the end, which lies elsewhere in memory


def test_warm_files_are_read_from_the_page_cache(path, direct_bytes, monkeypatch):
    page_cache(monkeypatch, full=True)
    expected = load_file(path)
    tree = sharded(path, PartitionSpec("x"))
    assert all(np.array_equal(tree[name], array) for name, array in expected.items())
    assert direct_bytes["all"] == 0


@pytest.mark.parametrize("path", [64], indirect=True, ids=["aligned"])
@pytest.mark.parametrize(("pages", "is_direct"), [(1000, True), (100_000, False)])
def test_auto_compares_the_shards_of_the_process_with_the_memory(path, direct_bytes, monkeypatch, pages, is_direct):
    monkeypatch.setattr(direct.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}.__getitem__)
    page_cache(monkeypatch, full=False)
    ost.load(path)
    assert (direct_bytes["all"] > 0) is is_direct


def test_conversions_read_large_checkpoints_directly(path, tmp_path, direct_bytes, monkeypatch):
    monkeypatch.setattr(direct.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    expected = load_file(path)
    page_cache(monkeypatch, full=False)
    ost.convert(path, tmp_path / "out", to="orbax", compression=False)
    assert direct_bytes["all"] > 0
    again = ocp.StandardCheckpointer().restore(tmp_path / "out" / "0" / "items")
    for name, array in expected.items():
        assert_same_bits(again[name], array)
