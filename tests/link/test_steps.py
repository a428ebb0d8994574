"""Links as items of steps: what Orbax's managers of steps find, and what stays out of other directories."""

import json
import os

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1

import orbax_safetensors as ost
from orbax_safetensors.orbax_store import open_orbax
from tests.support.link_models import DATA, FAMILY, OF_A_LINK, OF_A_MODEL, arrays, assert_same, make, mapped, read

# The name that v1 gives the tree of a step.
TREE_NAME = "state" if hasattr(v1, "load") else "pytree"
OF_A_STEP = {"_CHECKPOINT_METADATA", "commit_success.txt"}


@pytest.fixture
def source(tmp_path):
    return make(tmp_path / "model")


def flat(tree):
    return {
        jax.tree_util.keystr(at, simple=True, separator="."): np.asarray(leaf)
        for at, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def names(directory):
    return set(os.listdir(directory))


def loaded_by_v1(root, step):
    with v1.training.Checkpointer(root) as checkpointer:
        assert checkpointer.latest.step == step
        return flat(getattr(checkpointer, "load", checkpointer.load_pytree)(step))


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("beside", [False, True])
def test_v1_loads_the_latest_step(beside, source, tmp_path):
    item = tmp_path / "root" / "3" / TREE_NAME
    if beside:
        make(item)
        ost.link(item, item, family=FAMILY)
    else:
        ost.link(source, item, family=FAMILY)
    assert names(item.parent) == {TREE_NAME, *OF_A_STEP}
    assert names(item) == OF_A_LINK | OF_A_MODEL | {"made"}
    assert_same(loaded_by_v1(tmp_path / "root", 3), mapped())


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_a_manager_restores_all_items_of_a_step(source, tmp_path):
    """Without being told what they are."""
    ost.link(source, tmp_path / "root" / "7" / "policy", family=FAMILY)
    ost.link(source, tmp_path / "root" / "7" / "reference")
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        assert manager.latest_step() == 7
        found = manager.restore(7)
    assert_same(flat(found["policy"]), mapped())
    assert_same(flat(found["reference"]), arrays())
    assert set(open_orbax(tmp_path / "root" / "7" / "policy").leaves) == set(mapped())
    assert ost.verify(tmp_path / "root" / "7" / "policy") == []


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_an_item_is_added_to_a_step_of_orbax(source, tmp_path):
    with ocp.CheckpointManager(tmp_path / "root", item_names=("optimizer",)) as manager:
        manager.save(
            1,
            args=ocp.args.Composite(optimizer=ocp.args.StandardSave({"count": np.arange(3)})),
            custom_metadata={"tokens": 5},
        )
    record = tmp_path / "root" / "1" / "_CHECKPOINT_METADATA"
    before = json.loads(record.read_text())
    ost.link(source, tmp_path / "root" / "1" / "params")
    after = json.loads(record.read_text())
    assert after["item_handlers"].keys() == {"optimizer", "params"}
    assert {**after, "item_handlers": None} == {**before, "item_handlers": None}
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        found = manager.restore(1)
    assert found["optimizer"]["count"].tolist() == [0, 1, 2]
    assert_same(flat(found["params"]), arrays())


@pytest.mark.parametrize("parent", ["models", "2024", "link"])
def test_a_directory_that_is_not_a_step_stays_as_it_is(parent, source, tmp_path):
    above = tmp_path / parent
    if parent == "link":  # an item alone, which records its own handler
        ost.link(source, above)
    make(above / "another")  # a model without a link
    before = {path.name: path.read_bytes() for path in above.iterdir() if path.is_file()}
    ost.link(source, above / "linked")
    assert {path.name: path.read_bytes() for path in above.iterdir() if path.is_file()} == before


def test_without_a_destination_no_directory_becomes_a_step(tmp_path):
    for name in ("m", "another"):
        ost.link(make(tmp_path / "2024" / name))
    assert names(tmp_path / "2024") == {"m", "another"}
    assert_same(read(tmp_path / "2024" / "m"), arrays())


def test_without_a_destination_a_step_gets_the_item(source, tmp_path):
    step = tmp_path / "root" / "3"
    ost.link(source, step / "policy")
    ost.link(make(step / "reference"))
    record = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    assert record["item_handlers"].keys() == {"policy", "reference"}


def test_the_step_has_the_metadata_of_the_family(tmp_path):
    variant = {"scan_layers": False}
    ost.link(DATA / "qwen3" / "hf", tmp_path / "0" / "items", family="maxtext", variant=variant)
    ost.convert(DATA / "qwen3" / "hf", tmp_path / "converted", to="orbax", family="maxtext", variant=variant)
    linked, converted = (
        json.loads((step / "_CHECKPOINT_METADATA").read_text())
        for step in (tmp_path / "0", tmp_path / "converted" / "0")
    )
    for key in ("item_handlers", "metrics"):
        assert linked[key] == converted[key], key
    # A link records its switches in its own note.
    assert linked["custom_metadata"] == {"scan_layers": converted["custom_metadata"]["scan_layers"]}
    assert linked["commit_timestamp_nsecs"] > 0
