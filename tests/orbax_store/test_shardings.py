"""The record of shardings: long, and written once for all arrays that are sharded alike."""

import json
from unittest import mock

import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.devices.partition import partition
from orbax_safetensors.orbax_store import sharded_leaf
from orbax_safetensors.orbax_store.shardings import sharding_file


def test_arrays_that_are_sharded_alike_share_a_record():
    rules = partition({"x": 2, "y": 256}, {"kernel": ("x", "y")})
    names = [f"layers.{number}.{part}" for number in range(50) for part in ("kernel", "bias")]
    leaves = {name: sharded_leaf(rules, name, (4, 512), np.dtype(np.float32)) for name in names}
    shardings = {name: leaf.sharding for name, leaf in leaves.items()}
    assert leaves["layers.3.kernel"].chunk_shape == (2, 2)
    assert leaves["layers.3.bias"].chunk_shape == (4, 512)
    metadata = ocp.metadata.NamedShardingMetadata
    with mock.patch.object(
        metadata, "to_serialized_string", autospec=True, side_effect=lambda self: str(id(self))
    ) as spy:
        texts = list(json.loads(sharding_file(shardings)).values())
    assert spy.call_count == 2
    assert texts[0] != texts[1]
    assert texts == texts[:2] * 50
