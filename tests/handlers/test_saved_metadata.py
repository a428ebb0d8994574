"""The metadata of a save is that of the tree that a restore without arguments returns, as with Orbax's own handlers."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.multiprocess.workers_families import config_of, stored_directory
from tests.support.stock_orbax import differences

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

QWEN3 = {"family": "maxtext", "variant": {"scan_layers": False}}


def state(mesh):
    params = {"w": jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("x", "y"))), "b": jnp.ones(4)}
    return {
        "params": params,
        "opt": optax.adam(0.1).init(params),
        "list": [np.arange(3), 7, 0.5, True, np.float32(2), None, {}, ()],
    }


def model(mesh):
    return ost.load(stored_directory("qwen3"), mesh, **QWEN3)


# What is saved, and with which family and what else. The last has one level less than the family's tree.
SAVES = {
    "a train state": (state, {}, {}),
    "a list": (lambda mesh: [state(mesh)["params"]["w"], None, 3], {}, {}),
    "a family's tree": (model, QWEN3, {"config": config_of("qwen3")}),
    "without params": (lambda mesh: model(mesh)["params"], QWEN3, {"config": config_of("qwen3")}),
}


@pytest.fixture(params=SAVES)
def save(request, tmp_path, mesh):
    """The directory of a save, and the handler that has made it."""
    make, family, more = SAVES[request.param]
    handler = ost.SafetensorsHandler(**family)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(make(mesh), index=True, **more))
    return tmp_path / "saved", handler


def facts(metadata):
    """All that metadata says of leaves, by their keys, except how they are stored."""
    return {
        key: (type(leaf), leaf.name, leaf.shape, leaf.dtype, leaf.sharding and leaf.sharding.to_jax_sharding())
        for key, leaf in jax.tree_util.tree_leaves_with_path(metadata.tree)
    }


def test_metadata_is_of_the_tree_that_a_restore_returns(save):
    path, handler = save
    restored = handler.restore(epath.Path(path))
    metadata = ocp.Checkpointer(handler).metadata(path).item_metadata
    assert jax.tree.structure(metadata.tree) == jax.tree.structure(restored)
    found = facts(metadata)
    for key, leaf in jax.tree_util.tree_leaves_with_path(restored):
        kind, _, shape, dtype, sharding = found[key]
        assert (kind is ocp.metadata.ScalarMetadata) == isinstance(leaf, bool | int | float)
        assert (shape, sharding) == (np.shape(leaf), getattr(leaf, "sharding", None))
        assert dtype == getattr(leaf, "dtype", dtype)
    with ocp.PyTreeCheckpointer() as stock:
        expected = stock.metadata(path).item_metadata
    assert jax.tree.structure(metadata.tree) == jax.tree.structure(expected.tree)
    assert found == facts(expected)


def of_arrays(metadata):
    """Describes arrays as programs do, over a mesh of their own; scalars stay what they are."""
    whole = NamedSharding(jax.sharding.Mesh(jax.devices(), ("all",)), P())
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding and whole)
            if type(leaf) is ocp.metadata.ArrayMetadata  # of which those of scalars are a subclass
            else leaf
        ),
        metadata.tree,
    )


ARGUMENTS = {
    "item": lambda found: {"item": found},
    "its tree": lambda found: {"item": found.tree},
    "restore_args": lambda found: {"restore_args": ocp.checkpoint_utils.construct_restore_args(found)},
    "both": lambda found: {
        "item": found.tree,
        "restore_args": ocp.checkpoint_utils.construct_restore_args(found.tree),
    },
    "other shardings": lambda found: {"item": of_arrays(found)},
}


def test_arguments_are_made_of_it(save):
    path, handler = save
    with ocp.Checkpointer(handler) as checkpointer:
        expected = checkpointer.restore(path)
        for way, arguments in ARGUMENTS.items():
            args = ost.SafetensorsRestore(**arguments(checkpointer.metadata(path).item_metadata))
            restored = checkpointer.restore(path, args=args)
            if way == "other shardings":
                restored = jax.tree.map(
                    lambda found, was: jax.device_put(found, was.sharding) if isinstance(was, jax.Array) else found,
                    restored,
                    expected,
                )
            assert differences(restored, expected) == [], way


def test_another_family_and_files_without_a_tree(tmp_path, mesh):
    """Then it is of the tensors: a flat dict, as a restore returns."""
    ost.save(tmp_path / "saved", model(mesh), config=config_of("qwen3"), **QWEN3)
    tensors = ost.open_checkpoint(tmp_path / "saved").tensors
    found = ost.SafetensorsHandler(family="identity").metadata(tmp_path / "saved").tree
    assert {name: leaf.shape for name, leaf in found.items()} == {name: entry.shape for name, entry in tensors.items()}
    assert not any(leaf.sharding for leaf in found.values())
    (tmp_path / "saved" / "_METADATA").unlink()
    assert ost.SafetensorsHandler().metadata(tmp_path / "saved").tree.keys() == tensors.keys()


def test_arrays_whose_devices_are_not_here(tmp_path, mesh):
    """Their shardings are described all the same; restored, the arrays are NumPy's."""
    ost.save(tmp_path / "saved", state(mesh))
    fails = mock.Mock(side_effect=ValueError("no such device"))
    with mock.patch.object(ocp.metadata.NamedShardingMetadata, "to_jax_sharding", fails):
        assert isinstance(ost.load(tmp_path / "saved")["params"]["w"], np.ndarray)
        found = ost.SafetensorsHandler().metadata(tmp_path / "saved").tree["params"]["w"]
    assert found.sharding.to_jax_sharding() == state(mesh)["params"]["w"].sharding


def test_a_mesh_shards_a_tree_that_has_one_level_less_than_its_family(tmp_path, mesh):
    ost.save(tmp_path / "saved", model(mesh)["params"], config=config_of("qwen3"), **QWEN3)
    line = jax.sharding.Mesh(jax.devices(), ("line",))
    found = ost.load(tmp_path / "saved", line)
    assert {leaf.sharding.mesh.axis_names for leaf in jax.tree.leaves(found)} == {("line",)}
