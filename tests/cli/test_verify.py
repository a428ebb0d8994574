"""`verify`: a line for each fault."""

import json

import numpy as np

import orbax_safetensors as ost

FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_valid_checkpoints(cli, single, directory):
    assert cli("verify", single) == (0, f"{single}: OK, 5 tensors in 1 file\n", "")
    assert cli("verify", directory) == (0, f"{directory}: OK, 5 tensors in 2 files\n", "")


def test_one_tensor_is_not_several(cli, tmp_path):
    ost.save(tmp_path / "one", {"a": np.ones(3)})
    assert cli("verify", tmp_path / "one").out == f"{tmp_path / 'one'}: OK, 1 tensor in 1 file\n"


def test_every_fault_has_a_line(cli, directory):
    for file, damage in zip(FILES, (lambda content: content[:-1], lambda content: content + b"\0"), strict=True):
        (directory / file).write_bytes(damage((directory / file).read_bytes()))
    result = cli("verify", directory)
    assert (result.status, result.err) == (1, "")
    lines = result.out.splitlines()
    assert len(lines) == 2
    for file, line in zip(FILES, lines, strict=True):
        assert line.startswith(f"{directory / file}: expected")


def test_an_index_alone(cli, directory):
    for file in FILES:
        (directory / file).unlink()
    result = cli("verify", directory)
    assert (result.status, result.err) == (1, "")
    assert result.out.splitlines() == [f"{directory / file}: is missing, and the index names it" for file in FILES]


def test_data_against_the_checksums_of_its_save(cli, tmp_path):
    saved = tmp_path / "saved"
    ost.save(saved, {"a": np.arange(100), "b": np.ones(7)}, index=False)
    text = f"{saved}: compared 2 tensors with the checksums of the save, 856 bytes read\n"
    progress = "verify: 0 Bytes of 856 Bytes\nverify: 856 Bytes of 856 Bytes"
    result = cli("verify", "--data", saved)
    assert (result.status, result.out) == (0, f"{text}{saved}: OK, 2 tensors in 1 file\n")
    assert result.err.startswith(progress)
    content = bytearray((saved / "model.safetensors").read_bytes())
    content[-1] ^= 128
    (saved / "model.safetensors").write_bytes(content)
    assert cli("verify", saved).status == 0
    result = cli("verify", "--data", saved)
    fault, compared = result.out.splitlines()
    assert (result.status, f"{compared}\n") == (1, text)
    assert fault.startswith(
        f"{saved}/model.safetensors: tensor 'b': its bytes are not those that safetensors.checksums.json records"
    )


def test_data_with_nothing_to_compare_it_with(cli, directory):
    result = cli("verify", "--data", directory)
    lines = result.out.splitlines()
    assert result.status == 1
    for file, line in zip(FILES, lines, strict=False):
        assert line.startswith(f"{directory / file}: there is nothing to check its data against")
    assert lines[2] == f"{directory}: compared nothing, 0 bytes read"
    assert f"  hf cache verify OWNER/NAME --local-dir {directory}" in lines
    assert f"  sha256sum {directory}/*.safetensors" in lines
    assert (
        f"  hf cache verify OWNER/NAME --local-dir {directory}\n" in cli("verify", "--data", directory / FILES[0]).out
    )


def test_json(cli, directory, tmp_path):
    found = json.loads(cli("verify", directory, "--json").out)
    assert found == {"path": str(directory), "faults": [], "compared": None, "checked": {"tensors": 5, "files": 2}}

    saved = tmp_path / "saved"
    ost.save(saved, {"a": np.arange(100), "b": np.ones(7)})
    found = json.loads(cli("verify", "--data", saved, "--json").out)
    assert found["compared"] == {"tensors": 2, "files": 0, "bytes": 856}

    (directory / FILES[1]).unlink()
    result = cli("verify", directory, "--json")
    assert (result.status, result.err) == (1, "")
    assert json.loads(result.out) == {
        "path": str(directory),
        "faults": [f"{directory / FILES[1]}: is missing, and the index names it"],
        "compared": None,
        "checked": None,
    }


def test_json_of_a_checkpoint_of_orbax(cli, directory, tmp_path):
    step = ost.convert(directory, tmp_path / "orbax", to="orbax").path
    found = json.loads(cli("verify", step, "--json").out)
    assert (found["faults"], found["checked"]) == ([], {"arrays": 5, "items": 1})
