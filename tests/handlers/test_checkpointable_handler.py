"""A named checkpointable of Orbax's v1 API as safetensors."""

import warnings

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental import v1

import orbax_safetensors as ost
from tests.support.files import random_bits
from tests.support.stock_orbax import differences

RNG = np.random.default_rng(0)
W = random_bits(RNG, (16, 8), np.dtype("f4"))
TREE = {"layer": {"w": W}, "step": np.array(3, np.int32)}


@pytest.fixture
def options():
    registry = v1.handlers.local_registry()
    registry.add(ost.SafetensorsCheckpointableHandler, checkpointable_name="params")
    return v1.Context(checkpointables_options=v1.options.CheckpointablesOptions(registry=registry))


@pytest.fixture
def context(options):
    with options:
        yield options


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


TREES = {
    "numbers": {"w": W, "step": 7, "rate": 0.5, "done": True, "norm": np.float32(2), "count": np.int64(3)},
    "placeholders": {"w": W, "frozen": {"w": v1.PLACEHOLDER}, "list": [v1.PLACEHOLDER, W]},
    "nested": {"layers": [{"w": W}, {}, None], "pair": (W, 3)},
    "a state without arrays": optax.sgd(0.1).init({"w": W}),
    "a number": 3,
}


@pytest.mark.parametrize("name", TREES)
def test_each_tree_loads_with_itself_with_its_metadata_and_without_a_tree(tmp_path, mesh, context, name):
    over_mesh = NamedSharding(mesh, P("x", "y"))
    tree = jax.tree.map(lambda leaf: jax.device_put(W, over_mesh) if leaf is W else leaf, TREES[name])
    v1.save_checkpointables(tmp_path / "c", {"params": tree})
    same = v1.load_checkpointables(tmp_path / "c", {"params": tree})["params"]
    assert jax.tree.structure(same) == jax.tree.structure(tree)
    for found, saved in zip(jax.tree.leaves(same), jax.tree.leaves(tree), strict=True):
        if saved is v1.PLACEHOLDER:
            assert found is saved
        else:
            assert np.asarray(found).tobytes() == np.asarray(saved).tobytes()
            assert getattr(found, "sharding", None) == getattr(saved, "sharding", None)

    if name == "a number" and not hasattr(v1, "load"):
        return  # Orbax did not take leaves for trees
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax warns that it takes shardings from the file that it has written
        expected = ocp.PyTreeCheckpointHandler().restore(tmp_path / "c" / "params")
    metadata = v1.checkpointables_metadata(tmp_path / "c").metadata["params"]
    assert jax.tree.structure(metadata) == jax.tree.structure(expected)
    for loaded in (
        v1.load_checkpointables(tmp_path / "c")["params"],
        v1.load_checkpointables(tmp_path / "c", {"params": metadata})["params"],
    ):
        assert differences(loaded, expected) == []


def test_scalars_by_their_types(tmp_path, context):
    v1.save_checkpointables(tmp_path / "c", {"params": TREES["numbers"]})
    wanted = {"w": jax.ShapeDtypeStruct(W.shape, W.dtype), "step": float, "rate": float, "done": bool, "norm": float}
    loaded = v1.load_checkpointables(tmp_path / "c", {"params": {**wanted, "count": int}})["params"]
    assert (loaded["step"], loaded["rate"], loaded["done"], loaded["norm"], loaded["count"]) == (7.0, 0.5, True, 2.0, 3)
    assert type(loaded["step"]) is float


def test_an_asynchronous_save_keeps_what_it_was_given(tmp_path, context):
    array = W.copy()
    response = v1.save_checkpointables_async(tmp_path / "c", {"params": {"w": array}})
    array[...] = 0
    response.result()
    assert v1.load_checkpointables(tmp_path / "c")["params"]["w"].tobytes() == W.tobytes()


def test_checkpointers_of_a_training_run(tmp_path, options):
    """One after the other with the same context, as none can with a block of it."""
    for run in ("first", "second"):
        with v1.training.Checkpointer(tmp_path / run, context=options) as checkpointer:
            checkpointer.save_checkpointables(1, {"params": TREE})
            assert checkpointer.load_checkpointables(1)["params"]["layer"]["w"].tobytes() == W.tobytes()
        assert (tmp_path / run / "1" / "params" / "model.safetensors").exists()


def test_what_it_handles():
    handler = ost.SafetensorsCheckpointableHandler()
    assert handler.is_handleable(TREE)
    assert not any(map(handler.is_handleable, ({"a": "text"}, {}, {"a": print}, {"a": 1, "b": {2: "text"}})))
    assert all(map(handler.is_handleable, TREES.values()))
    assert all(map(handler.is_abstract_handleable, TREES.values()))
    assert not any(map(handler.is_abstract_handleable, ({"a": "text"}, {}, {"a": print}, {"a": dict})))
    assert handler.is_abstract_handleable({"a": jax.ShapeDtypeStruct((), np.float32)})
    assert not handler.is_abstract_handleable(None)
