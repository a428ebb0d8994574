"""The pictures of the pages have the colours of the palette alone, and are whole on a narrow screen."""

import re
from xml.etree import ElementTree

import pytest

from orbax_safetensors.cli import palette
from tests.support.roots import ROOT

PICTURES = sorted((ROOT / "docs" / "assets").glob("*.svg"))
# The widest that is legible at 500 pixels, in units of which a character has 14.
WIDEST = 640


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_the_palette_and_no_colour_beside_it(path):
    content = path.read_text(encoding="utf-8")
    assert palette.style() in content
    assert not re.search("#[0-9a-f]{3}|rgb", content.replace(palette.style(), ""))


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_fits_a_narrow_screen_and_has_a_title(path):
    root = ElementTree.parse(path).getroot()
    assert float(root.get("viewBox").split()[2]) <= WIDEST
    assert root.find("{http://www.w3.org/2000/svg}title").text
