"""Host memory and arrays of JAX: what is shared, and what is copied."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from orbax_safetensors.devices import arrays
from orbax_safetensors.format.dtypes import DTYPES
from tests.support.files import random_bits

RNG = np.random.default_rng(0)
PINNED = "pinned_host"


@pytest.fixture
def pinned(monkeypatch):
    """The arrays that `jax.device_put` has made in pinned memory; a number as `limit` makes it fail from then on."""
    made, real = SimpleNamespace(arrays=[], tries=0, limit=None), jax.device_put

    def device_put(array, sharding):
        made.tries += 1
        if made.limit is not None and len(made.arrays) >= made.limit:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")
        assert sharding.memory_kind == PINNED
        made.arrays.append(real(array, sharding))
        return made.arrays[-1]

    monkeypatch.setattr(arrays.jax, "device_put", device_put)
    return made


def shard_on(device, host, kind=None):
    sharding = SingleDeviceSharding(device, memory_kind=kind)
    return jax.make_array_from_callback(host.shape, sharding, lambda _: host)


def test_devices_with_the_same_box_share_its_memory(mesh):
    shard = np.arange(64, dtype=np.float32).reshape(8, 8)
    aligned = np.zeros(64 + 256, np.uint8)
    start = -aligned.ctypes.data % 64
    memory = aligned[start : start + 256].view(np.float32).reshape(8, 8)
    memory[...] = shard
    array = arrays.assemble(NamedSharding(mesh, P()), (8, 8), np.dtype("f4"), {((0, 8), (0, 8)): memory})
    addresses = {part.data.unsafe_buffer_pointer() for part in array.addressable_shards}
    assert addresses == {memory.ctypes.data}
    np.testing.assert_array_equal(array, shard)


BF16 = DTYPES["BF16"].numpy


@pytest.mark.parametrize(
    ("dtype", "shape", "spec"),
    [
        *((row.numpy, (8, 16), P("x", "y")) for row in DTYPES.values() if row.numpy is not None),
        (BF16, (8, 16), P(None, "x")),
        (BF16, (8, 16), P()),
        (BF16, (), P()),
        (BF16, (0, 4), P(None, "y")),
    ],
    ids=str,
)
def test_shards_of_accelerators_are_seen_in_pinned_memory(mesh, accelerators, pinned, dtype, shape, spec):
    host = random_bits(RNG, shape, dtype)
    with jax.enable_x64():
        sharding = NamedSharding(mesh, spec)
        array = jax.make_array_from_callback(shape, sharding, lambda index: host[index], dtype=dtype)
        boxes = {arrays.box_of(shard.index, shape) for shard in array.addressable_shards}
        shards = arrays.local_shards(array, boxes)
        memory = dict(zip(shards, arrays.to_host(list(shards.values())), strict=True))
    assert memory.keys() == boxes
    for box, found in memory.items():
        assert (found.dtype, found.tobytes()) == (dtype, host[box.slices].tobytes())
    assert [copy.unsafe_buffer_pointer() for copy in pinned.arrays] == [found.ctypes.data for found in memory.values()]


def test_transfers_begin_before_the_first_is_waited_for(accelerators, pinned):
    moving = arrays.to_host([shard_on(device, np.ones(4)) for device in jax.devices()])
    assert len(pinned.arrays) == len(jax.devices())
    assert len(list(moving)) == len(jax.devices())


@pytest.mark.parametrize("limit", [0, 3])
def test_without_pinned_memory_shards_come_the_usual_way(accelerators, pinned, limit):
    shards = [shard_on(jax.devices()[1], np.full(5, number, np.float32)) for number in range(6)]
    pinned.limit = limit
    memory = list(arrays.to_host(shards))
    assert [found.tolist() for found in memory] == [[number] * 5 for number in range(6)]
    assert pinned.tries == limit + 1  # a try that fails takes seconds


def test_a_copy_into_pinned_memory_that_fails_later(accelerators, monkeypatch):
    class Failed:
        def __array__(self, *_, **__):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")

    shard = shard_on(jax.devices()[1], np.arange(5))
    monkeypatch.setattr(arrays.jax, "device_put", lambda *_: Failed())
    (memory,) = arrays.to_host([shard])
    assert memory.tolist() == list(range(5))


@pytest.mark.parametrize("kind", [PINNED, "unpinned_host"])
def test_arrays_of_accelerators_in_memory_of_the_host_are_not_copied(accelerators, pinned, kind):
    shard = shard_on(jax.devices()[1], np.arange(100), kind)
    (memory,) = arrays.to_host([shard])
    assert not pinned.arrays
    assert memory.ctypes.data == shard.unsafe_buffer_pointer()


def test_arrays_of_cpu_devices_are_not_copied(pinned):
    shard = shard_on(jax.devices()[1], np.arange(100))
    (memory,) = arrays.to_host([shard])
    assert not pinned.arrays
    assert memory.ctypes.data == shard.unsafe_buffer_pointer()


@pytest.mark.parametrize(
    ("platform", "kinds", "expected"),
    [("gpu", ["device", PINNED], True), ("gpu", ["device"], False), ("tpu", ["device", PINNED], False)],
)
def test_which_devices_have_pinned_memory(platform, kinds, expected):
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    device = SimpleNamespace(platform=platform, addressable_memories=lambda: memories)
    assert arrays.has_pinned_memory(device) is expected
