"""Pages link to what there is, as a code host resolves links; the reference has every public name."""

import re

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


def leads_somewhere(page, target):
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.is_file() or not file.is_relative_to(ROOT):
        return False
    return not anchor or anchor.startswith("orbax_safetensors.") or anchor in anchors(file)  # of the site's reference


def test_links():
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    assert len(links) > 100
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page, target in links
        if not re.match("https?:", target) and not leads_somewhere(page, target)
    ]
    assert broken == []


def test_the_reference_is_complete():
    pages = "".join(page.read_text() for page in (DOCS / "api").iterdir())
    documented = set(re.findall(r"^::: orbax_safetensors\S*\.(\w+)$", pages, re.MULTILINE))
    documented |= set(re.findall(r"`ost\.mapping\.(\w+)\(", pages))
    assert (set(ost.__all__) - {"mapping"}) | set(ost.mapping.__all__) <= documented


def test_a_section_for_each_command():
    sections = " ".join(re.findall(r"^## (.*)$", (DOCS / "commands.md").read_text(), re.MULTILINE))
    assert [command for command in COMMANDS if f"`{command}`" not in sections] == []
