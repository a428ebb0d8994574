"""The accelerator of `benchmarks/emulation.py`: what arrives is what was sent, and a buffer is held until then."""

import gc
import hashlib
import importlib.util
import math
import sys
import threading
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.devices.arrays import on_host
from tests.support import hang
from tests.support.roots import ROOT


@pytest.fixture
def emulation(monkeypatch):
    spec = importlib.util.spec_from_file_location("emulation", ROOT / "benchmarks" / "emulation.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "emulation", module)
    spec.loader.exec_module(module)
    return module


BYTES = np.random.default_rng(0).integers(0, 256, 2 * 300 * 280, np.uint8)
WORDS = BYTES.view(ml_dtypes.bfloat16).reshape(300, 280)
LAYOUTS = {
    "dense": WORDS,
    "rows": WORDS[:, 8:72],
    "odd rows": WORDS[1:, 3:70],
    "one column": WORDS[:, 7:8],
    "every third column": WORDS[:, ::3],
    "backwards": WORDS[::-1, ::-1],
    "transposed": WORDS.T,
    "three dimensions, transposed": WORDS.T.reshape(280, 10, 30),
    "bytes, transposed": BYTES[:1200].reshape(30, 40).T,
    "broadcast": np.broadcast_to(WORDS[0], (3, 280)),
    "misaligned": BYTES[1:4001].view(np.float32),
    "a number": np.array(1.5, np.float32),
    "nothing": WORDS[:0],
    "no columns": WORDS[:, :0],
}


@pytest.mark.parametrize("ring_bytes", [2**20, 200])
def test_what_lies_in_the_ring_is_what_was_sent(emulation, monkeypatch, ring_bytes):
    monkeypatch.setattr(emulation, "RING_BYTES", ring_bytes)
    for layout, values in LAYOUTS.items():
        with emulation.accelerator(digests=True):
            array = jax.device_put(values, jax.devices()[0])
            jax.block_until_ready(array)
        (shard,) = array.addressable_shards
        row_major = hashlib.blake2b(values.tobytes(), digest_size=16).digest()
        assert shard.transfer.digest == emulation.digest_of(values) == row_major, layout


def test_other_bits_have_another_digest(emulation):
    changed = WORDS.copy()
    changed.view(np.uint16)[299, 279] ^= 1
    assert emulation.digest_of(changed) != emulation.digest_of(WORDS)


def test_a_buffer_is_held_until_its_transfer_is_made_and_not_longer(emulation, monkeypatch, young):
    begin, begun = threading.Event(), threading.Event()
    lay_out = emulation._lay_out

    def wait(*args):
        begun.set()
        assert begin.wait(hang.SECONDS)
        lay_out(*args)

    monkeypatch.setattr(emulation, "_lay_out", wait)
    with emulation.accelerator():
        values = WORDS.copy()
        source = weakref.ref(values)
        array = jax.device_put(values, SingleDeviceSharding(jax.devices()[0]))
        del values
        assert begun.wait(hang.SECONDS)
        gc.collect(0)
        assert source() is not None
        assert not array.is_ready()
        begin.set()
        jax.block_until_ready({"array": array})
        assert array.is_ready()
        gc.collect(1)  # with what was left before
        assert source() is None


def test_a_transfer_that_fails_raises_where_it_is_waited_for(emulation, monkeypatch):
    def fail(*args):
        raise OSError("the bus")

    monkeypatch.setattr(emulation, "_lay_out", fail)
    with emulation.accelerator():
        array = jax.device_put(WORDS, jax.devices()[0])
        with pytest.raises(OSError, match="the bus"):
            array.block_until_ready()


def test_an_array_of_single_device_arrays_has_their_transfers(emulation):
    sharding = NamedSharding(Mesh(jax.devices()[:4], "x"), PartitionSpec("x"))
    with emulation.accelerator(digests=True):
        indices = sharding.addressable_devices_indices_map(WORDS.shape)
        parts = [jax.device_put(WORDS[index], device) for device, index in indices.items()]
        array = jax.make_array_from_single_device_arrays(WORDS.shape, sharding, parts)
    assert array.is_ready()
    assert [shard.index for shard in array.addressable_shards] == list(indices.values())
    for shard in array.addressable_shards:
        assert shard.data.shape == (75, 280)
        assert shard.transfer.digest == emulation.digest_of(WORDS[shard.index])


@pytest.mark.parametrize("spec", [("x", None), (None, "x"), ("x", "y"), ()])
def test_the_package_restores_onto_it(emulation, tmp_path, spec):
    save_file({"a": np.ascontiguousarray(WORDS), "b": np.ascontiguousarray(WORDS[:8, :16])}, tmp_path / "a.safetensors")
    shape = (4, 2) if "y" in spec else (4,)
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    sharding = NamedSharding(Mesh(devices, ("x", "y")[: len(shape)]), PartitionSpec(*spec))
    wanted = {
        "a": jax.ShapeDtypeStruct(WORDS.shape, WORDS.dtype, sharding=sharding),
        "b": jax.ShapeDtypeStruct((8, 16), WORDS.dtype, sharding=sharding),
    }
    with emulation.accelerator(digests=True):
        assert not on_host(sharding)
        restored = ost.load(tmp_path, wanted)
        jax.block_until_ready(restored)
    assert on_host(sharding)
    for name, expected in (("a", WORDS), ("b", WORDS[:8, :16])):
        shards = restored[name].addressable_shards
        assert {shard.device for shard in shards} == sharding.addressable_devices
        for shard in shards:
            assert shard.transfer.digest == emulation.digest_of(expected[shard.index])
