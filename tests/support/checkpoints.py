"""The checkpoints that several processes restore, written by the reference, and the reference's own view of them."""

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

INDEX = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "i32": np.dtype(np.int32),
    "f8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "i8": np.dtype(np.int8),
    "bool": np.dtype(np.bool_),
}
_WIDE = np.dtype(np.int64)
_STORED_AS = dict(zip(DTYPES.values(), ("F32", "BF16", "F8_E4M3", "I32", "F8_E5M2", "I8", "BOOL"), strict=True))

# The tensors of a small model: dtype and shape by name. All dimensions but those of `uneven` are multiples of 8. Those
# that begin with `plain` have ordinary numbers, the others any bits; no number of `wide` fits into 32.
SMALL: dict[str, tuple[str, tuple[int, ...]]] = {
    "layer.kernel": ("f32", (16, 24)),
    "layer.bias": ("bf16", (24,)),
    "layer.scale": ("f8_e4m3", (8, 16)),
    "table": ("i32", (32, 8)),
    "mask": ("bool", (8,)),
    "levels": ("i8", (16, 8)),
    "count": ("i32", ()),
    "uneven": ("f32", (9, 56)),
    "plain.f32": ("f32", (16, 24)),
    "plain.bf16": ("bf16", (24,)),
    "wide": ("i64", (16,)),
}


def shapes(itemsize: int) -> dict[str, tuple[int, ...]]:
    """Shapes by name; every dimension is a multiple of 8."""
    return {
        "point": (),
        "line": (1000,),
        "short": (48, 56),  # rows of a few hundred bytes: the gaps between inner shards are read as well
        "long": (16, 40960 // itemsize),  # half a row is longer than any gap that is read
        "cube": (8, 24, 40),
        "deep": (8, 16, 3072 // itemsize),  # half of the middle dimension is longer than any gap that is read
        "odd": (16, 40),  # at an odd file offset
    }


def write_matrix(directory: Path) -> None:
    """Three files and an index: for each of `DTYPES` and `shapes` a tensor `dtype.shape` of random bits."""
    rng = np.random.default_rng(7)
    tensors = {
        f"{name}.{kind}": _random(rng, dtype, shape)
        for name, dtype in DTYPES.items()
        for kind, shape in shapes(dtype.itemsize).items()
    }
    odd = {name: tensor for name, tensor in tensors.items() if name.endswith(".odd")}
    others = [{}, {}]
    for number, name in enumerate(name for name in tensors if name not in odd):
        others[number % 2][name] = tensors[name]
    files = {"model-00001-of-00003.safetensors": others[0], "model-00002-of-00003.safetensors": others[1]}
    for file, content in files.items():
        safetensors.numpy.save_file(content, directory / file)
    files["model-00003-of-00003.safetensors"] = odd
    (directory / "model-00003-of-00003.safetensors").write_bytes(_misaligned(odd))
    write_index(directory, files)


def write_steps(directory: Path) -> None:
    """What a `CheckpointManager` keeps: a step 3 with the item `params`, of two files with an index."""
    params = directory / "3" / "params"
    params.mkdir(parents=True)
    tensors = {
        name: _random(np.random.default_rng(number), DTYPES.get(dtype, _WIDE), shape)
        for number, (name, (dtype, shape)) in enumerate(SMALL.items())
    }
    for name in ("plain.f32", "plain.bf16"):
        tensors[name] = np.linspace(-3, 3, tensors[name].size).reshape(tensors[name].shape).astype(tensors[name].dtype)
    files = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in tensors if "layer" in name},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in tensors if "layer" not in name},
    }
    for file, content in files.items():
        safetensors.numpy.save_file(content, params / file)
    write_index(params, files)


def write_index(directory: Path, files: dict[str, dict[str, np.ndarray]]) -> None:
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _random(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    return np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def _misaligned(tensors: dict[str, np.ndarray]) -> bytes:
    """A file in which every tensor begins at an odd offset. The reference reads such, and writes none."""
    header: dict[str, Any] = {"pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    data = b"\xff"
    for name, tensor in tensors.items():
        begin, data = len(data), data + tensor.tobytes()
        assert begin % 2
        stored_as = _STORED_AS[tensor.dtype]
        header[name] = {"dtype": stored_as, "shape": list(tensor.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (len(text) % 2)
    return len(text).to_bytes(8, "little") + text + data


class Reference:
    """A directory's tensors as the `safetensors` package reads them, and the bytes that lie before its data."""

    def __init__(self, directory: Path) -> None:
        self._files = sorted(directory.glob("*.safetensors"))
        index = directory / INDEX
        self.header_bytes = index.stat().st_size if index.exists() else 0
        for file in self._files:
            with open(file, "rb") as opened:
                self.header_bytes += 8 + int.from_bytes(opened.read(8), "little")

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        # `deserialize` and not `safe_open`, whose NumPy tensors cannot be of eight-bit floats.
        numpy_of = {stored_as: dtype for dtype, stored_as in _STORED_AS.items()}
        numpy_of |= {"U8": np.dtype(np.uint8), "I64": _WIDE}
        return {
            name: np.frombuffer(entry["data"], numpy_of[entry["dtype"]]).reshape(entry["shape"])
            for file in self._files
            for name, entry in safetensors.deserialize(file.read_bytes())
        }
