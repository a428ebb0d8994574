"""MaxText's trees, saved: the files that they were restored from, within a rounding."""

import json

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from tests.multiprocess.workers_families import (
    config_of,
    made_by_maxtext,
    sharded,
    stored_directory,
    target,
)
from tests.support.maxtext_trees import (
    DIMENSIONS,
    EACH_MOVED_TREE,
    EACH_TREE,
    assert_same_bits,
    checkpointer,
    content,
    on_one_axis,
    save,
    saved_names,
    stored,
)


@EACH_MOVED_TREE
def test_there_and_back_bit_for_bit(tmp_path, sample, mode):
    with checkpointer(mode) as ckptr:
        save(ckptr, tmp_path / "saved", sample, ckptr.restore(stored_directory(sample)))
    expected = stored(stored_directory(sample))
    assert_same_bits(stored(tmp_path / "saved"), {name: expected[name] for name in saved_names(sample)})
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config_of(sample)
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    assert ost.verify(tmp_path / "saved") == []


@pytest.mark.parametrize(("sample", "mode"), [("llama4", "scanned"), ("qwen3_omni", "unscanned")])
def test_models_with_towers_there_and_back(tmp_path, sample, mode):
    """Towers too, on eight devices; MaxText stacks a Llama 4 beside its tower."""
    with checkpointer(mode) as ckptr:
        leaves = ckptr.metadata(stored_directory(sample)).item_metadata.tree
        item = target(leaves, jax.sharding.Mesh(np.array(jax.devices()), ("d",)), (None, "d"))
        tree = ckptr.restore(stored_directory(sample), args=ost.SafetensorsRestore(item=item))
        save(ckptr, tmp_path / "saved", sample, tree)
    assert_same_bits(stored(tmp_path / "saved"), stored(stored_directory(sample)))
    assert ost.verify(tmp_path / "saved") == []


def test_there_and_back_in_bfloat16(tmp_path):
    """Saved with another dtype than it has in memory, too."""
    sample = "deepseek3_mtp"
    tree = made_by_maxtext(sample, "scanned")
    narrow = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), tree)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(dtype=ml_dtypes.bfloat16), tree)
    with checkpointer() as ckptr:
        save(ckptr, tmp_path / "narrow", sample, narrow)
        save(ckptr, tmp_path / "cast", sample, tree, save_args=save_args)
        assert_same_bits(ckptr.restore(tmp_path / "narrow"), narrow)
    assert content(tmp_path / "cast") == content(tmp_path / "narrow")


@EACH_TREE
def test_the_bytes_do_not_depend_on_how_the_tree_is_sharded(tmp_path, sample, mode, line, mesh):
    tree = made_by_maxtext(sample, mode)
    layouts = [(line, on_one_axis(dimension)) for dimension in DIMENSIONS]
    layouts += [(mesh, ("x", "y")), (mesh, ("y", None, "x")), (mesh, (None, "x", None, "y")), (mesh, ())]
    with checkpointer(mode) as ckptr:
        save(ckptr, tmp_path / "numpy", sample, tree)
        expected = content(tmp_path / "numpy")
        assert len(expected) > 3
        for number, (devices, axes) in enumerate(layouts):
            save(ckptr, tmp_path / str(number), sample, sharded(tree, devices, axes))
            assert content(tmp_path / str(number)) == expected, axes


@EACH_TREE
def test_both_trees_are_saved_as_the_same_files(tmp_path, sample, mode):
    """Scanned or not, and with layers in another dimension."""
    with checkpointer("scanned", param_scan_axis=0) as ckptr:
        save(ckptr, tmp_path / "one", sample, ckptr.restore(stored_directory(sample)))
    with checkpointer(mode) as ckptr:
        save(ckptr, tmp_path / "other", sample, made_by_maxtext(sample, mode))
    assert content(tmp_path / "one") == content(tmp_path / "other")


def test_a_tree_that_does_not_fit_leaves_no_file(tmp_path):
    tree = made_by_maxtext("qwen3", "scanned")
    other = made_by_maxtext("qwen3", "unscanned")
    wider = config_of("qwen3") | {"intermediate_size": 56}
    for number, (given, config, message) in enumerate(
        [
            (other, config_of("qwen3"), r"params\.decoder\.layers\..* is missing"),
            (tree, wider, r"mlp\.wi_0\.kernel, of .*expected \(32, 3, 56\), found \(32, 3, 48\)"),
            (tree, {**config_of("qwen3"), "tie_word_embeddings": False}, r"logits_dense\.kernel is missing"),
            (tree, None, r"config\.json; pass like= or config=: the family needs a config\.json$"),
            (tree, config_of("llama3.1"), r"query_norm\.scale is not in the family's tree"),
        ]
    ):
        with checkpointer() as ckptr, pytest.raises(ost.MappingError, match=message):
            save(ckptr, tmp_path / str(number), "qwen3", given, config=config)
        assert not (tmp_path / str(number)).exists()
    assert not list(tmp_path.rglob("*.safetensors"))
