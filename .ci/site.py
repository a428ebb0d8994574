"""A hook of MkDocs: the site's files have the paths that they have in the repository, and URLs without `docs/`.

Links between pages are paths in the repository, which a code host follows. MkDocs follows them too if a page's path is
that one, whether the file lies in `docs/` or elsewhere. The names of the API have the headings that programs write.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.html",
    "CHANGELOG.md": "changelog/index.html",
    "CONTRIBUTING.md": "contributing/index.html",
    "SECURITY.md": "security/index.html",
    "benchmarks/README.md": "benchmarks/index.html",
}


def on_files(files: Files, config) -> Files:
    """Return the files of the site: those of `docs/`, the pages elsewhere, and the programs to which pages link."""
    destinations = dict(PAGES)
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
            destinations[f"docs/{file.src_uri}"] = file.dest_uri
    for program in (ROOT / "examples").glob("*.py"):
        destinations[f"examples/{program.name}"] = f"examples/{program.stem}.txt"  # which browsers show
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        destinations[f"examples/{notebook.name}"] = f"examples/{notebook.name}"
    for path, destination in destinations.items():
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=destination))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Return a page of the API with `ost.load` as the heading of `load`, `ost.mapping.lora` as that of `lora`."""
    if not page.file.src_uri.startswith("docs/api/"):
        return markdown

    def headed(found: re.Match) -> str:
        module = "mapping." if ".mapping." in found["path"] else ""
        options = f"heading: ost.{module}{found['name']}, {found['options'] or ''}"
        return f"::: {found['path']}{found['name']}\n    options: {{{options}}}\n"

    return re.sub(
        r"^::: (?P<path>\S*\.)(?P<name>\w+)\n(    options: \{(?P<options>.*)\}\n)?", headed, markdown, flags=re.M
    )


def on_page_content(html: str, page, config, files) -> str:
    """Return a page that keeps `--option` on one line, and breaks long names in tables after their dots and slashes."""

    def breakable(name: re.Match) -> str:
        return re.sub(r"[./]", r"\g<0><wbr>", name[0])

    html = re.sub(r"(?<=[\s>])--[a-z][a-z-]*", r'<span class="option">\g<0></span>', html)
    return re.sub(r"<td.*</td>", lambda cell: re.sub(r"(?<=<code>)[\w./]{24,}(?=</code>)", breakable, cell[0]), html)
