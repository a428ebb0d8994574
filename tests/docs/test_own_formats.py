"""The page on formats: its row is all that a format needs."""

from orbax_safetensors.mapping import quantization
from tests.support import examples
from tests.support.roots import ROOT


def test_the_row_of_the_page(tmp_path, monkeypatch):
    row, check = examples.python(ROOT / "docs" / "own-formats.md")
    names = {}
    examples.run(row, tmp_path, names)
    monkeypatch.setitem(quantization._BY_DTYPE, "I8", [*quantization._BY_DTYPE["I8"], names["QUANTO"]])
    examples.run(check, tmp_path, names)
    assert names["weight"].shape == (24, 40)
