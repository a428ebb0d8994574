"""The page on trees: its examples run as they stand, on small checkpoints in the places that they name."""

import importlib.util
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import orbax_safetensors as ost
from tests.support import examples
from tests.support.files import write
from tests.support.roots import ROOT
from tests.support.small_model import assert_same_bits, names_of

PAGE = ROOT / "docs" / "trees.md"
RNG = np.random.default_rng(0)
HAS_EQUINOX = importlib.util.find_spec("equinox") is not None


def normal(**shapes):
    return {name.replace("__", "."): RNG.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def linear(name, inputs, outputs):
    return normal(**{f"{name}__kernel": (inputs, outputs), f"{name}__bias": (outputs,)})


MLP = linear("up", 16, 32) | linear("layers__0", 32, 32) | linear("layers__1", 32, 32) | linear("down", 32, 16)
DENSE = linear("params__Dense_0", 16, 32)
EQUINOX = {
    f"layers.{at}.{part}": array
    for at, (inputs, outputs) in enumerate([(16, 32), (32, 32), (32, 4)])
    for part, array in normal(weight=(outputs, inputs), bias=(outputs,)).items()
}


@pytest.fixture(autouse=True)
def _unregistered():
    yield
    ost.unregister()


def assert_holds(tree, stored):
    found = {name.removesuffix(".value"): leaf for name, leaf in names_of(tree).items() if isinstance(leaf, jax.Array)}
    assert found.keys() == stored.keys()
    for name, array in stored.items():
        assert_same_bits(found[name], array)


def test_the_examples(tmp_path):
    for name, tensors in (("mlp", MLP), ("dense", DENSE), ("equinox", EQUINOX)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "model.safetensors", tensors)
    blocks = examples.python(PAGE)
    assert len(blocks) == 7
    names = {}
    for at, block in enumerate(blocks):
        if HAS_EQUINOX or not {"equinox", "eqx"} & set(re.findall(r"\w+", block)):
            examples.run(block, tmp_path, names)
        if at == 0:
            assert_holds(names["nnx"].state(names["model"]), MLP)
            assert_holds({name: jax.numpy.asarray(leaf) for name, leaf in saved(tmp_path / "tuned").items()}, MLP)
            assert names["model"].up.kernel.sharding.spec == jax.sharding.PartitionSpec(None, "model")
        elif at == 1:
            rounded = {name: array.astype("bfloat16") for name, array in MLP.items()}
            assert_holds(names["nnx"].state(names["model"]), rounded)
        elif at == 2:
            assert_holds(names["variables"], DENSE)
        elif at in (3, 4, 5) and HAS_EQUINOX:
            assert_holds(names["mlp"], EQUINOX)
            assert saved(tmp_path / "arrays").keys() == EQUINOX.keys()
    assert_holds(names["state"], MLP)


def saved(directory):
    return load_file(directory / "model.safetensors")
