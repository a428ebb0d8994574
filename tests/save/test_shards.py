"""The shards of a save: which of them are copied, and what an asynchronous save keeps instead."""

import gc
import threading
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.save.prepare import prepare_save
from orbax_safetensors.save.shards import Shards
from orbax_safetensors.storage.memory import allocate
from tests.support.files import random_bits
from tests.support.saves import RNG


def test_copies_of_device_memory_are_held_to_the_budget(monkeypatch):
    """As on a GPU; here nothing has to be copied."""
    leaves = {f"w{number}": jax.numpy.full((1024,), float(number)) for number in range(10)}
    options = ost.SafetensorsOptions(in_flight_bytes=3 * 4096 + 1)
    plan = prepare_save(leaves, None, directory="x", metadata=None, max_file_bytes=10**9, options=options)
    assert [len(batch) for batch in Shards(plan).batches(options.in_flight_bytes)] == [10]
    monkeypatch.setattr("orbax_safetensors.devices.arrays.is_cpu", lambda device: False)
    batches = list(Shards(plan).batches(options.in_flight_bytes))
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]
    values = [memory.view(np.float32)[0] for batch in batches for _, memory in batch]
    assert values == list(range(10))
    too_big = Shards(plan).batches(1)
    assert [len(batch) for batch in too_big] == [1] * 10


def kept(leaf):
    """The shards of a leaf in an asynchronous save."""
    options = ost.SafetensorsOptions()
    plan = prepare_save({"w": leaf}, None, directory="x", metadata=None, max_file_bytes=10**9, options=options)
    (batch,) = Shards.kept(plan).batches(1)
    return [memory.view(block.dtype).reshape(block.shape) for block, memory in batch]


def test_a_numpy_leaf_is_copied():
    host = np.ones(100)
    (shard,) = kept(host)
    host[...] = 2
    assert (shard == 1).all()


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "x"), P()], ids=str)
@pytest.mark.parametrize("how", ["donated", "deleted"])
def test_shards_on_cpu_devices_are_not_copied_and_outlive_their_array(spec, how):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    sharding = NamedSharding(mesh, spec)
    host = random_bits(RNG, (512, 512), np.dtype("f4"))
    array = jax.jit(lambda x: x, out_shardings=sharding)(host)
    before = {shard.data.unsafe_buffer_pointer(): np.array(shard.data).tobytes() for shard in array.addressable_shards}
    held = kept(array)
    assert {shard.ctypes.data for shard in held} <= before.keys()
    zeros = jax.jit(lambda x: x * 0, donate_argnums=0, out_shardings=sharding)
    if how == "deleted":
        array.delete()
        array = jax.device_put(host, sharding)
    for _ in range(3):  # memory that was free would be reused
        array = zeros(array)
    jax.block_until_ready(array)
    assert [shard.tobytes() for shard in held] == [before[shard.ctypes.data] for shard in held]


def test_shards_keep_the_numpy_memory_that_an_array_shares():
    (memory,) = allocate([4096])
    freed = threading.Event()
    weakref.finalize(memory.base, freed.set)
    memory[...] = 7
    array = jax.device_put(memory)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data
    held = kept(array)
    del memory
    array.delete()
    gc.collect(0)  # JAX frees memory of NumPy when the collector runs, whatever it collects
    assert not freed.is_set()
    assert (held[0] == 7).all()
    held.clear()
    gc.collect(0)
    assert freed.is_set()
