"""Restores onto accelerators: any view, dtype and sharding, through little memory, is what NumPy makes of it."""

import json
import math
import tempfile
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import event, given, note, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.devices import arrays, staging
from orbax_safetensors.devices.assembly import Programs
from orbax_safetensors.devices.sharding import local_boxes
from orbax_safetensors.devices.staging import Kind
from orbax_safetensors.mapping import Family, stack, tensor
from orbax_safetensors.restore import batches, pipeline
from orbax_safetensors.storage import memory
from orbax_safetensors.storage.memory import PAGE_BYTES
from tests.support import tiers
from tests.support.accelerator import accelerator
from tests.support.files import random_bits, write
from tests.support.quantized_formats import FORMATS
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
        np.float32: [np.float32, ml_dtypes.bfloat16],
        np.int32: [np.int32],
        ml_dtypes.bfloat16: [ml_dtypes.bfloat16, np.float32],
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
    with np.errstate(all="ignore"):
        out[common] = array[common].astype(dtype)
    return out


@examples(150)
@given(
    st.data(),
    st.sampled_from(["late", "random"]),
    st.sampled_from([1, 256, 10**6]),
    st.sampled_from([1, 3]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_any_view_in_any_layout(data, arrival, in_flight_bytes, threads, pinned, with_programs, seed):
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
        with accelerator(arrival, seed=seed, pinned=pinned, programs=with_programs) as device:
            restored = ost.SafetensorsHandler(family=family, options=options).restore(
                Path(directory), ost.SafetensorsRestore(restore_args=args, partial_restore=True)
            )
            assert device.num_transfers > 0 or not any(array.size for array in expected.values())
        for name, array in expected.items():
            assert_same_bits(restored[name], array)


# The largest code of any format is smaller: with a larger value, neither the scale nor the product is subnormal.
_MOST_FLUSHED = 2.0**9 * np.finfo(np.float32).smallest_normal


def flushed(found, expected):
    """Which elements are zero because XLA on CPUs sets subnormals to zero, a scale or a product; others are equal.

    NaN is NaN, whatever its payload.
    """
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    bits = f"u{found.dtype.itemsize}"
    same = (found.view(bits) == expected.view(bits)) | (np.isnan(found) & np.isnan(expected))
    zeros = ~same & (found == 0) & (np.signbit(found) == np.signbit(expected))
    zeros &= np.abs(expected.astype(np.float32)) < _MOST_FLUSHED
    assert (same | zeros).all(), (found[~same & ~zeros], expected[~same & ~zeros])
    return zeros


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=3 if tiers.only_fast else 40)
@given(
    st.data(),
    st.sampled_from([(1, 1), (1, 4), (2, 4)]),
    st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    st.sampled_from([1, 1000, 10**6]),
)
def test_every_format_in_any_layout(name, data, devices, dtype, in_flight_bytes):
    """As on CPU devices, for which the host decodes."""
    sample = data.draw(FORMATS[name])
    spec, shape = data.draw(layouts(sample.values.shape))
    mesh = Mesh(np.array(jax.devices()[: math.prod(devices)]).reshape(devices), tuple(AXES))
    leaf = ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, spec), global_shape=shape, strict=False, dtype=dtype)
    handler = ost.SafetensorsHandler(
        family="dequantized", options=ost.SafetensorsOptions(in_flight_bytes=in_flight_bytes)
    )
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory) / "model.safetensors", sample.stored)
        config = {} if sample.config is None else {"quantization_config": sample.config}
        (Path(directory) / "config.json").write_text(json.dumps(config))

        def restore():
            args = ost.SafetensorsRestore(restore_args={"m": {"weight": leaf}}, partial_restore=True)
            return handler.restore(Path(directory), args)["m"]["weight"]

        expected = restore()
        with accelerator(pinned=True) as device:
            found = restore()
    assert found.sharding == expected.sharding
    event("decoded by devices" if device.num_runs else "decoded by the host")
    if zeros := int(flushed(found, expected).sum()):
        event("subnormal scales or products")
        note(f"{zeros} elements of {found.size} have a subnormal scale, or are subnormal")


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

    monkeypatch.setattr(pipeline, "assemble", assemble)
    with accelerator() as device:
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            ost.load(tmp_path, NamedSharding(mesh, spec))
        assert device.num_transfers == 16
        assert not device.under_way()


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
        accelerator("random", max_bytes=1024 + 1, pinned=pinned) as device,
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
    monkeypatch.setattr(batches, "can_assemble", lambda *_: False)
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


def test_a_gpu_fetches_all_bytes_from_one_registered_region(tmp_path, mesh, monkeypatch):
    stored = {f"w{number:02}": np.full((64, 64), number, np.float32) for number in range(40)}
    write(tmp_path / "model.safetensors", stored)
    regions, outside, handed_over = [], [], []

    def memory_of(kind, devices, nbytes, threads):
        @contextmanager
        def staging_memory():
            with real(kind, devices, nbytes, threads) as memory:
                regions.append(memory)
                yield memory

        assert kind is Kind.REGISTERED
        return staging_memory()

    def assemble(sharding, shape, dtype, shards):
        outside.extend(shard for shard in shards.values() if not np.may_share_memory(shard, regions[0]))
        handed_over.append(shards)
        return arrays.assemble(sharding, shape, dtype, shards)

    real = pipeline.staging_memory
    monkeypatch.setattr(pipeline, "staging_memory", memory_of)
    monkeypatch.setattr(pipeline, "assemble", assemble)
    with accelerator("random", pinned=True) as device:
        restored = ost.load(
            tmp_path, NamedSharding(mesh, P("x")), options=ost.SafetensorsOptions(in_flight_bytes=2**17)
        )
    (memory,) = regions
    assert device.num_regions == 1
    assert 2**17 <= memory.nbytes <= 2**18
    assert len(handed_over) == 40
    assert not outside
    assert device.most_bytes <= 4 * 2**18  # of four devices that hold the same
    for name, array in stored.items():
        assert_same_bits(restored[name], array)


@pytest.fixture
def asked(monkeypatch):
    """The kinds, the devices and the sizes of the memory that restores have asked for."""
    asked = []
    real = pipeline.staging_memory

    def staging_memory(kind, devices, nbytes, threads):
        asked.append((kind, {device.id for device in devices}, nbytes))
        return real(kind, devices, nbytes, threads)

    monkeypatch.setattr(pipeline, "staging_memory", staging_memory)
    return asked


@pytest.mark.parametrize("fetches", [lambda device: False, lambda device: device.id != 3], ids=["none", "all but one"])
def test_only_gpus_fetch_from_registered_memory(tmp_path, mesh, monkeypatch, asked, fetches):
    write(tmp_path / "model.safetensors", {"w": np.arange(8, dtype=np.float32)})
    with accelerator(), monkeypatch.context() as patch:
        patch.setattr(staging, "fetches_pinned", fetches)
        assert_same_bits(ost.load(tmp_path, NamedSharding(mesh, P()))["w"], np.arange(8, dtype=np.float32))
    assert [kind for kind, _, _ in asked] == [Kind.ORDINARY]


def test_memory_is_for_what_leaves_the_host(tmp_path, monkeypatch, asked):
    """Not for leaves on CPU devices or of NumPy, which are longer here."""
    stored = {
        "gpu": np.ones(4, np.float32),
        "cpu": np.full(10**6, 2, np.float32),
        "numpy": np.full(10**6, 3, np.float32),
    }
    write(tmp_path / "model.safetensors", stored)
    cpu, gpu = jax.devices()[:2]
    monkeypatch.setattr(arrays, "is_cpu", lambda device: device == cpu)
    shardings = {"gpu": SingleDeviceSharding(gpu), "cpu": SingleDeviceSharding(cpu)}
    target = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=shardings.get(name))
        for name, array in stored.items()
    }
    restored = ost.load(tmp_path, target)
    ((_, devices, nbytes),) = asked
    assert devices == {gpu.id}
    assert nbytes < 10**5
    assert isinstance(restored["numpy"], np.ndarray)
    for name, array in stored.items():
        assert_same_bits(restored[name], array)


def test_many_short_leaves_fit_in_the_memory(tmp_path, mesh, monkeypatch, asked):
    stored = {f"b{number}": np.full(3, number % 100, np.int8) for number in range(1000)}
    write(tmp_path / "model.safetensors", stored)
    monkeypatch.setattr(memory, "allocate", lambda *_: pytest.fail("allocated"))
    with accelerator(pinned=True):
        restored = ost.load(tmp_path, NamedSharding(mesh, P()))
    assert len(asked) == 1
    assert_same_bits(restored["b999"], stored["b999"])


@pytest.mark.parametrize("kind", Kind)
def test_memory_has_room_for_the_longest_leaf_or_for_as_much_as_may_be(tmp_path, mesh, monkeypatch, asked, kind):
    monkeypatch.setattr(batches, "_USUAL_BYTES", 2**16)
    monkeypatch.setattr(batches, "_LEAST_CUT_BYTES", 0)
    monkeypatch.setitem(staging._MOST_BYTES, Kind.PINNED, 2**18)
    monkeypatch.setitem(staging._MOST_BYTES, Kind.ORDINARY, 2**17)
    stored = {f"w{number}": np.full(1000 + 65_000 * (number == 7), number, np.float32) for number in range(100)}
    write(tmp_path / "model.safetensors", stored)
    with accelerator("random", pinned=True), monkeypatch.context() as patch:
        patch.setattr(pipeline, "kind_for", lambda devices: kind)
        restored = ost.load(tmp_path, NamedSharding(mesh, P()), options=ost.SafetensorsOptions(threads=1))
    for name, array in stored.items():
        assert_same_bits(restored[name], array)
    ((_, _, nbytes),) = asked
    assert nbytes <= min(staging._MOST_BYTES[kind], 700_000) + 16 * PAGE_BYTES


def test_one_program_serves_all_parts_of_a_tensor_whose_scales_are_for_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "_LEAST_CUT_BYTES", 0)
    rng = np.random.default_rng(5)
    stored = {
        "m.weight": rng.integers(0, 100, (2048, 256), np.uint8).view(ml_dtypes.float8_e4m3fn),
        "m.weight_scale_inv": rng.uniform(0.5, 1, (16, 2)).astype(np.float32),
    }
    write(tmp_path / "model.safetensors", stored)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    compiled, compile_ = set(), Programs.compile
    monkeypatch.setattr(
        Programs, "compile", lambda programs, recipe, *args: (compiled.add(recipe), compile_(programs, recipe, *args))
    )
    sharding = SingleDeviceSharding(jax.devices()[0])
    options = ost.SafetensorsOptions(in_flight_bytes=400_000)  # a quarter of which is 390 rows
    expected = ost.load(tmp_path, sharding, family="dequantized", options=options)["m"]["weight"]
    with accelerator() as device:
        restored = ost.load(tmp_path, sharding, family="dequantized", options=options)["m"]["weight"]
    assert_same_bits(restored, np.asarray(expected))
    assert device.num_runs > 5
    assert len(compiled) == 2  # the last part is shorter


def test_parts_that_the_host_decodes_are_not_longer_than_other_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "_LEAST_CUT_BYTES", 0)
    rng = np.random.default_rng(4)
    stored = {
        "m.weight": rng.integers(0, 2**32, (1, 256 * 3 // 32), np.uint32),
        "m.scales": rng.uniform(0.5, 1, (1, 4)).astype(np.float16),
        "m.biases": rng.uniform(0.5, 1, (1, 4)).astype(np.float16),
    }
    write(tmp_path / "model.safetensors", stored)
    config = {"quant_method": "mlx", "bits": 3, "group_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    leaf = ocp.ArrayRestoreArgs(sharding=SingleDeviceSharding(jax.devices()[0]), dtype=np.float32)
    parts, real = [], pipeline.batches_for

    def batches_for(*args, **kwargs):
        made = real(*args, **kwargs)
        parts.extend(part for batch in made[0] for part in batch.parts)
        return made

    def restore():
        options = ost.SafetensorsOptions(in_flight_bytes=100)
        handler = ost.SafetensorsHandler(family="dequantized", options=options)
        return handler.restore(tmp_path, ost.SafetensorsRestore(restore_args={"m": {"weight": leaf}}))["m"]["weight"]

    expected = restore()
    monkeypatch.setattr(pipeline, "batches_for", batches_for)
    with accelerator():
        assert_same_bits(restore(), np.asarray(expected))
    by_host = [part.nbytes for part in parts if part.recipe.source == np.float32]  # from the middle of a word on
    assert by_host
    assert max(by_host) <= 25


@pytest.mark.parametrize("spec", [P(), P("y"), P(None, None, None, "x")], ids=str)
def test_devices_decode_a_long_tensor_in_parts(tmp_path, mesh, monkeypatch, spec):
    monkeypatch.setattr(batches, "_MOST_DECODED_BYTES", 8192)
    rng = np.random.default_rng(3)
    experts, outputs, inputs = 8, 32, 64
    names = [f"layers.{layer}.up" for layer in range(2)]
    stored = {f"{name}_blocks": rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8) for name in names}
    stored |= {f"{name}_scales": rng.integers(120, 130, (experts, outputs, inputs // 32), np.uint8) for name in names}
    write(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))

    def leaves(config):
        return {"up": stack([tensor(name, (experts, inputs, outputs)) for name in names], axis=1)}

    family = Family("stacked", (), leaves)
    sharding = NamedSharding(mesh, spec)
    expected = ost.load(tmp_path, sharding, family=family)["up"]
    made, real = [], batches.packed_parts

    def packed_parts(*args):
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(batches, "packed_parts", packed_parts)
    with accelerator("random"):
        restored = ost.load(tmp_path, sharding, family=family)["up"]
    whole, *parts = made
    assert len(whole) == 2
    of_a_layer = math.prod(expected.sharding.shard_shape(expected.shape)) // 8192
    assert len(parts) == (2 * of_a_layer if of_a_layer > 1 else 0)
    assert all(len(part) == 1 for part in parts)
    assert_same_bits(restored, np.asarray(expected))
