"""Files that belong to a model besides its tensors: its config, and the small files that go along with it."""

from __future__ import annotations

import json
import logging
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.config import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    DTYPE_KEYS,
    QUANTIZATION_KEYS,
    QUANTIZATION_NAMES,
    as_config,
    parse_config,
    without_quantization,
)
from orbax_safetensors.checkpoint.family import TensorTypes
from orbax_safetensors.checkpoint.quantized import stores_codes
from orbax_safetensors.checkpoint.record import RECORD_NAME, Fingerprints, record_content
from orbax_safetensors.checkpoint.small_files import SMALL_BYTES, small_files
from orbax_safetensors.devices.bits import is_float
from orbax_safetensors.errors import MissingError, storage_errors
from orbax_safetensors.format.layout import ADAPTER_STEM, STEM
from orbax_safetensors.mapping.architectures import architecture_of
from orbax_safetensors.mapping.family import NO_FAMILY, Family, FamilyUse
from orbax_safetensors.storage.local import make_directory
from orbax_safetensors.storage.paths import missing
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Store, is_there, read_small, write_small

logger = logging.getLogger(__name__)

# What to look for on a server that does not list its files: what `transformers`, PEFT and sentence-transformers write
# besides tensors.
_USUAL = (
    ADAPTER_CONFIG_NAME,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    CONFIG_NAME,
    "generation_config.json",
    *QUANTIZATION_NAMES,
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)


@dataclass(frozen=True)
class ModelFiles:
    """What belongs to a model besides its tensors.

    Attributes:
      config: to write; None if there is none.
      copies: files to copy from `store`: their paths by name, which may be a path below the directory.
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
    def stem(self) -> str:
        """What the names of the files of tensors begin with."""
        return ADAPTER_STEM if self.is_adapter else STEM

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
            if name in written:
                continue
            assert self.store is not None
            file = self.store.open(path)
            if file.stamp.nbytes > SMALL_BYTES:  # of a store whose listing has no sizes
                logger.warning("%s: not copied: it has %d bytes", path, file.stamp.nbytes)
                file.close()
                continue
            content = read_small(file, SMALL_BYTES)
            above = posixpath.dirname(posixpath.join(directory, name))
            if store.is_local and "/" in name:
                with storage_errors(f"{above}: cannot be made", OSError):
                    make_directory(above)
            write_small(store, posixpath.join(directory, name), content, sync=sync)
            if sync and "/" in name:
                store.sync(above)
        for name, content in written.items():
            write_small(store, posixpath.join(directory, name), content, sync=sync)

    def _written(self, tensor_files: Fingerprints) -> dict[str, bytes]:
        """Return the content of the files that are not copied, by name."""
        config = {} if self.config is None else {self.config_name: f"{json.dumps(self.config, indent=2)}\n".encode()}
        return config | ({} if self.use.family is None else {RECORD_NAME: record_content(self.use, tensor_files)})

    def storing(self, tensors: TensorTypes) -> ModelFiles:
        """Return the same files for these tensors, with a config that names the dtype of most elements.

        Without what says how some tensors are quantised, if none of them is.
        """
        if (self.config is None and not self.copies) or stores_codes(tensors, self.config or {}):
            return self
        files, dtype = self.plain(), _most(tensors)
        return files if files.config is None else replace(files, config=_in_dtype(files.config, dtype))

    def naming(self, family: Family) -> ModelFiles:
        """Return the same files with a config that names its architecture, if it names none and `family` knows it."""
        if self.config is None or self.config.get("architectures") or self.is_adapter:
            return self
        architecture = architecture_of(family, self.config)
        return self if architecture is None else replace(self, config={**self.config, "architectures": [architecture]})

    def plain(self) -> ModelFiles:
        """Return the same files without what they say of quantisation."""
        config = None if self.config is None else without_quantization(self.config)
        copies = {name: path for name, path in self.copies.items() if name not in QUANTIZATION_NAMES}
        return replace(self, config=config, copies=copies)

    def cast(self, stored: TensorTypes, source: Checkpoint, config: Mapping[str, Any]) -> ModelFiles:
        """Return the files for tensors `stored` like those of `source`, whose config is `config`.

        If most elements are no longer of the dtype that they have there, the config names their new dtype.
        """
        before = {name: (source[name].dtype, shape) for name, shape in source.shapes.items() if name in stored}
        if (dtype := _most(stored)) == _most(before) or (changed := _in_dtype(config, dtype)) == config:
            return self
        return replace(self, config=changed if self.config is None else _in_dtype(self.config, dtype))


def _most(tensors: TensorTypes) -> np.dtype | None:
    """Return the dtype that most elements of floating point have, of those with 16 bits or more."""
    elements: dict[np.dtype, int] = {}
    for dtype, shape in tensors.values():
        if is_float(dtype) and dtype.itemsize > 1:
            elements[dtype] = elements.get(dtype, 0) + prod(shape)
    return max(elements, key=elements.__getitem__, default=None)


def _in_dtype(config: Mapping[str, Any], dtype: np.dtype | None) -> dict[str, Any]:
    """Return a config that names `dtype`, if it is not None: for the model, and for parts that name one.

    A config without a `model_type`, which is not one of `transformers`, names one only if it did.
    """
    if dtype is None:
        return dict(config)
    named = _renamed(config, dtype)
    if "model_type" in config:
        used = [key for key in DTYPE_KEYS if key in config] or DTYPE_KEYS[:1]
        if all(config.get(key) is None for key in used):
            named[used[0]] = dtype.name
    return named


def _renamed(config: Mapping[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Return a config that names `dtype` wherever it names one: for the model, or for a part."""
    named = dict(config)
    for key, value in config.items():
        if key in DTYPE_KEYS and value is not None:
            named[key] = dtype.name
        elif key.endswith("_config") and isinstance(value, Mapping) and key not in QUANTIZATION_KEYS:
            named[key] = _renamed(value, dtype)
    return named


def model_files_of(config: Any, storage_options: Mapping[str, Any] | None) -> ModelFiles:
    """Return the model's files that a caller's `config` stands for.

    `config` is the content of a `config.json`, an object whose `to_dict` returns that, the path or a URL of such a
    file, or of a directory with one or with that of an adapter; of a directory, its other small files are also copied.
    Raises `MappingError` if it is not a config, and `StorageError` if it cannot be read.
    """
    if not isinstance(config, str | os.PathLike):
        return ModelFiles(as_config(config))
    store, path = store_of(config, storage_options)
    if store.is_local and not os.path.lexists(path):
        raise MissingError(f"{path}: {missing(path)}")
    if path.endswith(".json") or os.path.isfile(path):
        return ModelFiles(as_config(parse_config(store.open(path))))
    paths = [posixpath.join(path, name) for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME)]
    content = as_config(parse_config(store.open(next((path for path in paths if is_there(store, path)), paths[0]))))
    return replace(files_of_model(store, path), config=content)


def files_beside(checkpoint: Checkpoint) -> ModelFiles:
    """Return the files to copy with a checkpoint; none if it is one file, which may lie beside those of another model.

    They are those of `files_of_model`.
    """
    return ModelFiles() if checkpoint.is_file else files_of_model(checkpoint.store, checkpoint.path)


def files_of_model(store: Store, directory: str) -> ModelFiles:
    """Return the files of a directory to copy, which belong to a model besides its tensors; see `small_files`.

    If a server does not list its files, the result has those of the usual names that it has.
    """
    if store.lists:
        return ModelFiles(copies=small_files(store, directory), store=store)
    usual = {name: posixpath.join(directory, name) for name in _USUAL}
    return ModelFiles(copies={name: path for name, path in usual.items() if is_there(store, path)}, store=store)
