"""A named checkpointable of Orbax's v1 API as safetensors."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental import v1

import orbax_safetensors as ost
from tests.support.files import random_bits

RNG = np.random.default_rng(0)
W = random_bits(RNG, (16, 8), np.dtype("f4"))
TREE = {"layer": {"w": W}, "step": np.array(3, np.int32)}


@pytest.fixture
def context():
    registry = v1.handlers.local_registry()
    registry.add(ost.SafetensorsCheckpointableHandler, checkpointable_name="params")
    context = v1.Context(checkpointables_options=v1.options.CheckpointablesOptions(registry=registry))
    with context:
        yield context


def test_save_and_load(tmp_path, mesh, context):
    sharded = {"layer": {"w": jax.device_put(W, NamedSharding(mesh, P("x", "y")))}, "step": TREE["step"]}
    v1.save_checkpointables(tmp_path / "c", {"params": sharded, "note": {"epoch": 2}})
    assert (tmp_path / "c" / "params" / "model.safetensors").exists()
    wanted = {
        "layer": {"w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh, P("y")))},
        "step": np.zeros((), np.int32),
    }
    loaded = v1.load_checkpointables(tmp_path / "c", {"params": wanted, "note": None})
    assert loaded["note"] == {"epoch": 2}
    assert loaded["params"]["layer"]["w"].sharding.spec == P("y")
    assert np.asarray(loaded["params"]["layer"]["w"]).tobytes() == W.tobytes()
    assert loaded["params"]["step"] == 3
    found = v1.checkpointables_metadata(tmp_path / "c").metadata["params"]
    assert found["layer.w"] == jax.ShapeDtypeStruct(W.shape, W.dtype)


def test_without_an_abstract_tree(tmp_path, context):
    v1.save_checkpointables(tmp_path / "c", {"params": TREE})
    loaded = v1.load_checkpointables(tmp_path / "c")["params"]
    assert loaded["layer.w"].tobytes() == W.tobytes()


def test_an_asynchronous_save_keeps_what_it_was_given(tmp_path, context):
    array = W.copy()
    response = v1.save_checkpointables_async(tmp_path / "c", {"params": {"w": array}})
    array[...] = 0
    response.result()
    assert v1.load_checkpointables(tmp_path / "c")["params"]["w"].tobytes() == W.tobytes()


def test_what_it_handles():
    handler = ost.SafetensorsCheckpointableHandler()
    assert handler.is_handleable(TREE)
    assert not handler.is_handleable({"a": "text"})
    assert not handler.is_handleable({})
    assert handler.is_abstract_handleable({"a": jax.ShapeDtypeStruct((), np.float32)})
    assert not handler.is_abstract_handleable(None)
