"""The page on checksums: its example runs as it stands, and its record is the one that a save writes."""

import json
import re

import orbax_safetensors as ost
from orbax_safetensors.cli.main import main
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from tests.support.roots import ROOT

PAGE = (ROOT / "docs" / "integrity.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_and_what_it_writes(tmp_path, capsys):
    (example,) = blocks("python")
    exec(example.replace("/models/", f"{tmp_path}/"), {})
    written = json.loads((tmp_path / "tuned" / CHECKSUMS_NAME).read_text())
    shown = json.loads(blocks("json")[0])
    for record in (written, shown):
        record["files"]["model.safetensors"].pop("header_sha256")
    assert shown == written


def test_the_line_of_a_changed_tensor(tmp_path, capsys):
    (example,) = blocks("python")
    exec(example.replace("/models/", f"{tmp_path}/"), {})
    path = tmp_path / "tuned" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert ost.verify(tmp_path / "tuned") == []
    assert main(["verify", "--data", str(tmp_path / "tuned")]) == 1
    assert capsys.readouterr().out.replace(f"{tmp_path}/", "/models/") == blocks("text")[0]
