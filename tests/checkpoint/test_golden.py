"""Files that another program made, as they came: restored, planned, saved again."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.support.roots import TESTDATA

QWEN3 = TESTDATA / "qwen3"


def reference():
    tensors = {}
    for path in sorted(QWEN3.glob("*.safetensors")):
        with safetensors.safe_open(path, "np") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (a handle is no mapping)
    return tensors


@pytest.mark.both_devices
def test_what_transformers_saved(tmp_path, mesh):
    expected = reference()
    assert ost.verify(QWEN3) == []
    item = {
        name: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=NamedSharding(mesh, P("y", "x") if array.ndim == 2 else P("x"))
        )
        for name, array in expected.items()
    }
    plan = ost.plan_restore(QWEN3, item)
    assert plan.total_params == sum(array.size for array in expected.values()) == 34624
    with ocp.Checkpointer(ost.SafetensorsHandler(options=ost.SafetensorsOptions(alignment=8))) as checkpointer:
        restored = checkpointer.restore(QWEN3, args=ost.SafetensorsRestore(item=item))
        for name, array in expected.items():
            for shard in restored[name].addressable_shards:
                assert np.asarray(shard.data).tobytes() == array[shard.index].tobytes()
        limit = max(path.stat().st_size for path in QWEN3.glob("*.safetensors"))
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(restored, max_file_bytes=limit))
    saved = ost.open_checkpoint(tmp_path / "saved")
    assert sorted(saved.tensors) == sorted(expected)
    assert len(saved.files) == 3
