"""What belongs to a model besides its tensors: `config.json`, the tokenizer's files and their like."""

from __future__ import annotations

import fnmatch
import json
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.config import CONFIG_NAME, as_config, parse_config
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Store, read_small, write_small

# What `save_pretrained` of transformers writes for tokenizers, processors and generation. Where a server does not list
# what it has, it is asked for the names without a star.
_PATTERNS = (
    "added_tokens.json",
    "chat_template*",
    CONFIG_NAME,
    "generation_config.json",
    "merges.txt",
    "*preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "*.bpe.model",
    "spiece.model",
    "*.tiktoken",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "tokenizer*.model",
    "vocab.json",
    "vocab.txt",
)

_MAX_BYTES = 2**30


@dataclass(frozen=True)
class Beside:
    """The content of `config.json`, None where there is none, and files to copy besides: paths or URLs by name."""

    config: Mapping[str, Any] | None = None
    copies: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Of all files."""
        return frozenset(self.copies) | ({CONFIG_NAME} if self.config is not None else frozenset())

    def write(self, store: Store, directory: str) -> None:
        """Writes all of it, so that it is on the disk; raises `StorageError` where that is not possible."""
        for name, path in self.copies.items():
            write_small(store, posixpath.join(directory, name), _read(path))
        if self.config is not None:
            text = json.dumps(self.config, indent=2) + "\n"
            write_small(store, posixpath.join(directory, CONFIG_NAME), text.encode())

    def stored_as(self, dtype: np.dtype) -> Beside:
        """The same for tensors that are all cast to `dtype`: transformers loads a model in what its config says."""
        if self.config is None:
            return self
        own = dict(self.config)
        if isinstance(own.get("text_config"), dict):
            own["text_config"] = dict(own["text_config"])
        for part in (own, own.get("text_config")):
            if isinstance(part, dict):
                part |= {key: dtype.name for key in ("dtype", "torch_dtype") if key in part}
        return replace(self, config=own)


def beside(config: Any) -> Beside:
    """What a caller's `config` stands for.

    It is the content of a `config.json`, something with a `to_dict` that gives it, the path or URL of such a file, or
    of a directory with one, whose tokenizer's files and their like are copied too. Raises `MappingError` where it is no
    config, and `StorageError` where it cannot be read.
    """
    if not isinstance(config, str | os.PathLike):
        return Beside(as_config(config))
    path = os.fsdecode(config)
    if path.endswith(".json") or os.path.isfile(path):
        return Beside(as_config(_config(path)))
    return Beside(as_config(_config(posixpath.join(path, CONFIG_NAME))), copied(path))


def copied(directory: str) -> dict[str, str]:
    """The files of a directory that belong to a model besides its tensors, by name.

    Of a server that lists no names, those that most models have.
    """
    store, directory = store_of(directory, None)
    if not store.lists:
        asked = (posixpath.join(directory, name) for name in _PATTERNS if "*" not in name)
        return {posixpath.basename(path): path for path in asked if _is_there(store, path)}
    paths = {name: posixpath.join(directory, name) for name in store.list(directory) or ()}
    return {
        name: path
        for name, path in paths.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _PATTERNS) and not os.path.isdir(path)
    }


def _is_there(store: Store, path: str) -> bool:
    if (file := store.find(path)) is None:
        return False
    file.close()
    return True


def _read(path: str) -> bytes:
    store, path = store_of(path, None)
    return read_small(store.open(path), _MAX_BYTES)


def _config(path: str) -> dict[str, Any]:
    store, path = store_of(path, None)
    return parse_config(store.open(path))
