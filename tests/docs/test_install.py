"""The page on installing has every dependency with its lower bound."""

import configparser
import re

from tests.support.roots import ROOT


def test_every_dependency_has_a_row_with_its_lower_bound():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", setup["options"]["install_requires"], re.MULTILINE)
    assert len(required) > 10
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert set(required) <= set(rows)
