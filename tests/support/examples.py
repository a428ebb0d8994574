"""The examples of a page: its blocks of code, run as they stand on the small models of the guides."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AxisType, Mesh

from orbax_safetensors.cli.main import main
from tests.support.roots import ROOT

MODELS = "/models/"  # where the pages say that checkpoints are
# Commands of a shell that pages show and no test runs: they install, or are other programs.
NOT_RUN = (
    "pip install ",
    "orbax-safetensors --completion ",
    "export ",
    "mkdir ",
    "python -m maxtext.",
    "python -m pytest",
    "python examples/",
    "python benchmarks/",
)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str


def blocks(page: Path | str, *languages: str) -> list[Block]:
    """Return the blocks in these languages of a page, or of its text, in their order."""
    text = page.read_text() if isinstance(page, Path) else page
    return [Block(*found) for found in _BLOCK.findall(text) if found[0] in languages]


def python(page: Path | str) -> list[str]:
    """Return the blocks of Python of a page, or of its text."""
    return [block.text for block in blocks(page, "python")]


def make_models(directory: Path) -> dict[str, dict[str, np.ndarray]]:
    """Make the models that pages find below `MODELS`, and return their tensors by the names of their directories."""
    models: dict[str, dict[str, np.ndarray]] = runpy.run_path(str(ROOT / "examples" / "small_models.py"))[
        "make_models"
    ](directory)
    return models


def run(block: Block | str, directory: Path, names: dict[str, Any]) -> None:
    """Run a block of Python in `names`, or the commands of a block of `sh`, with `directory` for `MODELS`."""
    language, text = ("python", block) if isinstance(block, str) else block
    text = text.replace(MODELS, f"{directory}/")
    if language == "python":
        exec(text, names)
        for value in names.values():
            if isinstance(value, Mesh):  # JAX refuses `embedding[tokens]` on a mesh with explicit axes
                assert set(value.axis_types) == {AxisType.Auto}, f"no model runs on {value} as it stands"
        return
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith(NOT_RUN):
            continue
        program, *arguments = shlex.split(line, comments=True)
        assert program == "orbax-safetensors", line
        differs = arguments[-2:] == ["||", "true"]
        status = main(arguments[:-2] if differs else arguments)
        assert status == (1 if differs else 0), line
