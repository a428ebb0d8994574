"""What belongs to a model besides its tensors: `config.json`, the tokenizer's files and their like."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from orbax_safetensors.errors import MappingError, StorageError
from orbax_safetensors.mapped import CONFIG_NAME, as_config

# What `save_pretrained` of transformers writes for tokenizers, processors and generation.
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
    "tokenizer*.json",
    "tokenizer*.model",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True)
class Beside:
    """The content of `config.json`, None where there is none, and files to copy besides: their paths by name."""

    config: Mapping[str, Any] | None = None
    copies: Mapping[str, str] = field(default_factory=dict)

    def write(self, directory: str) -> None:
        """Writes all of it; raises `StorageError` where that is not possible."""
        try:
            for name, path in self.copies.items():
                shutil.copyfile(path, os.path.join(directory, name))
            if self.config is not None:
                with open(os.path.join(directory, CONFIG_NAME), "w", encoding="utf-8") as file:
                    file.write(json.dumps(self.config, indent=2) + "\n")
        except OSError as error:
            raise StorageError(f"{directory}: {error}") from error

    def stored_as(self, dtype: np.dtype) -> Beside:
        """The same for tensors that are all cast to `dtype`: transformers loads a model in what its config says."""
        if self.config is None:
            return self
        own = dict(self.config)
        for key in ("dtype", "torch_dtype"):
            if key in own:
                own[key] = dtype.name
        return replace(self, config=own)


def beside(config: Any) -> Beside:
    """What a caller's `config` stands for.

    It is the content of a `config.json`, something with a `to_dict` that gives it, the path of such a file, or a
    directory with one, whose tokenizer's files and their like are copied too. Raises `MappingError` where it is no
    config, and `StorageError` where it cannot be read.
    """
    if not isinstance(config, str | os.PathLike):
        return Beside(as_config(config))
    path = os.fsdecode(config)
    if not os.path.isdir(path):
        return Beside(as_config(_read(path)))
    return Beside(as_config(_read(os.path.join(path, CONFIG_NAME))), copied(path))


def copied(directory: str) -> dict[str, str]:
    """The files of a directory that belong to a model besides its tensors, by name."""
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_file())
    except OSError as error:
        raise StorageError(f"{directory}: {error}") from error
    return {
        name: os.path.join(directory, name)
        for name in names
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _PATTERNS)
    }


def _read(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise StorageError(f"{path}: {error}") from error
    except ValueError as error:
        raise MappingError(f"{path}: is not JSON: {error}") from error
