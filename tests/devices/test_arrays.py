"""Host memory and arrays of JAX: what is shared, and what is copied."""

import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_safetensors.devices import arrays


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
