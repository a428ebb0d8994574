"""Command lines of conversions, and what they read and make."""

import jax
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file

from tests.support.roots import ROOT

DATA = ROOT / "testdata"
QWEN3 = DATA / "qwen3"
HF = DATA / "maxtext" / "qwen3" / "hf"
ORBAX = DATA / "orbax" / "qwen3_unscanned"
NBYTES = 138_496
FAMILY = ["--family", "maxtext"]
TO_ORBAX = ["--to", "orbax", *FAMILY]
TO_SAFETENSORS = ["--to", "safetensors", *FAMILY, "--config", HF]
SMALL = ["--memory", "40kB"]  # a dozen batches and more

# A signal to the process itself after some batches. Programs that a shell starts in the background ignore interrupts.
AFTER_BATCHES = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from orbax_safetensors.cli import long_run
told, batches = long_run.Reporter.__call__, 0
def call(self, done, total):
    global batches
    told(self, done, total)
    batches += 1
    if batches == 4:
        os.kill(os.getpid(), signal.{})
long_run.Reporter.__call__ = call
"""


def stored(directory):
    """The tensors of all files, as the reference reader has them."""
    return {name: array for file in directory.glob("*.safetensors") for name, array in load_file(file).items()}


def restored(path):
    """The arrays that stock Orbax restores, by name."""
    tree = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(at, simple=True, separator="."): np.asarray(leaf) for at, leaf in leaves}


def of_maxtext(scanned):
    with np.load(DATA / "maxtext" / "qwen3" / f"mt_{'scanned' if scanned else 'unscanned'}.npz") as arrays:
        return {f"params.{key.replace('-', '.')}": arrays[key] for key in arrays}


def same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
