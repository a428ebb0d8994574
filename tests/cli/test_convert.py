"""`convert` and `reshard` as commands, on files that Hugging Face's libraries and MaxText wrote."""

import json

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.convert.convert_request import FORMATS
from orbax_safetensors.orbax_store import open_orbax
from tests.support.cli_conversions import (
    HF,
    NBYTES,
    ORBAX,
    QWEN3,
    SMALL,
    TO_ORBAX,
    TO_SAFETENSORS,
    of_maxtext,
    restored,
    same,
    stored,
)
from tests.support.steps import step_of

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.mark.parametrize("scanned", [True, False])
def test_there_and_back(cli, tmp_path, scanned):
    made = cli(
        "convert",
        HF,
        tmp_path / "orbax",
        *TO_ORBAX,
        "--variant",
        f"scan_layers={json.dumps(scanned)}",
        "--json",
        *SMALL,
    )
    assert made.status == 0
    document = json.loads(made.out)
    assert document["path"] == str(tmp_path / "orbax" / "0" / "items")
    assert document["nbytes"] == NBYTES
    assert document["processes"] == 1
    assert min(document["seconds"], document["peak_bytes"], document["requests"]) > 0
    arrays = restored(tmp_path / "orbax" / "0" / "items")
    assert arrays.pop("step") == 0
    same(arrays, of_maxtext(scanned))

    back = cli("convert", tmp_path / "orbax", tmp_path / "back", *TO_SAFETENSORS, *SMALL)
    assert (back.status, back.facts["path"], back.facts["bytes"]) == (0, str(tmp_path / "back"), str(NBYTES))
    assert list(back.facts) == ["path", "bytes", "family", "time", "peak memory", "requests"]
    switches = f"scan_layers={json.dumps(scanned)} param_scan_axis=1"
    assert back.facts["family"] == f"maxtext.qwen3 {switches}"
    assert (document["family"], document["variant"]) == (
        "maxtext.qwen3",
        {"scan_layers": scanned, "param_scan_axis": 1},
    )
    same(stored(tmp_path / "back"), stored(HF))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "qwen3"


def test_what_maxtext_wrote(cli, tmp_path):
    assert cli("convert", ORBAX, tmp_path / "hf", *TO_SAFETENSORS).status == 0
    same(stored(tmp_path / "hf"), stored(HF))


def test_the_options_to_orbax(cli, tmp_path):
    result = cli(
        "convert", QWEN3, tmp_path / "orbax", *TO_ORBAX, "--step", "7",
        "--dtype", "norm|scale=float32", "--dtype", "kernel$=bfloat16", "--mesh", "fsdp=2,tensor=2",
        "--spec", "wi_0=fsdp,-,tensor", "--spec", "embedding=fsdp+tensor", "--spec", "wo=,,tensor",
    )  # fmt: skip
    assert result.status == 0
    found = open_orbax(tmp_path / "orbax")
    assert step_of(found) == 7
    leaf = found.leaves["params.params.decoder.layers.mlp.wi_0.kernel"]
    assert leaf.dtype == "bfloat16"
    assert leaf.chunk_shape == (leaf.shape[0] // 2, leaf.shape[1], leaf.shape[2] // 2)
    assert dict(zip(leaf.sharding.axis_names, leaf.sharding.shape, strict=True)) == {"fsdp": 2, "tensor": 2}
    embedding = found.leaves["params.params.token_embedder.embedding"]
    assert embedding.chunk_shape[0] == embedding.shape[0] // 4
    assert found.leaves["params.params.decoder.decoder_norm.scale"].dtype == "float32"


def test_names_are_kept_without_a_family(cli, tmp_path, directory, parts):
    assert cli("convert", directory, tmp_path / "orbax", "--to", "orbax", "--dtype", "float32").status == 0
    found = restored(tmp_path / "orbax" / "0" / "items")
    assert {name: array.dtype.name for name, array in found.items()} == {
        "layer.0.kernel": "float32", "layer.0.bias": "float32", "layer.1.kernel": "float32", "odd": "uint8",
        "steps": found["steps"].dtype.name,
    }  # fmt: skip
    np.testing.assert_array_equal(found["layer.1.kernel"], parts[1]["layer.1.kernel"].astype(np.float32))


def test_reshard_of_orbax(cli, tmp_path):
    result = cli("reshard", ORBAX, tmp_path, "--mesh", "fsdp=2", "--spec", "kernel|embedding=fsdp", *SMALL, "--json")
    assert result.status == 0
    assert json.loads(result.out)["path"] == str(tmp_path / "0" / "items")
    arrays = restored(tmp_path / "0" / "items")
    assert arrays.pop("step") == 0
    same(arrays, of_maxtext(scanned=False))
    leaf = open_orbax(tmp_path).leaves["params.params.token_embedder.embedding"]
    assert leaf.chunk_shape[0] <= leaf.shape[0] // 2


def test_reshard_of_safetensors(cli, tmp_path):
    assert cli("reshard", QWEN3, tmp_path / "one").status == 0
    assert [path.name for path in sorted((tmp_path / "one").iterdir())] == ["config.json", "model.safetensors"]
    assert cli("reshard", QWEN3, tmp_path / "many", "--max-file-bytes", "20kB").status == 0
    for name in ("one", "many"):
        same(stored(tmp_path / name), stored(QWEN3))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert cli("reshard", QWEN3, tmp_path / "mesh", "--mesh", "x=4", "--spec", "embed_tokens=x").status == 0
    assert len(list((tmp_path / "mesh").glob("*.safetensors"))) == 4
    assert cli("verify", tmp_path / "mesh").status == 0
    same(ost.SafetensorsHandler().restore(tmp_path / "mesh"), stored(QWEN3))


def test_names_are_those_of_a_plan(cli, tmp_path):
    """Of a restore from the same source, which prints them."""
    leaves = json.loads(cli("inspect", HF, "--family", "maxtext", "--json").out)["leaves"]
    (name,) = (leaf["path"] for leaf in leaves if leaf["path"].endswith("embedding"))
    planned = json.loads(cli("plan", ORBAX, "--mesh", "x=2", "--spec", "kernel=-,x", "--json").out)
    in_orbax = planned["over_reads"][0]["name"]
    assert (name, in_orbax.split(".")[:3]) == ("params.token_embedder.embedding", ["params", "params", "decoder"])
    for own, plan, convert in (
        (name, ["plan", HF, "--family", "maxtext"], ["convert", HF, tmp_path / "converted", *TO_ORBAX]),
        (in_orbax, ["plan", ORBAX], ["reshard", ORBAX, tmp_path / "resharded"]),
    ):
        for spec, status in ((f"^params.{own}$=x", 2), (f"^{own}$=x", 0)):
            asked = ["--mesh", "x=2", "--spec", spec]
            planned, converted = cli(*plan, *asked), cli(*convert, *asked)
            assert (planned.status, converted.status) == (status, status)
            errors = [result.err.rpartition("error: ")[2] for result in (planned, converted)]
            assert errors[0] == errors[1] if status else not errors[0]
            assert not status or errors[0].startswith("--spec: ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["convert", "none", "to", "--to", "orbax"], "none: no such file or directory"),
        (["reshard", "none", "to"], "none: no such file or directory"),
        (
            ["convert", "empty", "to", "--to", "orbax"],
            "empty: holds no finished checkpoint of Orbax, and no .safetensors file",
        ),
        (["convert", "empty", "to", "--to", "safetensors"], "empty: holds no finished checkpoint of Orbax"),
        (["reshard", "empty", "to"], "empty: holds no finished checkpoint of Orbax"),
        (["convert", QWEN3, "file/to", *TO_ORBAX, "--json"], "file/to/0.orbax-checkpoint-tmp: cannot be made: "),
        (["convert", ORBAX, "file/to", *TO_SAFETENSORS, "--json"], "file/to.partial: cannot be made: "),
        (["reshard", QWEN3, "file/to"], "file/to.partial: cannot be made: "),
        (["convert", QWEN3, "to", *TO_SAFETENSORS], "qwen3: is safetensors already: use reshard"),
        (["convert", ORBAX, "to", *TO_ORBAX], "qwen3_unscanned: is a checkpoint of Orbax already: use reshard"),
        (["convert", QWEN3, "there", *TO_ORBAX, "--step", "3"], "there/3: already exists"),
        (["convert", QWEN3, "to", "--to", "orbax", "--family", "nonsense"], "nonsense"),
        (["convert", ORBAX, "to", *TO_SAFETENSORS, "--memory", "100"], "memory_bytes is 100"),
        (["reshard", QWEN3, "there"], "there: already exists"),
    ],
)
def test_errors_are_one_line_and_status_1(cli, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "3").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    result = cli(*argv)
    assert (result.status, result.out) == (1, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["convert", QWEN3, "to"], "--to"),
        (["convert", QWEN3, "to", "--to", "pickle"], "invalid choice"),
        (["convert", QWEN3, "--to", "orbax"], "DESTINATION"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--config", QWEN3], "--config is not for --to orbax"),
        (["convert", ORBAX, "to", *TO_SAFETENSORS, "--mesh", "x=2"], "--mesh is not for --to safetensors"),
        (["convert", ORBAX, "to", *TO_SAFETENSORS, "--step", "0"], "--step is not for --to safetensors"),
        (["convert", QWEN3, "to", "--to", "orbax", "--variant", "scan_layers=false"], "--variant needs a --family"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--dtype", "float99"], "expected DTYPE or REGEX=DTYPE"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--dtype", "(=float32"], "is not a regular expression"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--dtype", "*.mlp.*=float32"], r"write '\.mlp\.'"),
        (["reshard", QWEN3, "to", "--mesh", "x=2", "--spec", "*norm=x"], "--spec: '*norm' is a regular expression"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--dtype", "float32", "--dtype", "a=float16"], "--dtype is either"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--dtype", "a=float32", "--dtype", "a=float16"], "--dtype is either"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--memory", "lots"], "expected a number of bytes above 0"),
        (["convert", QWEN3, "to", *TO_ORBAX, "--step", "last"], "expected the number of a step"),
        (["reshard", ORBAX, "to", "--spec", "a=x"], "--spec names the axes of a --mesh"),
        (["reshard", ORBAX, "to", "--mesh", "x=2", "--spec", "a=y"], "the mesh has no axis 'y', it has ['x']"),
        (["reshard", ORBAX, "to", "--mesh", "x=2", "--spec", "a=x", "--spec", "a=-"], "is passed twice"),
        (["reshard", ORBAX, "to", "--mesh", "x=7", "--spec", "embedding=x"], "error: --spec: 'embedding': 'params."),
        (["reshard", QWEN3, "to", "--mesh", "x=2", "--spec", "norm=-,-,x"], "expected at most"),
        (["reshard", QWEN3, "to", "--mesh", "x=2", "--spec", "nrom=x"], "error: --spec: 'nrom' is found in none of"),
        (
            ["convert", QWEN3, "to", *TO_ORBAX, "--mesh", "x=2", "--spec", "a=x", "--spec", "a$=x"],
            "--spec: 'a",
        ),
        (["convert", QWEN3, "to", *TO_ORBAX, "--dtype", "nrom=float32"], "error: --dtype: 'nrom' is found in none of"),
        (["reshard", QWEN3, "to", "--max-file-bytes", "5GB", "--mesh", "x=2"], "--max-file-bytes is not for a --mesh"),
        (["reshard", ORBAX, "to", "--max-file-bytes", "1GB"], "--max-file-bytes is not for checkpoints of Orbax"),
        (["reshard", QWEN3, "to", "--to", "orbax"], "there is no option --to"),
        (["reshard", QWEN3, "to", "--plan"], "there is no option --plan"),
    ],
)
def test_mistakes_in_the_command_line_are_status_2(cli, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    result = cli(*argv)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("usage: orbax-safetensors")
    assert message in result.err
    assert list(tmp_path.iterdir()) == []


def test_the_help_has_the_formats_of_the_function(cli):
    assert f"what to make: {' or '.join(FORMATS)}" in cli("convert", "--help").out
