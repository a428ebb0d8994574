"""The page on checksums: its example runs as it stands, and its record is the one that a save writes."""

import json

import pytest

import orbax_safetensors as ost
from orbax_safetensors.cli.main import main
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from tests.support import examples
from tests.support.roots import ROOT

PAGE = ROOT / "docs" / "integrity.md"


@pytest.fixture
def saved(tmp_path):
    """Runs the examples of the page, and returns what they save."""
    for block in examples.blocks(PAGE, "python", "sh"):
        examples.run(block, tmp_path, {})
    return tmp_path / "checked"


def shown(language):
    (block,) = examples.blocks(PAGE, language)
    return block.text


def test_the_record(saved):
    records = json.loads((saved / CHECKSUMS_NAME).read_text()), json.loads(shown("json"))
    for record in records:
        record.pop("files_sha256")
        record["files"]["model.safetensors"].pop("header_sha256")
    assert records[0] == records[1]


def test_the_lines_of_a_changed_tensor(saved, capsys):
    capsys.readouterr()
    content = bytearray((saved / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (saved / "model.safetensors").write_bytes(content)
    assert ost.verify(saved) == []
    assert main(["verify", "--data", str(saved)]) == 1
    assert capsys.readouterr().out.replace(f"{saved.parent}/", examples.MODELS) == shown("text")
