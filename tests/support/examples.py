"""The examples of a page: its blocks of code, run as they stand on small checkpoints in the places that they name."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from orbax_safetensors.cli.main import main
from tests.support.files import random_bits, write, write_indexed
from tests.support.roots import TESTDATA

MODELS = "/models/"  # where the pages say that checkpoints are
QWEN3 = TESTDATA / "qwen3"
# Commands of a shell that pages show and no test runs: they install, or are other programs.
NOT_RUN = ("pip install ", "shtab ", "python -m maxtext.", "python -m pytest", "python examples/", "python benchmarks/")

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_RNG = np.random.default_rng(0)
_BF16 = np.dtype(jnp.bfloat16)
LLAMA = {
    "model.norm.weight": random_bits(_RNG, (4096,), _BF16),
    "model.embed_tokens.weight": random_bits(_RNG, (64, 512), _BF16),
    "model.scale": np.array(3, np.int32),
    "model.odd": random_bits(_RNG, (3, 8), _BF16),
}
STATE = {"params.w": random_bits(_RNG, (64, 512), _BF16)}


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


def make_models(directory: Path) -> None:
    """Make the checkpoints that pages find below `MODELS`."""
    for name in ("llama", "state"):
        (directory / name).mkdir()
    write_indexed(directory / "llama", [{name: array} for name, array in LLAMA.items()])
    write(directory / "model.safetensors", LLAMA)
    write(directory / "state" / "model.safetensors", STATE)
    shutil.copytree(QWEN3, directory / "qwen3")


def run(block: Block | str, directory: Path, names: dict[str, Any]) -> None:
    """Run a block of Python in `names`, or the commands of a block of `sh`, with `directory` for `MODELS`."""
    language, text = ("python", block) if isinstance(block, str) else block
    text = text.replace(MODELS, f"{directory}/")
    if language == "python":
        exec(text, names)
        return
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith(NOT_RUN):
            continue
        program, *arguments = shlex.split(line, comments=True)
        assert program == "orbax-safetensors", line
        assert main(arguments) == 0, line
