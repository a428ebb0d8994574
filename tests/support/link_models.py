"""A small model to link, and what Orbax reads of a link."""

import json

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from orbax_safetensors.mapping import Family, Tree, stack, tensor
from tests.support.files import write, write_indexed
from tests.support.roots import TESTDATA

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {"embed": (64, 16), "layers.0.w": (16, 32), "layers.1.w": (16, 32), "norm": (16,), "step": ()}
DATA = TESTDATA / "maxtext"
CONFIG = {"architectures": ["Mine"], "model_type": "mine"}

# The files of a link, and of a model that `make` has written.
OF_A_LINK = {
    "_CHECKPOINT_METADATA", "_LINKED_FILES", "_METADATA", "_sharding", "array_metadatas", "commit_success.txt", "d",
    "manifest.ocdbt",
}  # fmt: skip
OF_A_MODEL = {
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
}


def arrays(seed=0):
    """The tensors of a model, by name: small integers, so that all that is computed of them is exact."""
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.integers(-8, 8, shape), np.float32).astype(BF16) for name, shape in SHAPES.items()}


def make(directory, files=2, seed=0):
    """Writes a model with a config."""
    directory.mkdir(parents=True)
    whole = list(arrays(seed).items())
    if files == 1:
        write(directory / "model.safetensors", dict(whole))
    else:
        write_indexed(directory, [dict(whole[number::files]) for number in range(files)])
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def _tree(config):
    layers = [tensor(f"layers.{number}.w", (16, 32)).T for number in range(2)]
    return Tree(
        {
            "embed": tensor("embed", (64, 16)).scale(2),
            "layers.w": stack(layers, 1),
            "norm": tensor("norm", (16,)).offset(1),
            "step": tensor("step", ()),
        }
    )


# A family of which two leaves are computed.
FAMILY = Family("mine", ("Mine",), _tree)
MADE = ("embed", "norm")


def mapped(seed=0):
    """The leaves that the family makes of the model."""
    stored = arrays(seed)
    return {
        "embed": (stored["embed"].astype(np.float32) * 2).astype(BF16),
        "layers.w": np.stack([stored[f"layers.{number}.w"].T for number in range(2)], 1),
        "norm": (stored["norm"].astype(np.float32) + 1).astype(BF16),
        "step": stored["step"],
    }


def read(path):
    """The arrays that Orbax finds in a directory, by name."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        found = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))
    return {
        jax.tree_util.keystr(at, simple=True, separator="."): leaf
        for at, leaf in jax.tree_util.tree_leaves_with_path(found)
    }


def assert_same(found, expected):
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def made_by_maxtext(name):
    sample, mode = name.split()
    return DATA / sample / f"mt_{mode}.npz"
