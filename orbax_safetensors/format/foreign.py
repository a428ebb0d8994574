"""Files of other formats that people take for safetensors: what they are, and what to do with them, for messages."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

ORBAX_TREE = "_METADATA"
"""The file that makes a directory an item of Orbax: its tree."""

_TORCH = "load it with `torch.load` and save its tensors with `safetensors.torch.save_file`"
_DOWNLOAD = "download the model's .safetensors files instead"

# How the files of a format begin, in the eight bytes that would be the length of a header.
_BEGINNINGS = (
    (b"version ", "a pointer of git-lfs to the file: run `git lfs pull`"),
    (b"PK\x03\x04", f"a zip archive, as torch.save and numpy.savez make: {_TORCH} or `safetensors.numpy.save_file`"),
    (b"\x80", f"a pickle of PyTorch: {_TORCH}"),
    (b"GGUF", f"GGUF: {_DOWNLOAD}"),
    (b"\x89HDF", f"HDF5, as Keras and TensorFlow save: {_DOWNLOAD}"),
    (b"\x93NUMPY", "an array of NumPy: save it with `safetensors.numpy.save_file`"),
    (b"\x1f\x8b", "compressed: unpack it with gzip"),
    (b"<", "a web page, which a server has sent instead of the file: download it again"),
)

# What the files of a directory are, by their names.
_NAMES = (
    (
        re.compile(r"(pytorch_model|adapter_model|diffusion_pytorch_model).*\.bin"),
        "weights as PyTorch pickles them: load the model with its library, such as transformers, and call "
        "`save_pretrained`, which writes .safetensors",
    ),
    (re.compile(r".*\.(bin|pt|pth|ckpt)"), f"a file of PyTorch: {_TORCH}"),
    (re.compile(r".*\.gguf"), f"GGUF: {_DOWNLOAD}"),
    (re.compile(r".*\.(msgpack|h5|keras)"), f"weights of Flax or Keras: {_DOWNLOAD}"),
    (re.compile(r".*\.np[yz]"), "arrays of NumPy: save them with `safetensors.numpy.save_file`"),
    (re.compile(r".*\.safetensors\..+"), "what a download has not finished, or renamed: download it again"),
)


def of_bytes(prefix: bytes, file: str) -> str | None:
    """Return what a file is that begins so and is not safetensors, and what to do; None if that is not known."""
    if prefix.lstrip()[:1] in (b"{", b"["):
        return f"JSON: pass the directory with the .safetensors files, {posixpath.dirname(file) or '.'}"
    return next((kind for beginning, kind in _BEGINNINGS if prefix.startswith(beginning)), None)


def of_names(names: Iterable[str]) -> str | None:
    """Return what the files of a directory without safetensors are, and what to do; None if that is not known."""
    names = sorted(names)
    for pattern, kind in _NAMES:
        if name := next(filter(pattern.fullmatch, names), None):
            return f"has {name}, {kind}"
    return None
