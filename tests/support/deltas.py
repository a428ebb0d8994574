"""Steps of a training in bfloat16: what an optimiser changes at small learning rates, saved step by step."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

import orbax_safetensors as ost

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {
    "model.embed_tokens.weight": (96, 64),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {"self_attn.q_proj": (64, 64), "mlp.up_proj": (128, 64), "input_layernorm": (64,)}.items()
    },
    "model.norm.weight": (64,),
}


def adam_steps(seed: int = 0, rate: float = 3e-6) -> Iterator[dict[str, np.ndarray]]:
    """Yield the weights of one step after the other; the optimiser keeps them in float32."""
    rng = np.random.default_rng(seed)
    master = {name: (0.02 * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}
    first = {name: np.zeros_like(array) for name, array in master.items()}
    second = {name: np.zeros_like(array) for name, array in master.items()}
    for step in itertools.count(1):
        yield {name: array.astype(BF16) for name, array in master.items()}
        for name, array in master.items():
            gradient = rng.standard_normal(array.shape).astype(np.float32)
            first[name] += 0.1 * (gradient - first[name])
            second[name] += 0.001 * (gradient**2 - second[name])
            mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.999**step)
            array -= rate * mean / (np.sqrt(square) + 1e-8)


def save_steps(root: Path, count: int, **arguments: int) -> list[Path]:
    """Save step 0 and `count` further ones, and return their directories."""
    directories = [root / f"step-{number}" for number in range(count + 1)]
    for directory, tree in zip(directories, adam_steps(), strict=False):
        ost.save(directory, tree, **arguments)
    return directories


def changed(array: np.ndarray, count: int = 1) -> np.ndarray:
    """Return a copy in which some elements have another bit."""
    copy = array.copy()
    copy.view(np.uint8).reshape(-1)[: count * array.itemsize : array.itemsize] ^= 1
    return copy


def tensor_files(directory: Path) -> dict[str, bytes]:
    """Return the content of all files of tensors, of the index and of the checksums, by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if "safetensors" in path.name}


def copied(directory: Path, to: Path) -> Path:
    """Copy a directory, and return the copy."""
    shutil.copytree(directory, to)
    return to
