"""`inspect` against what the `safetensors` package says of the same files."""

import json
import re
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.support import examples
from tests.support.roots import TESTDATA

MAXTEXT = ("--family", "maxtext")
QWEN3 = TESTDATA / "maxtext" / "qwen3" / "hf"

FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_json_says_what_the_reference_says(cli, directory):
    result = cli("inspect", directory, "--json")
    assert (result.status, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["path"] == str(directory)
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    seen = 0
    for file in FILES:
        content = (directory / file).read_bytes()
        with safe_open(directory / file, framework="np") as reference:
            for name in reference.keys():  # noqa: SIM118  (a handle is no mapping)
                array, stored = reference.get_tensor(name), reference.get_slice(name)
                tensor = tensors[name]
                assert (tensor["dtype"], tensor["shape"]) == (stored.get_dtype(), stored.get_shape())
                assert (tensor["bytes"], tensor["parameters"], tensor["file"]) == (array.nbytes, array.size, file)
                assert content[tensor["offset"] :][: array.nbytes] == array.tobytes()
                seen += 1
    assert seen == len(tensors) == found["totals"]["tensors"]
    assert found["files"] == [{"file": file, "bytes": (directory / file).stat().st_size} for file in FILES]


def test_totals(cli, single, parts):
    found = json.loads(cli("inspect", single, "--json").out)
    arrays = (parts[0] | parts[1]).values()
    nbytes, size = sum(array.nbytes for array in arrays), sum(array.size for array in arrays)
    assert found["totals"] == {"tensors": 5, "parameters": size, "bytes": nbytes, "files": 1}
    assert list(found["dtypes"]) == ["F32", "F16", "U8", "I64"]
    assert found["dtypes"]["F32"] == {"tensors": 2, "parameters": 65 * 48, "bytes": 4 * 65 * 48}
    assert found["metadata"] == {"format": "np"}


def test_a_pipe_gets_lines_of_fields(cli, directory):
    result = cli("inspect", directory)
    tensors, dtypes, totals = result.blocks
    assert tensors[0] == ["name", "dtype", "shape", "bytes", "file"]
    assert ["layer.0.kernel", "F32", "[64,48]", "12288", FILES[0]] in tensors
    assert ["steps", "I64", "[]", "8", FILES[0]] in tensors
    assert dtypes[0] == ["dtype", "tensors", "parameters", "bytes"]
    assert dict(totals) == {"tensors": "5", "parameters": "3230", "bytes": "12693", "files": "2"}
    assert result.out.isascii()
    assert "\x1b" not in result.out


def test_long_and_hostile_names_stay_whole_and_on_their_line(cli, tmp_path):
    name = "x" * 500 + "\t\n\x1b[31m\u202e"
    save_file({name: np.zeros(1, np.float32)}, tmp_path / "a.safetensors")
    result = cli("inspect", tmp_path)
    (_, row), totals = result.blocks
    assert row == ["x" * 500 + "\\t\\n\\x1b[31m\\u202e", "F32", "[1]", "4", "a.safetensors"]
    assert json.loads(cli("inspect", tmp_path, "--json").out)["tensors"][0]["name"] == name
    assert ["tensors", "1"] in totals  # and no block of dtypes where there is one


def test_no_tensors(cli, tmp_path):
    save_file({}, tmp_path / "a.safetensors")
    result = cli("inspect", tmp_path)
    assert result.status == 0
    assert result.facts == {"tensors": "0", "parameters": "0", "bytes": "0", "files": "1"}
    assert json.loads(cli("inspect", tmp_path, "--json").out)["tensors"] == []


def test_an_invalid_file_is_an_error(cli, single):
    single.write_bytes(single.read_bytes()[:-1])
    result = cli("inspect", single)
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith(f"error: {single}: expected")
    assert result.err.count("\n") == 1


LAYERS = {f"model.layers.{layer}.{name}": np.zeros((4, layer + 1), np.float32) for layer in range(3) for name in "ab"}
MODEL = LAYERS | {
    "model.embed": np.zeros(8, np.float16),
    "layers_0.b": np.zeros(2, np.int8),
    "layers_11.b": np.ones(3, np.int8),
}


@pytest.fixture
def model(tmp_path):
    save_file(MODEL, tmp_path / "a.safetensors")
    return tmp_path


@pytest.mark.parametrize("pattern", [r"\.a$", "embed|layers_"])
def test_only_some_names(cli, model, pattern):
    found = json.loads(cli("inspect", model, "--grep", pattern, "--json").out)
    wanted = {name for name in MODEL if re.search(pattern, name)}
    assert {tensor["name"] for tensor in found["tensors"]} == wanted
    assert found["totals"]["bytes"] == sum(MODEL[name].nbytes for name in wanted)


def test_what_has_other_names_counts_nowhere(cli, directory, tmp_path, monkeypatch):
    found = json.loads(cli("inspect", directory, "--grep", "layer.1", "--json").out)
    assert found["totals"] == {"tensors": 1, "parameters": 96, "bytes": 192, "files": 1}
    assert [file["file"] for file in found["files"]] == FILES[1:]
    examples.make_models(tmp_path / "models")
    for pattern, unused in (("norm", 0), ("inv_freq", 2)):
        llama = json.loads(cli("inspect", tmp_path / "models" / "llama", *MAXTEXT, "--grep", pattern, "--json").out)
        assert llama["totals"]["unused_tensors"] == len(llama["unused"]) == unused
    stored = json.loads(cli("inspect", TESTDATA / "orbax" / "qwen3_unscanned", "--grep", "norm", "--json").out)
    assert (bool(stored["arrays"]), stored["file_bytes"]) == (True, None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = cli("inspect", directory, "--grep", "kernel").out.splitlines()
    assert [line.split()[2:] for line in lines if ".safetensors" in line] == [
        ["1", "12.0", "KiB"],
        ["1", "192", "Bytes"],
    ]


def test_sums_by_the_first_parts_of_names(cli, model):
    found = json.loads(cli("inspect", model, "--depth", "3", "--json").out)
    assert "tensors" not in found
    assert {group["name"]: (group["tensors"], group["parameters"], group["bytes"]) for group in found["groups"]} == {
        "model.layers.*": (6, 48, 192),
        "model.embed": (1, 8, 16),
        "layers_*.b": (2, 5, 5),
    }
    groups, dtypes, totals = cli("inspect", model, "--depth", "4", "--grep", r"^model").blocks
    assert groups[0] == ["name", "tensors", "parameters", "bytes"]
    assert {group[0] for group in groups[1:]} == {"model.layers.*.a", "model.layers.*.b", "model.embed"}
    assert [row[0] for row in dtypes] == ["dtype", "F32", "F16"]
    assert dict(totals)["tensors"] == "7"


def test_leaves_and_arrays_by_name(cli):
    family = (*MAXTEXT, "--variant", "scan_layers=false")
    leaves = json.loads(cli("inspect", QWEN3, *family, "--grep", "mlp", "--json").out)
    assert leaves["leaves"]
    assert all("mlp" in leaf["path"] for leaf in leaves["leaves"])
    assert leaves["totals"]["tensors"] == len(leaves["leaves"])
    groups = json.loads(cli("inspect", QWEN3, *family, "--depth", "3", "--json").out)["groups"]
    assert [group["name"] for group in groups if "layers" in group["name"]] == ["params.decoder.layers_*"]


@pytest.mark.parametrize("arguments", [("--depth", "0"), ("--depth", "x"), ("--grep", "(")])
def test_wrong_selections(cli, model, arguments):
    result = cli("inspect", model, *arguments)
    assert result.status == 2
    assert f"error: argument {arguments[0]}: " in result.err


def test_statistics_of_one_tensor(cli, directory, parts):
    array = parts[0]["layer.0.kernel"]
    facts = cli("inspect", directory, "--stats", "layer.0.kernel").facts
    assert (facts["dtype"], facts["shape"], facts["NaNs"]) == ("float32", "[64,48]", "0")
    assert float(facts["minimum"]) == pytest.approx(array.min(), rel=1e-5)
    assert facts["first values"] == " ".join(f"{value:.6g}" for value in array[0, :8].tolist())
    found = json.loads(cli("inspect", directory, "--stats", "steps", "--json").out)
    assert (found["minimum"], found["maximum"], found["first"], found["nans"]) == (7, 7, [7], 0)


def test_statistics_of_a_leaf(cli):
    arguments = ("--family", "maxtext", "--stats", "params.token_embedder.embedding", "--json")
    leaf = json.loads(cli("inspect", QWEN3, *arguments).out)
    tensor = json.loads(cli("inspect", QWEN3, "--stats", "model.embed_tokens.weight", "--json").out)
    assert {**leaf, "name": tensor["name"]} == tensor


def test_statistics_of_codes_are_of_what_they_stand_for(cli, tmp_path):
    directory = tmp_path / "fp8"
    directory.mkdir()
    codes = np.array([[1, 2], [4, -8]], np.float32)
    quantized = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantized}))
    stored = {"w": codes.astype(ml_dtypes.float8_e4m3fn), "w_scale_inv": np.full((1, 1), 0.5, np.float32)}
    save_file(stored, directory / "model.safetensors")
    found = json.loads(cli("inspect", directory, "--stats", "w", "--json").out)
    assert (found["dtype"], found["minimum"], found["maximum"]) == ("float32", -4, 2)


def test_statistics_that_json_has_no_number_for(cli, tmp_path):
    save_file({"x": np.array([np.inf, np.nan], np.float32)}, tmp_path / "a.safetensors")
    found = json.loads(cli("inspect", tmp_path, "--stats", "x", "--json").out, parse_constant=pytest.fail)
    assert (found["maximum"], found["first"], found["nans"]) == ("inf", ["inf", "nan"], 1)


def test_statistics_have_one_name(cli, model):
    result = cli("inspect", model, "--stats", "model.embed", "--depth", "2")
    assert result.status == 2
    assert "--depth lists names, and --stats has one" in result.err
    result = cli("inspect", model, "--stats", "model.embd")
    assert (result.status, result.out) == (1, "")
    assert "has no array 'model.embd' (nearest: 'model.embed')" in result.err


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ("ct-int4-g128-asym", {"int4, group 128"}),
        ("ct-mxfp8", {"MXFP8, group 32"}),
        ("mxfp8-method", {"MXFP8, group 32"}),
        ("ct-fp8-channel-dynamic", {"fp8, channel"}),
        ("ct-nvfp4", {"NVFP4, group 16"}),
        ("mlx-4bit-g64", {"MLX 4 bits, group 64", "MLX 8 bits, group 64"}),
        ("gemma-4bit", {"Gemma 2 bits, group 64", "Gemma 4 bits, group 64", "Gemma 4 bits, group 96", "int8, channel"}),
        ("mlx-mxfp4", {"MXFP4, group 32"}),
        ("bnb-nf4-double", {"bitsandbytes 4 bits, group 64"}),
        ("ct-int8-w8a8", {"int8, channel"}),
        ("autoround-gptq-4bit", {"GPTQ 4 bits, group 32", "GPTQ 8 bits, group 64"}),
        ("gptq-dynamic", {"GPTQ 4 bits, group 32", "GPTQ 8 bits, group 64"}),
        ("modelopt-nvfp4-llama4", {"NVFP4, group 16"}),
        ("nvfp4-experts-last-axis", {"NVFP4, group 16"}),
        ("modelopt-fp8-llama4", {"fp8, tensor"}),
        ("mimo-qkv-2-shards", {"fp8, block 128 x 128"}),
    ],
)
def test_formats_of_quantised_tensors(cli, checkpoint, expected):
    tensors = json.loads(cli("inspect", TESTDATA / "quantized" / checkpoint, "--json").out)["tensors"]
    assert {tensor["quantized"] for tensor in tensors} - {None} == expected


def test_layers_are_in_their_order(cli, tmp_path):
    names = ["model.embed_tokens", "model.layers.2.a", "model.layers.2.b", "model.layers.10.a", "lm_head"]
    save_file({name: np.zeros(1, np.float32) for name in sorted(names)}, tmp_path / "a.safetensors")
    assert [row[0] for row in cli("inspect", tmp_path).blocks[0][1:]] == names
    found = json.loads(cli("inspect", tmp_path, "--json").out)["tensors"]
    assert [tensor["name"] for tensor in found] == names
    chosen = cli("inspect", tmp_path, "--grep", "a$|b$").blocks[0][1:]
    assert [row[0] for row in chosen] == names[1:4]
