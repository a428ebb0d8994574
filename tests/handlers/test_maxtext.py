"""MaxText's trees through Orbax: restored, planned and saved, against what MaxText's own converter made."""

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from tests.multiprocess.workers_families import (
    made_by_maxtext,
    stored_directory,
    target,
    variant,
)
from tests.support import tiers
from tests.support.compare import names_of
from tests.support.maxtext_trees import (
    DIMENSIONS,
    EACH_TREE,
    ON_TWO_AXES,
    ON_TWO_AXES_FAST,
    assert_restored,
    assert_same_bits,
    checkpointer,
    is_sharded,
    on_one_axis,
)
from tests.support.measure import measured


@EACH_TREE
def test_without_a_target_the_tree_is_what_maxtexts_converter_made(sample, mode):
    with checkpointer(mode) as ckptr:
        found = ckptr.restore(stored_directory(sample))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found))
    assert_same_bits(found, made_by_maxtext(sample, mode))


@EACH_TREE
def test_metadata_is_that_of_the_tree(sample, mode):
    with checkpointer(mode) as ckptr:
        tree = ckptr.metadata(stored_directory(sample)).item_metadata.tree
    expected = made_by_maxtext(sample, mode)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )
    assert {name: leaf.name for name, leaf in names_of(tree).items()} == {name: name for name in names_of(expected)}


@EACH_TREE
@pytest.mark.both_devices(fast="cpu")
def test_sharded_over_each_dimension(sample, mode, line, device):
    directory, expected = stored_directory(sample), made_by_maxtext(sample, mode)
    with checkpointer(mode) as ckptr:
        for dimension in DIMENSIONS:
            item = target(expected, line, on_one_axis(dimension))
            restored, cost = measured(
                lambda item=item: ckptr.restore(directory, args=ost.SafetensorsRestore(item=item))
            )
            assert_restored(restored, item, expected, f"dimension {dimension}")
            (planned,) = ost.plan_restore(directory, item, family="maxtext", variant=variant(mode)).processes
            assert cost["bytes_read"] == [planned.read_bytes]
            assert cost["num_reads"] == cost["storage_reads"]
            if device is None:  # what goes to accelerators is cut into other requests
                assert cost["num_reads"] == [planned.num_requests]


@EACH_TREE
@pytest.mark.both_devices
def test_sharded_over_two_axes(sample, mode, mesh, device):
    """With `ArrayRestoreArgs` in the place of an item."""
    directory, expected = stored_directory(sample), made_by_maxtext(sample, mode)
    few = device is not None and tiers.only_fast
    layouts = 0
    with checkpointer(mode) as ckptr:
        for axes in ON_TWO_AXES_FAST if few else ON_TWO_AXES:
            item = target(expected, mesh, axes)
            if not is_sharded(item):
                continue
            layouts += 1
            restore_args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding), item)
            restored, cost = measured(lambda args=restore_args: ckptr.restore(directory, restore_args=args))
            assert_restored(restored, item, expected, axes)
            (planned,) = ost.plan_restore(directory, restore_args, family="maxtext", variant=variant(mode)).processes
            assert cost["bytes_read"] == [planned.read_bytes]
            if device is None:
                assert cost["num_reads"] == [planned.num_requests]
    assert layouts >= (2 if few else 12)


@EACH_TREE
def test_every_stored_byte_is_read_once(sample, mode):
    item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made_by_maxtext(sample, mode))
    with checkpointer(mode) as ckptr:
        _, cost = measured(lambda: ckptr.restore(stored_directory(sample), args=ost.SafetensorsRestore(item=item)))
    plan = ost.plan_restore(stored_directory(sample), item, family="maxtext", variant=variant(mode))
    assert cost["bytes_read"] == [plan.total_bytes]
    assert plan.processes[0].needed_bytes == plan.total_bytes
    assert plan.over_reads == ()


@EACH_TREE
@pytest.mark.both_devices
def test_a_cast_rounds_once(sample, mode, mesh):
    """What is computed is rounded to the dtype that is asked for, not to the stored one before."""
    expected = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), made_by_maxtext(sample, mode))
    item = target(expected, mesh, ("x", None, "y"))
    with checkpointer(mode) as ckptr:
        restored = ckptr.restore(stored_directory(sample), args=ost.SafetensorsRestore(item=item))
    assert_restored(restored, item, expected, "bfloat16")


@EACH_TREE
@pytest.mark.both_devices
def test_what_is_not_asked_for_is_not_read(sample, mode, line):
    expected = made_by_maxtext(sample, mode)
    item = target(expected, line, ("d",))
    directory = stored_directory(sample)
    item["params"]["decoder"] = jax.tree.map(lambda _: ocp.PLACEHOLDER, item["params"]["decoder"])
    with checkpointer(mode) as ckptr:
        restored, cost = measured(lambda: ckptr.restore(directory, args=ost.SafetensorsRestore(item=item)))
        assert all(leaf is ocp.PLACEHOLDER for leaf in jax.tree.leaves(restored["params"].pop("decoder")))
        del item["params"]["decoder"], expected["params"]["decoder"]
        assert_restored(restored, item, expected, "with placeholders")
        assert cost["bytes_read"] == [sum(leaf.nbytes for leaf in jax.tree.leaves(expected))]
        args = ost.SafetensorsRestore(item=item, partial_restore=True)
        restored, alone = measured(lambda: ckptr.restore(directory, args=args))
    assert_restored(restored, item, expected, "alone")
    assert alone["bytes_read"] == cost["bytes_read"]
