"""Arrays that devices put together from parts: every bit of every dtype, and no memory beside the parts."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from orbax_safetensors.devices.growing import Growing, can_grow
from orbax_safetensors.devices.sharding import local_boxes
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.tiling import tiles
from tests.support.files import random_bits
from tests.support.saves import assert_same_bits

RNG = np.random.default_rng(5)
SPECS = [P(), P("x"), P("y", "x"), P(None, "y"), P(("x", "y")), P(None, None, "x")]
TILES = [(8, 4, 1), (3, 16, 2), (1, 5, 2), (8, 3, 2), (1, 7, 1), (2, 16, 1)]


def grown(sharding, array, tile):
    """The array, put together from parts of its shards of the shape `tile`."""
    growing = Growing(sharding, array.shape, array.dtype)
    shard = sharding.shard_shape(array.shape)
    for part in tiles(shard, tile, range(len(shard))):
        parts = {}
        for box in local_boxes(sharding, array.shape):
            at = tuple(slice(low + start, low + stop) for (low, _), (start, stop) in zip(box, part, strict=True))
            parts[box] = np.ascontiguousarray(array[at])
        growing.put(part.start, parts)
    return growing.array()


# Of each width and kind one; each is compiled for itself.
@pytest.mark.parametrize("name", ["BF16", "BOOL", "F32", "F8_E4M3", "I16"])
def test_bits_of_every_width(mesh, name):
    dtype = DTYPES[name].numpy
    array = random_bits(RNG, (16, 8), dtype)
    sharding = NamedSharding(mesh, P("x", "y"))
    assert can_grow(sharding, (16, 8), dtype)
    made = grown(sharding, array, (3, 1))
    assert made.sharding == sharding
    assert made.dtype == dtype
    assert_same_bits(made, array)


@pytest.mark.parametrize(("spec", "tile"), [*zip(SPECS, TILES, strict=True)], ids=str)
def test_cuts_along_any_axis(mesh, spec, tile):
    array = random_bits(RNG, (8, 16, 2), np.dtype(ml_dtypes.bfloat16))
    assert_same_bits(grown(NamedSharding(mesh, spec), array, tile), array)


@pytest.mark.parametrize("number", [0, 5])
def test_one_device(number):
    array = random_bits(RNG, (7, 3), np.dtype("f4"))
    sharding = SingleDeviceSharding(jax.devices()[number])
    made = grown(sharding, array, (2, 3))
    assert made.devices() == {jax.devices()[number]}
    assert_same_bits(made, array)


def test_parts_are_written_in_place(mesh):
    sharding = NamedSharding(mesh, P("x"))
    growing = Growing(sharding, (16, 8), np.dtype("f4"))
    before = [shard.data.unsafe_buffer_pointer() for shard in growing._shards.addressable_shards]
    box = Box([(0, 8), (0, 8)])
    other = Box([(8, 16), (0, 8)])
    for row in range(8):
        part = np.full((1, 8), row, "f4")
        growing.put((row, 0), {box: part, other: part})
    assert [shard.data.unsafe_buffer_pointer() for shard in growing.array().addressable_shards] == before


def test_what_cannot_be_put_together(mesh):
    sharding = NamedSharding(mesh, P("x"))
    assert can_grow(sharding, (8,), np.dtype("f4"))
    for dtype in (np.complex64, ml_dtypes.int4, ml_dtypes.float4_e2m1fn):
        assert not can_grow(sharding, (8,), np.dtype(dtype))
    assert not can_grow(Format(Layout((1, 0)), sharding), (8, 8), np.dtype("f4"))
    assert not can_grow(sharding.with_memory_kind("pinned_host"), (8,), np.dtype("f4"))
    assert not can_grow(None, (8,), np.dtype("f4"))
    assert not can_grow(sharding, (2**31,), np.dtype("u1"))
