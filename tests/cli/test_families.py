"""`families`: what there is, and what a checkpoint leads to."""

import json
import shutil

import pytest

from orbax_safetensors.mapping import registry
from tests.support.roots import TESTDATA

QWEN3 = TESTDATA / "maxtext" / "qwen3" / "hf"


def test_all(cli):
    found = json.loads(cli("families", "--json").out)["families"]
    assert {family["family"] for family in found} >= {"maxtext.qwen3", "tunix.qwen3", "flax.paths", "dequantized"}
    assert [family["family"] for family in found] == sorted(family["family"] for family in found)
    for family in found:
        registry.find(family["family"], {"architectures": family["architectures"]}).check_variant(family["switches"])
    (table,) = cli("families").blocks
    assert table[0] == ["family", "switches", "architectures"]
    assert ["maxtext.qwen3", "scan_layers=true param_scan_axis=1 vocab_size=null", "Qwen3ForCausalLM"] in table
    assert ["flax.paths", "", "any"] in table


def test_those_for_an_architecture(cli):
    (table,) = cli("families", "Qwen3ForCausalLM").blocks
    assert [row[0] for row in table[1:]] == ["maxtext.qwen3", "tunix.qwen3"]


def test_an_architecture_that_is_misspelt(cli):
    result = cli("families", "Qwen3ForCausal")
    assert result.status == 2
    assert (
        "no family is for 'Qwen3ForCausal' (nearest: 'Qwen3ForCausalLM'); without MODEL, all are listed" in result.err
    )


@pytest.mark.parametrize("name", ["maxtext", "maxtext.qwen3", "dequantized"])
def test_a_family_is_no_architecture(cli, name):
    result = cli("families", name)
    assert result.status == 2
    assert f"'{name}' is a family; MODEL is an architecture such as Qwen3ForCausalLM, or a checkpoint" in result.err


def test_those_for_a_config(cli, tmp_path):
    """Beside files or alone, as `plan` takes it."""
    of_files = json.loads(cli("families", QWEN3, "--json").out)
    shutil.copy(QWEN3 / "config.json", tmp_path)
    for path in (QWEN3 / "config.json", tmp_path / "config.json", tmp_path):
        found = json.loads(cli("families", path, "--json").out)
        assert [family["family"] for family in found["families"]] == ["maxtext.qwen3", "tunix.qwen3"]
        assert (found["config"], found["names"]) == (of_files["config"], of_files["names"])


def test_an_adapter(cli):
    path = TESTDATA / "maxtext" / "qwen3" / "adapter"
    advice = "pass family='maxtext.lora' with variant={'base': ...}, or ost.mapping.lora(...)"
    assert cli("families", path).err == f"error: {path}: no family is for an adapter of PEFT; {advice}\n"
    assert (
        cli("inspect", path, "--family", "maxtext").err
        == f"error: {path}: maxtext: no family is for an adapter of PEFT; {advice}\n"
    )


def test_those_for_a_checkpoint(cli):
    """The switches are those that `inspect` uses."""
    found = json.loads(cli("families", QWEN3, "--json").out)
    assert found["config"] == "architecture Qwen3ForCausalLM"
    assert found["names"] == {"maxtext": "maxtext.qwen3", "tunix": "tunix.qwen3"}
    assert "[" not in cli("families", QWEN3).out
    assert cli("families", QWEN3).facts["--family maxtext"] == "maxtext.qwen3"
    maxtext, tunix = found["families"]
    assert maxtext["switches"] == {"scan_layers": True, "param_scan_axis": 1}
    assert tunix == {
        "family": "tunix.qwen3",
        "architectures": ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"],
        "switches": {},
    }


def test_a_checkpoint_that_no_family_is_for(cli, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(QWEN3, model)
    (model / "config.json").write_text('{"architectures": ["OddForCausalLM"]}')
    result = cli("families", model)
    assert (result.status, result.out) == (1, "")
    assert result.err == f"error: {model}: no family is for architecture OddForCausalLM\n"
    (model / "config.json").unlink()
    assert cli("families", model).err == f"error: {model}: no family is for a checkpoint without config.json\n"
