"""The pages on families, tables and quantised checkpoints: their examples run on small checkpoints."""

import json
import re

import flax.nnx as nnx
import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.mapping.families import FAMILIES
from tests.support import examples
from tests.support.family_samples import Sample
from tests.support.roots import ROOT

PAGE = ROOT / "docs" / "families.md"
OWN = ROOT / "docs" / "own-families.md"
QUANTIZED = ROOT / "docs" / "quantized.md"
TABLES = ROOT / "docs" / "tables.md"
BF16 = np.dtype(ml_dtypes.bfloat16)


def test_the_examples_of_a_family_of_your_own(tmp_path):
    stored = examples.make_models(tmp_path)["llama"]
    blocks = examples.python(OWN)
    assert len(blocks) == 6
    names, found = {}, []
    try:
        for block in blocks:
            examples.run(block, tmp_path, names)
            found.append(names.get("params"))
    finally:
        ost.unregister()

    both = np.stack([stored[f"model.layers.1.mlp.{part}_proj.weight"].T for part in ("gate", "up")])
    for params in (found[1], found[2], found[5]):
        assert params["layers"]["mlp"]["in"].shape == (2, 2, 64, 96)
        assert np.asarray(params["layers"]["mlp"]["in"][1]).tobytes() == both.tobytes()
    for params in found[3:5]:  # not stacked, by a switch and by the tree
        assert np.asarray(params["layers"]["1"]["mlp"]["in"]).tobytes() == both.tobytes()
    for directory in ("mine", "again"):
        saved = ost.open_checkpoint(tmp_path / directory)
        assert set(saved.tensors) == {name for name in stored if "inv_freq" not in name}


def test_the_examples_of_quantised_checkpoints(tmp_path, capsys):
    stored = examples.make_models(tmp_path)["qwen3-fp8"]
    names, printed = {}, []
    for block in examples.blocks(QUANTIZED, "python", "sh"):
        examples.run(block, tmp_path, names)
        out = capsys.readouterr().out.strip()
        if block.language == "python" and "print(" in block.text:
            assert out == re.search(r"^print\(.*\)  # (.*?)(, for blocks of 16 x 16)?$", block.text, re.MULTILINE)[1]
        printed.append(out)
    assert len(printed) == 5
    again = ost.load(tmp_path / "fp8-again", family="identity")
    assert {name: array.tobytes() for name, array in again.items()} == {
        name: array.tobytes() for name, array in stored.items()
    }
    plain = ost.load(tmp_path / "qwen3-plain")
    assert plain.keys() == {name.removesuffix("_scale_inv") for name in stored}
    name = "model.layers.1.mlp.down_proj.weight"
    scale = stored[f"{name}_scale_inv"].repeat(16, 0).repeat(16, 1)
    wanted = (stored[name].astype(np.float32) * scale).astype(BF16)
    assert plain[name].tobytes() == wanted.tobytes()
    assert names["plain"]["model"]["layers"]["1"]["mlp"]["down_proj"]["weight"].tobytes() == wanted.tobytes()
    assert "quantization_config" not in json.loads((tmp_path / "qwen3-plain" / "config.json").read_text())
    down = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)]
    codes = np.stack([stored[name].T for name in down], axis=1)
    assert np.asarray(names["wo"]["qvalue"]).tobytes() == codes.tobytes()
    scales = np.stack([stored[f"{name}_scale_inv"].T for name in down], axis=1)
    np.testing.assert_array_equal(names["wo"]["scale"], scales)


def test_the_first_example_of_families(tmp_path, capsys):
    examples.make_models(tmp_path)
    block = examples.python(PAGE)[0]
    examples.run(block, tmp_path, {})
    assert capsys.readouterr().out.strip() == re.search(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)[1]


class Part(nnx.Module):
    """A part of a model, with parameters and a counter, which is not stored."""

    def __init__(self, tree):
        for name, child in tree.items():
            setattr(self, name, Part(child) if isinstance(child, dict) else nnx.Param(child))
        self.count = nnx.RngCount(jnp.zeros((), jnp.uint32))


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unscanned"])
def test_the_examples_for_maxtext(scan_layers, mesh):
    """With abstract states as MaxText makes them: of Linen, and of NNX with other variables beside the parameters."""
    sample = Sample("qwen3")
    arrays = sample.made_by_maxtext(scan_layers)

    def sharding(shape):
        axes = (axis if size % mesh.shape[axis] == 0 else None for size, axis in zip(shape, ("x", "y"), strict=False))
        return NamedSharding(mesh, P(*axes))

    shapes = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding(array.shape))
        for name, array in arrays.items()
    }
    tree = flax.traverse_util.unflatten_dict(shapes, sep=".")
    names = {
        "ost": ost,
        "nnx": nnx,
        "state": TrainState(step=0, apply_fn=None, params=tree, tx=None, opt_state={}),
        "model": Part(tree["params"]),
    }
    _, linen, of_nnx, _ = examples.python(PAGE)
    for block in (linen, of_nnx):
        exec(block.replace("/models/qwen3", f"{sample.directory / 'hf'}"), names)
    found = names["nnx"].to_pure_dict(nnx.state(names["model"], nnx.Param))
    for params in (names["state"].params, {"params": found}):
        leaves = flax.traverse_util.flatten_dict(params, sep=".")
        assert leaves.keys() == arrays.keys()
        for name, leaf in leaves.items():
            assert leaf.sharding == shapes[name].sharding
            assert (leaf.dtype, np.asarray(leaf).tobytes()) == (arrays[name].dtype, arrays[name].tobytes())
    assert len({leaf.sharding.spec for leaf in shapes.values()}) > 1
    assert names["model"].decoder.count[...] == 0


def test_the_example_of_maxtexts_adapters(tmp_path):
    examples.make_models(tmp_path)
    names = {"ost": ost}
    examples.run(examples.python(PAGE)[3], tmp_path, names)
    assert names["adapters"]["decoder"]["layers"]["mlp"].keys() == {"wi_1"}
    source, tuned = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("qwen3-lora", "qwen3-lora-maxtext")
    )
    assert {name: array.tobytes() for name, array in tuned.items()} == {
        name: array.tobytes() for name, array in source.items()
    }


def test_the_examples_of_tables(tmp_path):
    stored = examples.make_models(tmp_path)["llama"]
    others = ("from tunix", "sgl_jax", "keras_hub")  # tests/interop runs them
    blocks = [block for block in examples.python(TABLES) if not any(name in block for name in others)]
    assert len(blocks) == 3
    names, found = {}, []
    for block in blocks:
        examples.run(block, tmp_path, names)
        found.append(names["params"])
    q = stored["model.layers.1.self_attn.q_proj.weight"]
    assert np.asarray(found[0]["layers"]["1"]["attention"]["q"]).tobytes() == q.T.tobytes()
    tuned = {
        name: array
        for file in (tmp_path / "from-table").glob("*.safetensors")
        for name, array in load_file(file).items()
    }
    assert tuned.keys() == {name for name in stored if "inv_freq" not in name}
    assert all(array.tobytes() == stored[name].tobytes() for name, array in tuned.items())
    down = stored["model.layers.1.mlp.down_proj.weight"]
    assert names["model"]["model"]["layers"]["1"]["mlp"]["down_proj"]["kernel"].tobytes() == down.T.tobytes()
    assert names["params"]["layers"]["mlp"]["down"][1].tobytes() == down.T.tobytes()


def test_every_family_is_listed():
    rows = re.findall(r"^\| `(\w+\.\w+|dequantized)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {name: tuple(re.findall(r"`(\w+)`", architectures)) for name, architectures in rows}
    assert listed == {family.name: family.architectures for family in FAMILIES}
