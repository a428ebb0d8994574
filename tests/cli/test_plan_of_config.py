"""`plan` of a model that is not there yet: of its `config.json`, or of nothing."""

import json
import shutil

import pytest

from tests.support.family_samples import DATA

QWEN3 = DATA / "qwen3" / "hf"
MESH = ("--mesh", "fsdp=4", "--processes", "2")


@pytest.fixture
def alone(tmp_path):
    shutil.copy(QWEN3 / "config.json", tmp_path)
    return tmp_path


def test_it_says_that_it_is_of_the_config(cli, alone):
    result = cli("plan", alone, *MESH, "--family", "maxtext")
    assert (result.status, result.err) == (0, "")
    assert result.facts["source"] == "config.json alone"
    files = cli("plan", QWEN3, *MESH, "--family", "maxtext")
    assert "source" not in files.facts
    differing = {"source", "requests to open"}  # which are of the one file that a save would write
    found, expected = dict(result.facts), dict(files.facts)
    assert {name for name in found | expected if found.get(name) != expected.get(name)} == differing


def test_json(cli, alone):
    found, files = (
        json.loads(cli("plan", path, *MESH, "--family", "maxtext", "--json").out) for path in (alone, QWEN3)
    )
    assert (found["from_config"], files["from_config"]) == (True, False)
    for key in ("total_params", "total_bytes", "num_arrays", "largest_shard", "replicated_arrays"):
        assert found[key] == files[key]


@pytest.mark.parametrize("more", [("--save",), ("--mesh", "fsdp=2,tensor=2")])
def test_every_kind_of_plan(cli, alone, more):
    mesh = MESH[:2] if "--mesh" in more else MESH
    result = cli("plan", alone / "config.json", *mesh, "--family", "maxtext", *more)
    assert (result.status, result.err) == (0, "")
    assert result.facts["source"] == "config.json alone"


def test_without_a_family_it_says_what_is_missing(cli, alone):
    result = cli("plan", alone, *MESH)
    assert result.status == 1
    assert result.err == (
        f"error: {alone}: holds no .safetensors file; a plan of its config.json alone needs a family\n"
    )


@pytest.mark.parametrize("command", [("plan", *MESH), ("inspect",)])
def test_nothing_is_no_checkpoint_of_orbax(cli, tmp_path, command):
    name, *options = command
    for family in ((), ("--family", "maxtext")):
        result = cli(name, tmp_path, *options, *family)
        assert result.status == 1
        assert result.err == f"error: {tmp_path}: holds no finished checkpoint of Orbax, and no .safetensors file\n"
