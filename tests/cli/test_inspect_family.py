"""`inspect --family` on a Qwen3 that `transformers` made, in MaxText's tree."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

import orbax_safetensors as ost
from tests.support.roots import TESTDATA

QWEN3 = TESTDATA / "qwen3"
# Those that take a family.
COMMANDS = (["inspect"], ["plan", "--mesh", "x=2"])
LAYERS, WIDTH, HIDDEN, VOCABULARY = 3, 32, 48, 64
H = "model.layers.{0..2}."
MADE_OF = {
    "params.token_embedder.embedding": "model.embed_tokens.weight",
    "params.decoder.decoder_norm.scale": "model.norm.weight",
    "params.decoder.layers.pre_self_attention_layer_norm.scale": H + "input_layernorm.weight",
    "params.decoder.layers.post_self_attention_layer_norm.scale": H + "post_attention_layernorm.weight",
    "params.decoder.layers.self_attention.query.kernel": H + "self_attn.q_proj.weight",
    "params.decoder.layers.self_attention.key.kernel": H + "self_attn.k_proj.weight",
    "params.decoder.layers.self_attention.value.kernel": H + "self_attn.v_proj.weight",
    "params.decoder.layers.self_attention.out.kernel": H + "self_attn.o_proj.weight",
    "params.decoder.layers.self_attention.query_norm.scale": H + "self_attn.q_norm.weight",
    "params.decoder.layers.self_attention.key_norm.scale": H + "self_attn.k_norm.weight",
    "params.decoder.layers.mlp.wi_0.kernel": H + "mlp.gate_proj.weight",
    "params.decoder.layers.mlp.wi_1.kernel": H + "mlp.up_proj.weight",
    "params.decoder.layers.mlp.wo.kernel": H + "mlp.down_proj.weight",
}


def stored():
    return {name: array for file in QWEN3.glob("*.safetensors") for name, array in load_file(file).items()}


def tree(cli, path, *argv):
    result = cli("inspect", path, "--family", *argv, "--json")
    assert (result.status, result.err) == (0, "")
    return json.loads(result.out)


@pytest.fixture
def model(tmp_path):
    """A copy in one file, and a way to change tensors and config."""

    def write(change=lambda tensors, config: None):
        tensors, config = stored(), json.loads((QWEN3 / "config.json").read_text())
        change(tensors, config)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.mark.parametrize("scan_layers", [True, False])
def test_json_says_what_is_restored(cli, scan_layers):
    found = tree(cli, QWEN3, "maxtext", "--variant", f"scan_layers={json.dumps(scan_layers)}")
    assert (found["path"], found["family"]) == (str(QWEN3), "maxtext.qwen3")
    assert found["variant"] == {"scan_layers": scan_layers}
    handler = ost.SafetensorsHandler(family="maxtext", variant={"scan_layers": scan_layers})
    restored = jax.tree_util.tree_leaves_with_path(ocp.Checkpointer(handler).restore(QWEN3))
    arrays = {".".join(key.key for key in path): array for path, array in restored}
    leaves = {leaf["path"]: leaf for leaf in found["leaves"]}
    assert leaves.keys() == arrays.keys()
    for path, array in arrays.items():
        leaf = leaves[path]
        assert (leaf["dtype"], tuple(leaf["shape"])) == (array.dtype.name, array.shape)
        assert (leaf["parameters"], leaf["bytes"]) == (array.size, array.nbytes)
    names = [name for leaf in leaves.values() for name in leaf["tensors"]]
    assert len(names) == len(set(names)) == 35
    assert set(names) == stored().keys()
    assert found["unused"] == []
    size = sum(array.size for array in arrays.values())
    assert found["dtypes"] == {"float32": {"leaves": len(arrays), "parameters": size, "bytes": 4 * size}}
    assert found["totals"] == {
        "leaves": len(arrays),
        "parameters": 34_624,
        "bytes": 4 * 34_624,
        "tensors": 35,
        "unused_tensors": 0,
    }


def test_a_pipe_gets_lines_of_fields(cli):
    result = cli("inspect", QWEN3, "--family", "maxtext.qwen3")
    assert (result.status, result.err) == (0, "")
    (headings, *leaves), totals = result.blocks
    assert headings == ["leaf", "dtype", "shape", "parameters", "bytes", "tensors", "made of"]
    assert {leaf[0]: leaf[-1] for leaf in leaves} == MADE_OF
    kernel = ["params.decoder.layers.mlp.wi_0.kernel", "float32", "[32,3,48]", "4608", "18432", "3"]
    assert kernel in [leaf[:-1] for leaf in leaves]
    assert dict(totals) == {
        "family": "maxtext.qwen3",
        "leaves": "13",
        "parameters": "34624",
        "bytes": "138496",
        "tensors used": "35",
        "tensors not used": "0",
    }
    assert result.out.isascii()
    assert "\x1b" not in result.out


def test_switches_shape_the_tree(cli):
    switches = ["--variant", "param_scan_axis=0", "--variant", "vocab_size=100"]
    result = cli("inspect", QWEN3, "--family", "maxtext", *switches)
    rows = {row[0]: row for row in result.blocks[0]}
    assert rows["params.decoder.layers.mlp.wo.kernel"][2] == f"[{LAYERS},{HIDDEN},{WIDTH}]"
    assert rows["params.token_embedder.embedding"][2:6] == ["[100,32]", "3200", "12800", "1"]
    assert result.facts["family"] == "maxtext.qwen3 param_scan_axis=0 vocab_size=100"
    assert int(result.facts["parameters"]) == 34_624 + (100 - VOCABULARY) * WIDTH


def test_tensors_that_no_leaf_uses(cli, model):
    def tie(tensors, config):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    path = model(tie)
    result = cli("inspect", path, "--family", "maxtext")
    assert result.blocks[1] == [["tensors not used"], ["lm_head.weight"]]
    assert result.facts["tensors used"] == "35"
    assert result.facts["tensors not used"] == "1"
    found = tree(cli, path, "maxtext")
    assert found["unused"] == ["lm_head.weight"]
    assert (found["totals"]["tensors"], found["totals"]["unused_tensors"]) == (35, 1)


def test_quantised_tensors_are_codes_and_scales(cli, model):
    gate = "model.layers.{}.mlp.gate_proj.weight"

    def quantise(tensors, config):
        for name in list(tensors):
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
        for number in range(LAYERS):
            name = gate.format(number)
            tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
            tensors[name + "_scale_inv"] = np.ones((3, 2), np.float32)
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
        config["dtype"] = "bfloat16"

    found = tree(cli, model(quantise), "maxtext")
    (kernel,) = (leaf for leaf in found["leaves"] if leaf["path"] == "params.decoder.layers.mlp.wi_0.kernel")
    names = [gate.format(number) for number in range(LAYERS)]
    assert sorted(kernel["tensors"]) == sorted(names + [name + "_scale_inv" for name in names])
    assert (kernel["dtype"], kernel["shape"]) == ("bfloat16", [WIDTH, LAYERS, HIDDEN])
    assert kernel["bytes"] == 2 * kernel["parameters"]
    assert found["totals"]["tensors"] == 35 + LAYERS
    rows = {row[0]: row for row in cli("inspect", model(quantise), "--family", "maxtext").blocks[0]}
    row = rows["params.decoder.layers.mlp.wi_0.kernel"]
    assert row[-2:] == ["6", gate.format("{0..2}") + ", " + gate.format("{0..2}") + "_scale_inv"]


def test_leaves_of_several_dtypes(cli, model):
    def cast(tensors, config):
        for name in list(tensors):
            if "norm" not in name:
                tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    dtypes = tree(cli, model(cast), "maxtext")["dtypes"]
    assert list(dtypes) == ["bfloat16", "float32"]
    assert dtypes["float32"] == {"leaves": 5, "parameters": 320, "bytes": 1280}
    assert cli("inspect", model(cast), "--family", "maxtext").blocks[1] == [
        ["dtype", "leaves", "parameters", "bytes"],
        ["bfloat16", "8", "34304", "68608"],
        ["float32", "5", "320", "1280"],
    ]


def test_one_file_finds_the_config_beside_it(cli, model):
    found = tree(cli, model() / "model.safetensors", "maxtext")
    assert found["totals"]["leaves"] == 13


def test_without_a_family_a_registered_one_counts_for_nothing(cli):
    before = cli("inspect", QWEN3)
    ost.register(ost.mapping.Family("other.qwen3", ("Qwen3ForCausalLM",), lambda config: {}))
    try:
        assert cli("inspect", QWEN3) == before
    finally:
        ost.unregister()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--family", "nobody"],
            "there is no family 'nobody'; there are dequantized, flax, maxtext, tunix; `orbax-safetensors families`",
        ),
        (["--family", ""], "there is no family ''"),
        (
            ["--family", "lama"],
            "there is no family 'lama' (nearest: 'maxtext.llama4', ",
        ),
        (["--family", "maxtext.llama3"], "model.layers.0.self_attn"),
        (["--family", "maxtext", "--variant", "scan=true"], "maxtext.qwen3 has no switch 'scan'"),
        (["--family", "maxtext", "--variant", "vocab_size=7"], "vocab_size 7 would cut off the vocabulary"),
    ],
)
def test_a_family_that_does_not_fit_is_status_1(cli, options, message):
    for command in COMMANDS:
        result = cli(*command, QWEN3, *options)
        assert (result.status, result.out) == (1, "")
        assert result.err.startswith("error: ")
        assert message in result.err
        assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--family"], "argument --family: expected one argument"),
        (["--family", "maxtext", "--variant", "scan_layers"], "argument --variant: expected KEY=VALUE"),
        (["--family", "maxtext", "--variant", "scan_layers=False"], "argument --variant: expected true, false or null"),
        (["--family", "maxtext", "--variant", "a=1", "--variant", "a=2"], "--variant a is passed twice"),
        (["--variant", "scan_layers=false"], "--variant needs a --family"),
    ],
)
def test_mistakes_are_status_2(cli, options, message):
    for command in COMMANDS:
        result = cli(*command, QWEN3, *options)
        assert (result.status, result.out) == (2, "")
        assert result.err.startswith("usage: orbax-safetensors")
        assert message in result.err


def test_no_config_is_an_error(cli, tmp_path):
    shutil.copy(QWEN3 / "model-00003-of-00003.safetensors", tmp_path / "model.safetensors")
    result = cli("inspect", tmp_path, "--family", "maxtext")
    assert (result.status, result.out) == (1, "")
    assert "no family is for a checkpoint without config.json" in result.err
