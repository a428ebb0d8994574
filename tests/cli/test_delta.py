"""`delta`: what was published, and what was refused."""

import json

import orbax_safetensors as ost
from tests.support.deltas import save_steps, tensor_files


def test_what_was_published(cli, tmp_path):
    steps = save_steps(tmp_path, 2)
    result = cli("delta", steps[0], steps[1], tmp_path / "published", "--version", "1")
    assert result.status == 0
    begun, *_, ended = result.err.splitlines()
    model = begun.removeprefix("delta: 0 Bytes of ")
    assert ended.startswith(f"delta: {model} of {model}")
    path = tmp_path / "published" / "weight_v000001"
    assert result.facts["path"] == str(path)
    assert 0 < int(result.facts["changed tensors"]) <= int(result.facts["tensors"]) == 8
    assert int(result.facts["delta"]) < int(result.facts["model"])
    verified = cli("verify", path)
    assert (verified.status, verified.err) == (0, "")
    assert verified.out.endswith(", a delta of version 0: apply_delta makes the model\n")
    ost.apply_delta(steps[0], path, tmp_path / "made")
    assert tensor_files(tmp_path / "made") == tensor_files(steps[1])
    document = json.loads(cli("delta", steps[1], steps[2], tmp_path / "published", "--version", "2", "--json").out)
    assert document["path"] == str(tmp_path / "published" / "weight_v000002")
    assert document["version"] == 2


def test_what_is_refused(cli, tmp_path):
    steps = save_steps(tmp_path, 1)
    result = cli("delta", *steps, tmp_path / "published", "--version", "7")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("error: ")
    assert "version 7 does not follow: expected 1" in result.err
    assert cli("delta", *steps, tmp_path / "published").status == 2
