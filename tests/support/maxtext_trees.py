"""Trees of MaxText with their shardings, and how restored ones are compared."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.record import RECORD_NAME
from tests.multiprocess.workers_families import (
    MAX_FILE_BYTES,
    config_of,
    stored_directory,
    variant,
)
from tests.support.compare import names_of

MODES = ("scanned", "unscanned")
# `tests/mapping` has all trees. Of these a save gives back the bits: experts and a layer of prediction, gates and ups
# that are stored in turn (as published, with codes of four bits), and a tied vocabulary.
MOVED = [("deepseek3_mtp", "scanned"), ("gpt-oss", "unscanned"), ("qwen3", "unscanned")]
EACH_MOVED_TREE = pytest.mark.parametrize(("sample", "mode"), MOVED)
# And one with cycles of layers, layers that remain, and parameters that are computed.
EACH_TREE = pytest.mark.parametrize(("sample", "mode"), [*MOVED, ("gemma3", "scanned")])
DIMENSIONS = range(4)
# For every two dimensions one axis of a mesh each, and for each dimension both of them.
ON_TWO_AXES = [
    *[tuple({first: "x", second: "y"}.get(at) for at in DIMENSIONS) for first in DIMENSIONS for second in DIMENSIONS],
    *[tuple(("y", "x") if at == dimension else None for at in DIMENSIONS) for dimension in DIMENSIONS],
]
# Of these a few, in which each dimension is cut, for what compiles programs for each.
ON_TWO_AXES_FAST = [("x", "y", None, None), ("y", None, "x", None), (None, None, None, ("y", "x"))]


def checkpointer(mode="scanned", **more):
    return ocp.Checkpointer(ost.SafetensorsHandler(family="maxtext", variant=variant(mode) | more))


def on_one_axis(dimension):
    return tuple("d" if at == dimension else None for at in DIMENSIONS)


def assert_same_bits(found, expected, where=""):
    assert jax.tree.structure(found) == jax.tree.structure(expected), where
    for (name, leaf), other in zip(names_of(found).items(), jax.tree.leaves(expected), strict=True):
        leaf = np.asarray(leaf)
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype), f"{where}: {name}"
        assert leaf.tobytes() == other.tobytes(), f"{where}: {name}"


def assert_restored(found, item, expected, where):
    """The shardings that were asked for, and in every shard the bits of its part of the whole."""
    assert jax.tree.structure(found) == jax.tree.structure(expected), where
    for (name, leaf), wanted, whole in zip(
        names_of(found).items(), jax.tree.leaves(item), jax.tree.leaves(expected), strict=True
    ):
        assert (leaf.sharding, leaf.shape, leaf.dtype) == (wanted.sharding, whole.shape, whole.dtype), (
            f"{where}: {name}"
        )
        whole = np.asarray(whole)  # JAX would compile each slice
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes(), f"{where}: {name}{shard.index}"


def is_sharded(item):
    return any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(item))


def stored(directory):
    tensors = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def content(directory):
    """Every file of a model, with its bytes, without the record of the tree that it was saved from."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if ("safetensors" in path.name or path.name == "config.json") and path.name != RECORD_NAME
    }


def saved_names(sample):
    """The stored tensors that a tree is made of: MaxText has no place for copies of what the model has elsewhere."""
    tensors = stored(stored_directory(sample))
    copies = {f"model.layers.4.{name}.weight" for name in ("embed_tokens", "shared_head.head", "shared_head.norm")}
    if sample != "deepseek3_mtp":
        assert not copies & tensors.keys()
    return tensors.keys() - copies


def save(ckptr, directory, sample, tree, **changes):
    args = {"config": config_of(sample), "max_file_bytes": MAX_FILE_BYTES} | changes
    ckptr.save(directory, args=ost.SafetensorsSave(tree, **args))
