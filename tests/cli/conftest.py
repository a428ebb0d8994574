"""Checkpoints that the `safetensors` package wrote, and a way to run the command on them in this process."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from orbax_safetensors.cli.main import main

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def blocks(self) -> list[list[list[str]]]:
        """The blocks of a pipe's output, as lines of fields."""
        return [[line.split("\t") for line in block.splitlines()] for block in self.out.split("\n\n")]

    @property
    def facts(self) -> dict[str, str]:
        (facts,) = (block for block in self.blocks if all(len(line) == 2 for line in block))
        return dict(facts)


@pytest.fixture
def cli(capsys):
    """Runs a command line; an exit of argparse becomes its status."""

    def run(*argv: str | Path) -> Result:
        try:
            status = main([str(arg) for arg in argv])
        except SystemExit as stopped:
            status = stopped.code
        return Result(status, *capsys.readouterr())

    return run


@pytest.fixture
def parts() -> list[dict[str, np.ndarray]]:
    """Tensors of two files: matrices, a vector, a scalar, one that nothing divides, several dtypes."""
    rng = np.random.default_rng(0)
    return [
        {
            "layer.0.kernel": rng.standard_normal((64, 48)).astype(np.float32),
            "layer.0.bias": rng.standard_normal(48).astype(np.float32),
            "steps": np.array(7, np.int64),
        },
        {
            "layer.1.kernel": rng.standard_normal((2, 3, 16)).astype(np.float16),
            "odd": rng.integers(0, 255, (13,), np.uint8),
        },
    ]


@pytest.fixture
def single(tmp_path, parts) -> Path:
    """All tensors in one file."""
    path = tmp_path / "all.safetensors"
    save_file(parts[0] | parts[1], path, metadata={"format": "np"})
    return path


@pytest.fixture
def directory(tmp_path, parts) -> Path:
    """Two files and an index."""
    path = tmp_path / "model"
    path.mkdir()
    weight_map = {}
    for name, tensors in zip((FIRST, SECOND), parts, strict=True):
        save_file(tensors, path / name)
        weight_map |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
