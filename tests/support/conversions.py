"""Sources of conversions, and what their results hold."""

import re

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

import orbax_safetensors as ost
from tests.support.family_samples import TREES, made_with
from tests.support.files import random_bits, write_indexed
from tests.support.roots import TESTDATA

# Samples, and whether layers are stacked. Scanned, MaxText's script for Llama 4 drops the tower.
MODELS = [(name, mode == "scanned") for name, mode in TREES if not (name.startswith("llama4") and mode == "scanned")]
# These families multiply or add, so that rounding keeps the way back from being exact.
COMPUTED = ("gemma", "gemma2", "gemma3", "gemma4", "llama3.1")
# What MaxText has no place for.
UNUSED = {
    "deepseek3_mtp": r"model\.layers\.4\.(embed_tokens|shared_head\.\w+)\.weight",
    "deepseek4": r".*\.gate\.(tid2eid|bias)",
    "gemma4_small": r"model\.(embed_vision|vision_tower)\..*",
}
ORBAX = {"deepseek3_scanned": "deepseek3", "qwen3_unscanned": "qwen3"}
BF16 = np.dtype(ml_dtypes.bfloat16)
SMALL = 40_000  # bytes of memory with which everything takes many tiles


def variant_of(model, scanned):
    return made_with(model, "scanned" if scanned else "unscanned") | ({"mtp": True} if model.endswith("mtp") else {})


def restored(path):
    """What stock Orbax has of a checkpoint: the tree, and its arrays by name."""
    tree = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path)
    arrays = {
        jax.tree_util.keystr(at, simple=True, separator="."): leaf
        for at, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    return tree, arrays


def tensors(path):
    return ost.SafetensorsHandler().restore(epath.Path(path))


def same_bits(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def all_same(found, expected):
    assert sorted(found) == sorted(expected)
    for name in expected:
        same_bits(found[name], expected[name])


def unused(model, names):
    """Names of stored tensors that MaxText has no place for."""
    return {name for name in names if re.fullmatch(UNUSED.get(model, ""), name)}


def of_maxtext(model, scanned):
    """MaxText's own arrays, by the names that they have in its checkpoints."""
    with np.load(TESTDATA / "maxtext" / model / f"mt_{'scanned' if scanned else 'unscanned'}.npz") as arrays:
        return {f"params.{key.replace('-', '.')}": arrays[key] for key in arrays}


def checkpoint(path, **more):
    rng = np.random.default_rng(0)
    path.mkdir(parents=True)
    parts = [
        {"layers.0.w": random_bits(rng, (24, 16), BF16), "layers.0.b": random_bits(rng, (16,), np.dtype("f4"))},
        {"layers.1.w": random_bits(rng, (24, 16), BF16), "scalar": random_bits(rng, (), np.dtype("f4")), **more},
    ]
    write_indexed(path, parts)
    (path / "config.json").write_text('{"quantization_config": 1}')
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("-")
    return {name: array for part in parts for name, array in part.items()}
