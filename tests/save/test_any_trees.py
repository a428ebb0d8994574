"""The index of a save has every node of a tree as stock Orbax records it, and both restore the same from it."""

import json
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from hypothesis import given
from orbax.checkpoint.experimental import v1

import orbax_safetensors as ost
from tests.support.any_trees import EMPTY_NODES, BothKinds, Keyed, Numbered, OtherNumbers, Strict, trees
from tests.support.stock_orbax import differences
from tests.support.strategies import examples

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

A = jnp.arange(3.0)
STATES = {
    "sgd": optax.sgd(0.1).init({"w": A}),
    "adam": optax.adam(0.1).init({"w": A, "frozen": None}),
    "empty nodes": EMPTY_NODES,
    "empty nodes in a list": [A, *EMPTY_NODES.values(), [*EMPTY_NODES.values(), A]],
    "nnx": nnx.state(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), lambda x: x), nnx.Param),
    "a class": Numbered(A, {"b": Numbered()}, []),
}
if hasattr(v1, "load"):  # before, Orbax did not take leaves for trees
    STATES |= {"one leaf": A, "one number": 7}


def recorded(path):
    """Everything that Orbax's metadata says of the tree, except how arrays are cut."""
    entries = json.loads((path / "_METADATA").read_text())["tree_metadata"]
    for entry in entries.values():
        entry["value_metadata"].pop("write_shape", None)
    return list(entries.items())


def stock(path, *args, **kwargs):
    with warnings.catch_warnings(), ocp.PyTreeCheckpointer() as checkpointer:
        warnings.simplefilter("ignore")
        return checkpointer.restore(path, *args, **kwargs)


def check(directory, tree):
    ours, theirs = directory / "ours", directory / "theirs"
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(theirs, tree)
    ost.save(ours, tree, index=True)
    assert recorded(ours) == recorded(theirs)
    expected = stock(theirs)
    assert differences(stock(ours), expected) == []
    assert differences(ost.load(ours), expected) == []
    assert differences(stock(ours, item=tree), stock(theirs, item=tree)) == []
    restored = ocp.Checkpointer(ost.SafetensorsHandler()).restore(ours, args=ost.SafetensorsRestore(tree))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    assert ost.verify(ours) == []


@pytest.mark.parametrize("name", STATES)
def test_a_tree_is_recorded_as_orbax_records_it(tmp_path, name):
    check(tmp_path, STATES[name])


@examples(50)
@given(tree=trees)
def test_any_tree_is_recorded_as_orbax_records_it(tmp_path_factory, tree):
    check(tmp_path_factory.mktemp("tree"), tree)


@pytest.mark.parametrize(
    ("tree", "restored"),
    [
        ({"a": jax.tree_util.Partial(jnp.add, A)}, {"a": [[A], {}]}),
        ([Strict(A, A), None], [[A, A], None]),
        (
            {"a": A, "b": [ocp.PLACEHOLDER, A], "c": Keyed(ocp.PLACEHOLDER)},
            {"a": A, "b": [None, A], "c": {"part0": None}},
        ),
    ],
    ids=["Partial without keywords", "a class that checks its children", "placeholders"],
)
def test_trees_that_orbax_does_not_save(tmp_path, tree, restored):
    """Orbax cannot make some classes of its own records; with placeholders, its metadata and its v1 API fail."""
    ost.save(tmp_path / "saved", tree, index=True)
    for found in (ost.load(tmp_path / "saved"), stock(tmp_path / "saved")):
        assert differences(found, restored) == []
    again = ost.load(tmp_path / "saved", tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert [leaf is ocp.PLACEHOLDER for leaf in jax.tree.leaves(again)] == [
        leaf is ocp.PLACEHOLDER for leaf in jax.tree.leaves(tree)
    ]


def test_a_part_that_orbax_cannot_read_and_that_holds_nothing_is_left_out(tmp_path):
    """Lists of Flax have a part that holds nothing, and a name among numbers, with which Orbax reads no checkpoint."""
    tree = {"list": nnx.List([A, nnx.List([A])]), "both": BothKinds(A, optax.EmptyState())}
    ost.save(tmp_path / "saved", tree, index=True)
    for found in (ost.load(tmp_path / "saved"), stock(tmp_path / "saved")):
        assert differences(found, {"list": [A, [A]], "both": [A]}) == []
    restored = ost.load(tmp_path / "saved", tree)
    assert [leaf.tolist() for leaf in jax.tree.leaves(restored)] == [[0, 1, 2]] * 3
    check(tmp_path, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("node", [OtherNumbers(A, A), BothKinds(A, A), [BothKinds(A, {"a": A})]])
def test_what_orbax_cannot_read_has_no_index(tmp_path, node, caplog):
    caplog.set_level(logging.INFO, "orbax_safetensors")
    tree = {"node": node, "w": A}
    ost.save(tmp_path / "saved", tree)
    assert "its children are neither those of a list nor of a dict" in caplog.text
    assert not (tmp_path / "saved" / "_METADATA").exists()
    assert len(ost.load(tmp_path / "saved")) == 3  # by name
    assert jax.tree.structure(ost.load(tmp_path / "saved", tree)) == jax.tree.structure(tree)
    with pytest.raises(ost.TensorMismatchError, match="as index=True requires: 'node"):
        ost.save(tmp_path / "indexed", tree, index=True)


@pytest.mark.parametrize("tree", [None, {}, [], (), optax.EmptyState()], ids=repr)
def test_an_empty_tree_is_refused(tmp_path, tree):
    with pytest.raises(ost.TensorMismatchError, match="the tree to save has no leaves"):
        ost.save(tmp_path / "saved", tree)
    assert not (tmp_path / "saved").exists()


def test_a_state_without_arrays_beside_parameters(tmp_path, mesh):
    """In a step of a `CheckpointManager`, with a mesh, and not as a copy of another checkpoint."""
    items = {"params": {"w": A}, "state": STATES["sgd"]}
    handlers = {name: ost.SafetensorsHandler() for name in items}
    with ocp.CheckpointManager(tmp_path / "run", item_handlers=handlers) as manager:
        manager.save(3, args=ocp.args.Composite(**{name: ost.SafetensorsSave(tree) for name, tree in items.items()}))
        assert manager.restore(3)["state"] == [None, None]
        wanted = ocp.args.Composite(state=ost.SafetensorsRestore(STATES["sgd"]))
        assert manager.restore(3, args=wanted)["state"] == STATES["sgd"]
        assert manager.item_metadata(3)["state"].tree == [None, None]
    assert ost.load(tmp_path / "run" / "3" / "state", mesh) == [None, None]
    assert ost.plan_restore(tmp_path / "run" / "3" / "state", STATES["sgd"]).total_bytes == 0
    assert ost.verify(tmp_path / "run" / "3" / "state", data=True) == []
    with pytest.raises(ost.MappingError, match="w is missing"):
        ost.save(tmp_path / "like", STATES["sgd"], like=tmp_path / "run" / "3" / "params")


def test_what_orbax_cannot_put_together_has_a_reason(tmp_path):
    """An index that lacks a part of a list, as earlier versions wrote it, makes Orbax's parser fail without a word."""
    ost.save(tmp_path / "saved", [A, None, np.ones(2)])
    path = tmp_path / "saved" / "_METADATA"
    metadata = json.loads(path.read_text())
    del metadata["tree_metadata"]["('1',)"]
    path.write_text(json.dumps(metadata))
    with pytest.raises(ost.StorageError, match=r"_METADATA: is not what Orbax writes: AssertionError\(\)"):
        ost.load(tmp_path / "saved")
