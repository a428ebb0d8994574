"""The accelerator of `benchmarks/emulation.py`: its arrays have what was sent, in memory of their own."""

import importlib.util
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.devices.arrays import on_host
from tests.support.roots import ROOT


@pytest.fixture
def emulation():
    spec = importlib.util.spec_from_file_location("emulation", ROOT / "benchmarks" / "emulation.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WORDS = np.random.default_rng(0).integers(0, 2**16, (304, 280), np.uint16).view(ml_dtypes.bfloat16)


def aligned(values):
    """A copy that JAX would take as it is: its address is a multiple of 64."""
    memory = np.empty(values.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def put(values):
    return jax.device_put({"a": values}, jax.devices()[0])["a"]


def from_callback(values):
    sharding = NamedSharding(Mesh(jax.devices()[:4], "x"), PartitionSpec("x"))
    return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)


@pytest.mark.parametrize("make", [put, from_callback])
def test_who_writes_to_memory_that_was_sent_changes_no_array(emulation, make):
    values = aligned(WORDS)
    with emulation.accelerator():
        array = make(values)
    values[...] = 0
    np.testing.assert_array_equal(np.asarray(array).view(np.uint16), WORDS.view(np.uint16))


@pytest.mark.parametrize("spec", [("x", None), (None, "x"), ("x", "y"), ()])
def test_the_package_restores_onto_it(emulation, tmp_path, spec):
    stored = {"a": WORDS, "b": np.ascontiguousarray(WORDS[:8, :16])}
    save_file(stored, tmp_path / "a.safetensors")
    shape = (4, 2) if "y" in spec else (4,)
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    sharding = NamedSharding(Mesh(devices, ("x", "y")[: len(shape)]), PartitionSpec(*spec))
    with emulation.accelerator():
        assert not on_host(sharding)
        restored = ost.load(tmp_path, sharding)
    assert on_host(sharding)
    assert restored.keys() == stored.keys()
    for name, expected in stored.items():
        assert restored[name].sharding == sharding
        np.testing.assert_array_equal(np.asarray(restored[name]).view(np.uint16), expected.view(np.uint16))
