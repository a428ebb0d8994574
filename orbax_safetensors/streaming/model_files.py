"""Files that belong to a model besides its tensors: `config.json`, the tokenizer's files and their like."""

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

StorageOptions = Mapping[str, Any] | None

# Files that `save_pretrained` of transformers writes for tokenizers, processors and generation. If a server does not
# list its files, `files_of_model` looks for the names without a star.
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
class ModelFiles:
    """The content of `config.json`, None if there is none, and files to copy: paths or URLs by name.

    `storage_options` are for the store of the files to copy.
    """

    config: Mapping[str, Any] | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    storage_options: StorageOptions = field(default=None, repr=False)

    @property
    def names(self) -> frozenset[str]:
        """The names of all files."""
        return frozenset(self.copies) | ({CONFIG_NAME} if self.config is not None else frozenset())

    def write(self, store: Store, directory: str) -> None:
        """Write all files; return when they are on the disk."""
        for name, path in self.copies.items():
            write_small(store, posixpath.join(directory, name), self._read(path))
        if self.config is not None:
            text = json.dumps(self.config, indent=2) + "\n"
            write_small(store, posixpath.join(directory, CONFIG_NAME), text.encode())

    def _read(self, path: str) -> bytes:
        store, path = store_of(path, self.storage_options)
        return read_small(store.open(path), _MAX_BYTES)

    def stored_as(self, dtype: np.dtype) -> ModelFiles:
        """Return the same files for tensors that are all cast to `dtype`; transformers then loads the model in it."""
        if self.config is None:
            return self
        config = dict(self.config)
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = dict(config["text_config"])
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part |= {key: dtype.name for key in ("dtype", "torch_dtype") if key in part}
        return replace(self, config=config)


def model_files_of(config: Any, storage_options: StorageOptions) -> ModelFiles:
    """Return the model's files that a caller's `config` stands for.

    `config` is the content of a `config.json`, an object whose `to_dict` returns that, the path or a URL of such a
    file, or of a directory with one; of a directory, the tokenizer's files and their like are also copied. Raises
    `MappingError` if it is not a config, and `StorageError` if it cannot be read.
    """
    if not isinstance(config, str | os.PathLike):
        return ModelFiles(as_config(config))
    path = os.fsdecode(config)
    if path.endswith(".json") or os.path.isfile(path):
        return ModelFiles(_config(path, storage_options))
    content = _config(posixpath.join(path, CONFIG_NAME), storage_options)
    return replace(files_of_model(path, storage_options), config=content)


def files_of_model(directory: str, storage_options: StorageOptions) -> ModelFiles:
    """Return the files of a directory to copy, which belong to a model besides its tensors.

    If a server does not list its files, the result has those of the usual names that it has.
    """
    store, directory = store_of(directory, storage_options)
    if not store.lists:
        usual = {name: posixpath.join(directory, name) for name in _PATTERNS if "*" not in name}
        copies = {name: path for name, path in usual.items() if _is_there(store, path)}
    else:
        paths = {name: posixpath.join(directory, name) for name in store.list(directory) or ()}
        copies = {
            name: path
            for name, path in paths.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in _PATTERNS) and not os.path.isdir(path)
        }
    return ModelFiles(copies=copies, storage_options=storage_options)


def _is_there(store: Store, path: str) -> bool:
    if (file := store.find(path)) is None:
        return False
    file.close()
    return True


def _config(path: str, storage_options: StorageOptions) -> dict[str, Any] | None:
    store, path = store_of(path, storage_options)
    return as_config(parse_config(store.open(path)))
