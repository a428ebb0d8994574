"""Files that belong to a model besides its tensors: its config, the tokenizer's files and their like."""

from __future__ import annotations

import fnmatch
import json
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.config import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    QUANTIZATION_NAMES,
    as_config,
    parse_config,
    without_quantization,
)
from orbax_safetensors.checkpoint.family import TensorTypes
from orbax_safetensors.checkpoint.quantized import stores_codes
from orbax_safetensors.checkpoint.record import RECORD_NAME, Fingerprints, record_content
from orbax_safetensors.mapping.family import NO_FAMILY, FamilyUse
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Store, is_there, read_small, write_small

# Files that `save_pretrained` of transformers and of PEFT writes besides tensors. If a server does not list its files,
# `files_of_model` looks for the names without a star.
_PATTERNS = (
    ADAPTER_CONFIG_NAME,
    "added_tokens.json",
    "chat_template*",
    CONFIG_NAME,
    "generation_config.json",
    *QUANTIZATION_NAMES,
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
    """What belongs to a model besides its tensors.

    Attributes:
      config: to write; None if there is none.
      copies: files to copy from `store`: their paths by name.
      use: the family whose tree is stored, to record.
    """

    config: Mapping[str, Any] | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    store: Store | None = field(default=None, repr=False)
    use: FamilyUse = NO_FAMILY

    @property
    def is_adapter(self) -> bool:
        """Whether `config` is that of a PEFT adapter."""
        return self.config is not None and "peft_type" in self.config

    @property
    def config_name(self) -> str:
        """The name of the file for `config`."""
        return ADAPTER_CONFIG_NAME if self.is_adapter else CONFIG_NAME

    @property
    def names(self) -> frozenset[str]:
        """The names of all files."""
        return frozenset(self.copies) | self._written({}).keys()

    def write(self, store: Store, directory: str, tensor_files: Fingerprints, *, sync: bool = True) -> None:
        """Write all files beside `tensor_files`; with `sync`, return when they are on the disk."""
        written = self._written(tensor_files)
        for name, path in self.copies.items():
            if name not in written:
                assert self.store is not None
                content = read_small(self.store.open(path), _MAX_BYTES)
                write_small(store, posixpath.join(directory, name), content, sync=sync)
        for name, content in written.items():
            write_small(store, posixpath.join(directory, name), content, sync=sync)

    def _written(self, tensor_files: Fingerprints) -> dict[str, bytes]:
        """Return the content of the files that are not copied, by name."""
        config = {} if self.config is None else {self.config_name: f"{json.dumps(self.config, indent=2)}\n".encode()}
        return config | ({} if self.use.family is None else {RECORD_NAME: record_content(self.use, tensor_files)})

    def storing(self, tensors: TensorTypes) -> ModelFiles:
        """Return the same files for these tensors: without what says how some are quantised, if none of them is."""
        if self.config is None and not self.copies:
            return self
        return self if stores_codes(tensors, self.config or {}) else self.plain()

    def plain(self) -> ModelFiles:
        """Return the same files without what they say of quantisation."""
        config = None if self.config is None else without_quantization(self.config)
        copies = {name: path for name, path in self.copies.items() if name not in QUANTIZATION_NAMES}
        return replace(self, config=config, copies=copies)

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


def model_files_of(config: Any, storage_options: Mapping[str, Any] | None) -> ModelFiles:
    """Return the model's files that a caller's `config` stands for.

    `config` is the content of a `config.json`, an object whose `to_dict` returns that, the path or a URL of such a
    file, or of a directory with one; of a directory, the tokenizer's files and their like are also copied. Raises
    `MappingError` if it is not a config, and `StorageError` if it cannot be read.
    """
    if not isinstance(config, str | os.PathLike):
        return ModelFiles(as_config(config))
    store, path = store_of(config, storage_options)
    if path.endswith(".json") or os.path.isfile(path):
        return ModelFiles(as_config(parse_config(store.open(path))))
    content = as_config(parse_config(store.open(posixpath.join(path, CONFIG_NAME))))
    return replace(files_of_model(store, path), config=content)


def files_beside(checkpoint: Checkpoint) -> ModelFiles:
    """Return the files to copy with a checkpoint; none if it is one file, which may lie beside those of another model.

    They are those of `files_of_model`.
    """
    return ModelFiles() if checkpoint.is_file else files_of_model(checkpoint.store, checkpoint.path)


def files_of_model(store: Store, directory: str) -> ModelFiles:
    """Return the files of a directory to copy, which belong to a model besides its tensors.

    If a server does not list its files, the result has those of the usual names that it has.
    """
    if not store.lists:
        usual = {name: posixpath.join(directory, name) for name in _PATTERNS if "*" not in name}
        copies = {name: path for name, path in usual.items() if is_there(store, path)}
    else:
        paths = {name: posixpath.join(directory, name) for name in store.list(directory) or ()}
        copies = {
            name: path
            for name, path in paths.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in _PATTERNS) and not os.path.isdir(path)
        }
    return ModelFiles(copies=copies, store=store)
