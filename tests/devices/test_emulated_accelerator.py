"""The emulated accelerator itself: when bytes arrive, and what it finds wrong."""

import ctypes
import threading

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_safetensors.devices import arrays
from orbax_safetensors.devices.sharding import box_of
from orbax_safetensors.transfer.reader import Reader
from tests.support import hang
from tests.support.accelerator import accelerator, shard_nbytes
from tests.support.files import random_bits
from tests.support.saves import RNG, assert_same_bits

# The globals of code of the package.
IN_A_RESTORE = {"__name__": "orbax_safetensors.restore.replicas"}


def some(shape, dtype):
    if dtype is ml_dtypes.int4:  # of whose bytes JAX keeps one half
        return RNG.integers(-8, 8, shape).astype(dtype)
    return random_bits(RNG, shape, np.dtype(dtype))


def handed_over(host, sharding):
    """The array that the package makes of `host`, of which each shard is a strided view."""
    plain = sharding.sharding if isinstance(sharding, Format) else sharding
    shards = {
        box_of(index, host.shape): host[index] for index in plain.addressable_devices_indices_map(host.shape).values()
    }
    return arrays.assemble(sharding, host.shape, host.dtype, shards)


def memory_of(array):
    shard = array.addressable_shards[0].data
    return ctypes.string_at(shard.unsafe_buffer_pointer(), shard_nbytes(array))


@pytest.mark.parametrize(
    ("dtype", "spec"),
    [("f4", P()), ("f4", P("x", "y")), ("c8", P(None, ("x", "y"))), ("?", P("x", "y")), (ml_dtypes.int4, P("x", "y"))],
    ids=str,
)
def test_bytes_arrive_late_and_whole(mesh, dtype, spec):
    host = some((8, 16), dtype)
    host.flags.writeable = False
    with accelerator() as device:
        array = handed_over(host, NamedSharding(mesh, spec))
        early = memory_of(array)
        assert not array.is_ready()
        jax.block_until_ready({"w": [array]})
        assert array.is_ready()
        assert memory_of(array) != early
        assert device.num_transfers == (1 if spec == P() else 8)
    assert_same_bits(array, host)


def test_bytes_arrive_in_the_layout_of_the_array(mesh):
    host = some((8, 16), "f4")
    with accelerator():
        array = handed_over(host, Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh, P("x"))))
        early = memory_of(array)
        array.block_until_ready()
        assert memory_of(array) != early
    assert array.format.layout.major_to_minor == (1, 0)
    assert_same_bits(array, host)


@pytest.mark.parametrize(
    "use",
    [
        lambda array: np.asarray(array),
        lambda array: eval("[shard.data for shard in array.addressable_shards]", IN_A_RESTORE | {"array": array}),
        lambda array: [array.is_ready(), array.is_ready()],
        lambda array: array.addressable_shards[0].data.block_until_ready(),
    ],
    ids=["numpy", "shards", "polls", "a shard"],
)
def test_whoever_reads_or_polls_an_array_waits_for_it(mesh, use):
    host = some((8, 16), "f4")
    with accelerator():
        array = handed_over(host, NamedSharding(mesh, P("x")))
        use(array)
        assert array.is_ready()
        assert_same_bits(array, host)


def test_bytes_arrive_at_a_random_moment_before_somebody_waits(mesh, monkeypatch):
    host, arrived = some((8, 16), "f4"), threading.Event()
    with accelerator("random") as device:
        arrive = device._arrive
        monkeypatch.setattr(device, "_arrive", lambda transfer: (arrive(transfer), arrived.set()))
        array = handed_over(host, NamedSharding(mesh, P("x")))
        assert arrived.wait(hang.SECONDS)
        assert array.is_ready()
    assert_same_bits(array, host)


def test_arrays_of_others_are_left_alone(mesh):
    host = some((8, 16), "f4")
    with accelerator() as device:
        assert_same_bits(jax.device_put(host, NamedSharding(mesh, P("x"))), host)
        assert device.num_transfers == 0


def change(host, array, device):
    host[0, 0] += 1
    array.block_until_ready()


def give_back(host, array, device):
    device.poison([host.reshape(-1).view(np.uint8)])
    array.block_until_ready()


def close_files(host, array, device):
    with Reader(lambda number: None, 1):
        pass


def check_files(host, array, device):
    with Reader(lambda number: None, 1) as reader:
        reader.check()
        array.block_until_ready()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (change, r"memory of float32\(4, 16\) changed before its transfer was complete"),
        (give_back, "512 bytes of memory were given back before their transfer was complete"),
        (lambda host, array, device: None, "1 transfers were not complete when the test ended"),
        (close_files, "1 transfers were not complete when the files were closed"),
        (check_files, "files were checked for changes before all transfers were complete"),
    ],
    ids=["memory used again", "memory given back", "nobody waits", "files closed", "files checked"],
)
def test_memory_that_is_let_go_too_early_is_found(mesh, wrong, message):
    host = np.ones((8, 16), np.float32)
    with pytest.raises(AssertionError, match=message), accelerator() as device:
        wrong(host, handed_over(host, NamedSharding(mesh, P("x"))), device)


def test_memory_is_poisoned_once_its_transfer_is_complete(mesh):
    host = np.ones((8, 16), np.float32)
    with accelerator() as device:
        array = jax.block_until_ready(handed_over(host, NamedSharding(mesh, P("x"))))
        device.poison([host.reshape(-1).view(np.uint8)])
    assert not (host == 1).any()
    np.testing.assert_array_equal(array, np.ones((8, 16), np.float32))


def test_a_transfer_that_is_too_large_is_found(mesh):
    host = np.ones((8, 16), np.float32)
    too_large = "one transfer of 256 bytes, must be less than 256"
    with pytest.raises(AssertionError, match=too_large), accelerator(max_bytes=256):
        handed_over(host, NamedSharding(mesh, P("x"))).block_until_ready()
