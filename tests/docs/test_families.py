"""The pages on families, tables and quantised checkpoints: their examples run on small checkpoints."""

import json
import math
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
from tests.support.files import write
from tests.support.roots import ROOT

PAGE = ROOT / "docs" / "families.md"
OWN = ROOT / "docs" / "own-families.md"
QUANTIZED = ROOT / "docs" / "quantized.md"
TABLES = ROOT / "docs" / "tables.md"
WIDTH, HIDDEN, VOCABULARY, HEADS, GROUPS, HEAD = 64, 96, 128, 8, 4, 8
BF16 = np.dtype(ml_dtypes.bfloat16)


def checkpoint(directory):
    """A random Llama, as `transformers` stores it."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    for i in range(2):
        h = f"model.layers.{i}."
        shapes |= {h + f"self_attn.{part}_proj.weight": (GROUPS * HEAD, WIDTH) for part in "kv"}
        shapes |= {h + f"mlp.{part}_proj.weight": (HIDDEN, WIDTH) for part in ("gate", "up")}
        shapes |= {
            h + "self_attn.q_proj.weight": (HEADS * HEAD, WIDTH),
            h + "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
            h + "self_attn.rotary_emb.inv_freq": (HEAD // 2,),
            h + "mlp.down_proj.weight": (WIDTH, HIDDEN),
            h + "input_layernorm.weight": (WIDTH,),
            h + "post_attention_layernorm.weight": (WIDTH,),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "vocab_size": VOCABULARY,
    }
    rng = np.random.default_rng(0)
    stored = {name: rng.standard_normal(shape).astype(BF16) for name, shape in shapes.items()}
    directory.mkdir()
    write(directory / "model.safetensors", stored)
    (directory / "config.json").write_text(json.dumps(config))
    return stored


def quantized(source, directory):
    """The same model with its projections in fp8, and scales that differ."""
    directory.mkdir()
    stored = {name: array for file in source.glob("*.safetensors") for name, array in load_file(file).items()}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        stored[name] = stored[name].astype(ml_dtypes.float8_e4m3fn)
        grid = [-(-size // 16) for size in stored[name].shape]
        stored[f"{name}_scale_inv"] = np.arange(math.prod(grid), dtype=np.float32).reshape(grid)
    write(directory / "model.safetensors", stored)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (directory / "config.json").write_text(json.dumps(config))
    return stored


def test_the_examples_of_a_family_of_your_own(tmp_path):
    stored = checkpoint(tmp_path / "llama")
    blocks = examples.python(OWN)
    assert len(blocks) == 9
    names, found = {}, []
    try:
        for block in blocks:
            examples.run(block, tmp_path, names)
            found.append(names.get("params"))
    finally:
        ost.unregister()

    both = np.stack([stored[f"model.layers.1.mlp.{part}_proj.weight"].T for part in ("gate", "up")])
    for params in found[1:3]:
        assert params["layers"]["mlp"]["in"].shape == (2, 2, WIDTH, HIDDEN)
        assert np.asarray(params["layers"]["mlp"]["in"][1]).tobytes() == both.tobytes()
    for params in found[4:6]:
        assert np.asarray(params["layers"]["1"]["mlp"]["in"]).tobytes() == both.tobytes()
    assert "layers" in found[2]
    for directory in ("tuned", "again"):
        saved = ost.open_checkpoint(tmp_path / directory)
        assert set(saved.tensors) == {name for name in stored if "inv_freq" not in name}


def test_the_example_of_codes_and_scales(tmp_path, capsys):
    stored = quantized(examples.QWEN3, tmp_path / "qwen3-fp8")
    names = {}
    (block,) = examples.python(QUANTIZED)
    examples.run(block, tmp_path, names)
    shapes = re.search(r"  # (.*), for blocks of 16 x 16$", block, re.MULTILINE)[1]
    assert capsys.readouterr().out.strip() == shapes
    down = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)]
    codes = np.stack([stored[name].T for name in down], axis=1)
    assert np.asarray(names["wo"]["qvalue"]).tobytes() == codes.tobytes()
    scales = np.stack([stored[f"{name}_scale_inv"].T for name in down], axis=1)
    np.testing.assert_array_equal(names["wo"]["scale"], scales)


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
    linen, of_nnx = examples.python(PAGE)
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


def test_the_examples_of_tables(tmp_path, capsys):
    stored = checkpoint(tmp_path / "llama")
    *blocks, with_tunix = examples.python(TABLES)
    assert len(blocks) == 7
    assert "tunix" in with_tunix  # tests/interop/test_tunix.py runs it
    names = {}
    try:
        for block in blocks:
            examples.run(block, tmp_path, names)
            if "plan = " in block:
                params = names["params"]
                q = stored["model.layers.1.self_attn.q_proj.weight"]
                assert np.asarray(params["layers"]["1"]["attention"]["q"]).tobytes() == q.T.tobytes()
                halves = re.findall(
                    r"^needs ([\d,]+) of ([\d,]+) bytes, and reads", capsys.readouterr().out, re.MULTILINE
                )
                assert [int(half.replace(",", "")) * 2 for half, _ in halves] == [names["plan"].total_bytes] * 2
    finally:
        ost.unregister()
    tuned = load_file(tmp_path / "tuned" / "model.safetensors")
    assert tuned.keys() == {name for name in stored if "inv_freq" not in name}
    assert all(array.tobytes() == stored[name].tobytes() for name, array in tuned.items())
    down = stored["model.layers.1.mlp.down_proj.weight"]
    assert names["model"]["model"]["layers"]["1"]["mlp"]["down_proj"]["kernel"].tobytes() == down.T.tobytes()
    assert names["params"]["layers"]["mlp"]["down"][1].tobytes() == down.T.tobytes()


def test_every_family_is_listed():
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {name: tuple(re.findall(r"`(\w+)`", architectures)) for name, architectures in rows}
    assert listed == {family.name: family.architectures for family in FAMILIES}
