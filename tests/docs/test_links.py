"""Pages link to what there is, as a code host resolves links; the reference has every public name."""

import re

import pytest

import orbax_safetensors as ost
from orbax_safetensors.cli.main import COMMANDS
from tests.support.roots import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
    + list(DOCS.rglob("*.md"))
)


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors that a code host gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match("https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        assert file.is_relative_to(ROOT), target
        if anchor and not anchor.startswith("orbax_safetensors."):  # of the site's reference
            assert anchor in anchors(file), target


def test_the_reference_is_complete():
    of_package = re.findall(r"^::: orbax_safetensors\S*\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert set(ost.__all__) - {"mapping"} <= set(of_package)
    of_mapping = (DOCS / "api-mapping.md").read_text()
    assert [name for name in ost.mapping.__all__ if not re.search(rf"\b{name}\b", of_mapping)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_section_for_each_command(command):
    sections = re.findall(r"^## (.*)$", (DOCS / "commands.md").read_text(), re.MULTILINE)
    assert any(f"`{command}`" in section for section in sections)
