"""The page on trees: its examples run as they stand, on small checkpoints in the places that they name."""

import importlib.util
import re

import jax
from safetensors.numpy import load_file

from tests.support import examples
from tests.support.compare import assert_same_bits, names_of
from tests.support.roots import ROOT

PAGE = ROOT / "docs" / "trees.md"
HAS_EQUINOX = importlib.util.find_spec("equinox") is not None


def assert_holds(tree, stored):
    found = {name.removesuffix(".value"): leaf for name, leaf in names_of(tree).items() if isinstance(leaf, jax.Array)}
    assert found.keys() == stored.keys()
    for name, array in stored.items():
        assert_same_bits(found[name], array)


def test_the_examples(tmp_path):
    models = examples.make_models(tmp_path)
    mlp, dense, equinox = models["mlp"], models["dense"], models["equinox"]
    blocks = examples.python(PAGE)
    assert len(blocks) == 7
    names = {}
    for at, block in enumerate(blocks):
        if HAS_EQUINOX or not {"equinox", "eqx"} & set(re.findall(r"\w+", block)):
            examples.run(block, tmp_path, names)
        if at == 0:
            assert_holds(names["nnx"].state(names["model"]), mlp)
            assert_holds({name: jax.numpy.asarray(leaf) for name, leaf in saved(tmp_path / "mlp-tuned").items()}, mlp)
            assert names["model"].up.kernel.sharding.spec == jax.sharding.PartitionSpec(None, "model")
        elif at == 1:
            assert {"norm.mean", "norm.var"} <= {name.removesuffix(".value") for name in saved(tmp_path / "net")}
            assert_same_bits(names["net"].norm.mean[...], names["trained"].norm.mean[...])
            assert_same_bits(names["net"].dense.kernel[...], names["trained"].dense.kernel[...])
        elif at == 2:
            rounded = {name: array.astype("bfloat16") for name, array in mlp.items()}
            assert_holds(names["nnx"].state(names["model"]), rounded)
        elif at == 3:
            assert_holds(names["variables"], dense)
        elif at in (4, 5, 6) and HAS_EQUINOX:
            assert_holds(names["mlp"], equinox)
            assert saved(tmp_path / "arrays").keys() == equinox.keys()


def saved(directory):
    return load_file(directory / "model.safetensors")
