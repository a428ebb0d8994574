"""Restores onto accelerators: any view, dtype and sharding, through little memory, is what NumPy makes of it."""

import math
import tempfile
import weakref
from contextlib import nullcontext
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.devices import arrays, staging
from orbax_safetensors.devices.sharding import local_boxes
from orbax_safetensors.mapping import Family, tensor
from orbax_safetensors.restore import batches, fill
from orbax_safetensors.restore.in_flight import InFlight
from orbax_safetensors.storage import memory
from orbax_safetensors.storage.memory import PAGE_BYTES
from tests.support.accelerator import accelerator
from tests.support.files import random_bits, write
from tests.support.saves import assert_same_bits
from tests.support.strategies import examples
from tests.support.views import compositions

# The dtypes of leaves by those that are stored.
DTYPES = {
    np.dtype(stored): list(map(np.dtype, wanted))
    for stored, wanted in {
        bool: [bool],
        np.int8: [np.int8, np.int32, np.float32],
        np.uint16: [np.uint16],
        np.float32: [np.float32],
        np.int32: [np.int32],
        ml_dtypes.bfloat16: [ml_dtypes.bfloat16],
        ml_dtypes.float8_e4m3fn: [ml_dtypes.float8_e4m3fn],
    }.items()
}
AXES = {"x": 2, "y": 4}
MESH_AXES = [(), (), ("x",), ("y",), ("x", "y")]


@st.composite
def layouts(draw, shape):
    """A spec over the axes of the mesh, and a shape that it divides: the view's, padded or cut."""
    free, spec, sizes = list(AXES), [], []
    for size in shape:
        axes = tuple(axis for axis in draw(st.sampled_from(MESH_AXES)) if axis in free)
        free = [axis for axis in free if axis not in axes]
        shards = math.prod(AXES[axis] for axis in axes)
        fewer = draw(st.integers(0, 1)) if size > shards else 0
        spec.append(axes or None)
        sizes.append(shards * (size // shards if fewer else -(-size // shards)))
    return P(*spec), tuple(sizes)


def fitted(array, shape, dtype):
    """`array` with zeros at the ends, or cut there."""
    out = np.zeros(shape, dtype)
    common = tuple(slice(min(sizes)) for sizes in zip(shape, array.shape, strict=True))
    out[common] = array[common].astype(dtype)
    return out


@examples(150)
@given(
    st.data(),
    st.sampled_from(["late", "random"]),
    st.sampled_from([1, 256, 10**6]),
    st.sampled_from([1, 3]),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_any_view_in_any_layout(data, arrival, in_flight_bytes, threads, pinned, seed):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), tuple(AXES))
    leaves, tensors, args, expected = {}, {}, {}, {}
    for number in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(list(DTYPES)))
        made = data.draw(compositions(dtype=dtype, prefix=f"{number}."))
        wanted = data.draw(st.sampled_from(DTYPES[dtype]))
        spec, shape = data.draw(layouts(made.array.shape))
        name = f"leaf{number}"
        leaves[name], expected[name] = made.view, fitted(made.array, shape, wanted)
        tensors |= made.stored
        sharding = NamedSharding(mesh, spec)
        args[name] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, strict=False, dtype=wanted)
    # Bytes at the beginning move all others to odd offsets.
    odd = {"": np.zeros(data.draw(st.integers(0, 3)), np.uint8)}
    family = Family("drawn", (), lambda config: leaves)
    options = ost.SafetensorsOptions(in_flight_bytes=in_flight_bytes, threads=threads)
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory) / "model.safetensors", odd | tensors)
        with accelerator(arrival, seed=seed, pinned=pinned) as device:
            restored = ost.SafetensorsHandler(family=family, options=options).restore(
                Path(directory), ost.SafetensorsRestore(restore_args=args, partial_restore=True)
            )
            assert device.num_transfers > 0 or not any(array.size for array in expected.values())
        for name, array in expected.items():
            assert_same_bits(restored[name], array)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "columns"])
def test_a_restore_that_fails_waits_for_what_it_has_handed_over(tmp_path, mesh, monkeypatch, spec):
    tensors = {f"w{number}": np.ones((8, 8), np.float32) for number in range(4)}
    write(tmp_path / "model.safetensors", tensors)
    calls = []

    def assemble(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return arrays.assemble(*args)

    monkeypatch.setattr(fill, "assemble", assemble)
    with accelerator() as device:
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            ost.load(tmp_path, NamedSharding(mesh, spec))
        assert device.num_transfers == 16


@pytest.mark.parametrize(
    ("pinned", "turned", "spec"),
    [
        (False, False, P()),
        (True, False, P("x")),
        (False, True, P("x")),
        (True, True, P(None, ("x", "y"))),
        (False, False, P(None, ("x", "y"))),
    ],
    ids=str,
)
def test_a_leaf_of_more_than_may_be_in_flight_is_put_together_on_the_devices(
    tmp_path, mesh, monkeypatch, pinned, turned, spec
):
    monkeypatch.setattr(batches, "_LEAST_CUT_BYTES", 0)
    stored = random_bits(np.random.default_rng(1), (64, 96), np.dtype(ml_dtypes.bfloat16))
    write(tmp_path / "model.safetensors", {"w": stored, "b": stored[0]})

    def leaves(config):
        w = tensor("w", stored.shape)
        return {"w": w.transpose((1, 0)) if turned else w, "b": tensor("b", (96,))}

    family = Family("turned", (), leaves)
    options = ost.SafetensorsOptions(in_flight_bytes=4096)
    expected = {"w": stored.T if turned else stored, "b": stored[0]}
    shardings = {"w": NamedSharding(mesh, spec), "b": NamedSharding(mesh, P("y"))}
    target = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=shardings[name])
        for name, array in expected.items()
    }
    # A program of the caller's may run on other devices.
    others = Mesh(np.array(jax.devices()[:2]), ("z",))
    with (
        accelerator("random", max_bytes=2048 + 1, pinned=pinned) as device,
        jax.set_mesh(others) if turned else nullcontext(),
    ):
        restored = ost.load(tmp_path, target, family=family, options=options)
    assert device.num_transfers > 16
    # Devices with the same box take the same memory.
    copies = 8 // len(set(local_boxes(shardings["w"], expected["w"].shape)))
    assert device.most_bytes <= options.in_flight_bytes * copies
    for name, array in expected.items():
        assert restored[name].sharding == shardings[name]
        assert_same_bits(restored[name], array)


def test_memory_outside_the_pool_goes_when_its_bytes_have_arrived(tmp_path, mesh, monkeypatch):
    # As leaves in a layout of the caller's, or of complex elements.
    monkeypatch.setattr(batches, "can_grow", lambda *_: False)
    write(tmp_path / "model.safetensors", {f"w{number}": np.ones((512, 96), np.float32) for number in range(8)})
    made, most = [], 0
    allocate = memory.allocate

    def counted(*args):
        nonlocal most
        buffers = allocate(*args)
        made.extend(map(weakref.ref, buffers))
        most = max(most, sum(buffer() is not None for buffer in made))
        return buffers

    monkeypatch.setattr(memory, "allocate", counted)
    options = ost.SafetensorsOptions(in_flight_bytes=1024)
    with accelerator():
        ost.load(tmp_path, NamedSharding(mesh, P()), options=options)
    assert len(made) == 8
    assert most <= 2


@pytest.mark.parametrize("left", [True, False], ids=["pinned", "no pinned memory left"])
def test_a_gpu_takes_all_bytes_from_little_pinned_memory(tmp_path, mesh, monkeypatch, left):
    stored = {f"w{number:02}": np.full((64, 64), number, np.float32) for number in range(40)}
    write(tmp_path / "model.safetensors", stored)
    pinned, arenas, outside, batches_sent = [], [], [], []
    put, real_send = jax.device_put, InFlight.send

    def device_put(array, sharding):
        if not left:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")
        pinned.append(put(array, sharding))
        return pinned[-1]

    def arena(device, nbytes):
        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_put", device_put)
            arenas.append(staging.pinned_arena(device, nbytes))
        return arenas[-1]

    def assemble(sharding, shape, dtype, shards):
        outside.extend(shard for shard in shards.values() if not np.may_share_memory(shard, arenas[0]))
        return arrays.assemble(sharding, shape, dtype, shards)

    def send(in_flight, batch):
        batches_sent.append(batch)
        real_send(in_flight, batch)

    monkeypatch.setattr(InFlight, "send", send)
    monkeypatch.setattr(fill, "pinned_arena", arena)
    monkeypatch.setattr(fill, "assemble", assemble)
    with accelerator("random", pinned=True) as device:
        restored = ost.load(
            tmp_path, NamedSharding(mesh, P("x")), options=ost.SafetensorsOptions(in_flight_bytes=2**17)
        )
    (memory,) = arenas
    assert memory.ctypes.data % PAGE_BYTES == 0
    assert 2**17 <= memory.nbytes <= 2**18
    assert not outside
    assert [array.sharding.memory_kind for array in pinned] == ["pinned_host"] * left
    assert device.most_bytes <= 4 * 2**17  # of four devices that hold the same
    assert len(batches_sent) == 40  # one can be read while others leave
    for name, array in stored.items():
        assert_same_bits(restored[name], array)


@pytest.mark.parametrize("fetches", [lambda device: False, lambda device: device.id != 3], ids=["none", "all but one"])
def test_only_gpus_take_bytes_from_pinned_memory(tmp_path, mesh, monkeypatch, fetches):
    write(tmp_path / "model.safetensors", {"w": np.arange(8, dtype=np.float32)})
    monkeypatch.setattr(fill, "pinned_arena", lambda *_: pytest.fail("pinned"))
    with accelerator():
        monkeypatch.setattr(fill, "fetches_pinned", fetches)
        assert_same_bits(ost.load(tmp_path, NamedSharding(mesh, P()))["w"], np.arange(8, dtype=np.float32))


@pytest.fixture
def asked(monkeypatch):
    """The devices and the sizes of the pinned memory that restores have asked for."""
    asked = []

    def arena(device, nbytes):
        asked.append((device.id, nbytes))
        return memory.arena_of(nbytes)

    monkeypatch.setattr(fill, "pinned_arena", arena)
    return asked


def test_pinned_memory_is_for_what_gpus_take(tmp_path, monkeypatch, asked):
    """Not for leaves on CPU devices or of NumPy, which are longer here."""
    stored = {
        "gpu": np.ones(4, np.float32),
        "cpu": np.full(10**6, 2, np.float32),
        "numpy": np.full(10**6, 3, np.float32),
    }
    write(tmp_path / "model.safetensors", stored)
    cpu, gpu = jax.devices()[:2]
    monkeypatch.setattr(arrays, "is_cpu", lambda device: device == cpu)
    monkeypatch.setattr(fill, "fetches_pinned", lambda device: device != cpu)
    shardings = {"gpu": SingleDeviceSharding(gpu), "cpu": SingleDeviceSharding(cpu)}
    target = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=shardings.get(name))
        for name, array in stored.items()
    }
    restored = ost.load(tmp_path, target)
    ((device, nbytes),) = asked
    assert device == gpu.id
    assert nbytes < 10**5
    assert isinstance(restored["numpy"], np.ndarray)
    for name, array in stored.items():
        assert_same_bits(restored[name], array)


def test_many_short_leaves_fit_in_the_pinned_memory(tmp_path, mesh, monkeypatch, asked):
    stored = {f"b{number}": np.full(3, number % 100, np.int8) for number in range(1000)}
    write(tmp_path / "model.safetensors", stored)
    monkeypatch.setattr(memory, "allocate", lambda *_: pytest.fail("allocated"))
    with accelerator(pinned=True):
        restored = ost.load(tmp_path, NamedSharding(mesh, P()))
    assert len(asked) == 1
    assert_same_bits(restored["b999"], stored["b999"])


def test_there_is_a_most_of_pinned_memory_and_a_power_of_two_has_room_for_it(tmp_path, mesh, monkeypatch, asked):
    stored = {f"w{number}": np.full(1000, number, np.float32) for number in range(100)}
    write(tmp_path / "model.safetensors", stored)
    for most in (2**16, fill._PINNED_BYTES):
        monkeypatch.setattr(fill, "_PINNED_BYTES", most)
        with accelerator("random", pinned=True):
            restored = ost.load(tmp_path, NamedSharding(mesh, P()))
        for name, array in stored.items():
            assert_same_bits(restored[name], array)
    (_, least), (_, nbytes) = asked
    assert 2**16 <= least <= 2**16 + 16 * PAGE_BYTES
    assert 400_000 <= nbytes <= 400_000 + 50_000 + 16 * PAGE_BYTES
    assert fill._PINNED_BYTES + (least - 2**16) + PAGE_BYTES <= 2**29
