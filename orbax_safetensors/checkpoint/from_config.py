"""A checkpoint whose files are not there: what a family stores of the model that a `config.json` describes.

Only plans take it. Its files are those that a save would write, so their bytes are not to be read.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from orbax_safetensors.checkpoint.checkpoint import Checkpoint, StoredPiece, StoredTensor
from orbax_safetensors.checkpoint.config import CONFIG_NAME, config_dtype, parse_config, quantization_config
from orbax_safetensors.checkpoint.family import FamilyLike, by_number
from orbax_safetensors.checkpoint.files import StoredFile, is_part
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.errors import MappingError, MissingError, StorageError
from orbax_safetensors.format.dtypes import DTYPES, from_numpy
from orbax_safetensors.format.header import PREFIX_BYTES, fingerprint
from orbax_safetensors.format.index import SUFFIX
from orbax_safetensors.format.layout import MAX_FILE_BYTES, Layout, TensorFacts, lay_out
from orbax_safetensors.mapping import registry
from orbax_safetensors.mapping.config_tree import tree_of_config
from orbax_safetensors.mapping.family import Family, Variant, switches_of
from orbax_safetensors.orbax_store.directories import is_on_gcs
from orbax_safetensors.orbax_store.discovery import find_finished
from orbax_safetensors.storage.paths import PathLike, absolute_path, as_text
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Stamp, Store

_ALIGNMENT = 8  # of the reference writer
# The tensors of gpt-oss that MXFP4 encodes, as 16 bytes of codes and a scale for 32 elements.
_MXFP4 = re.compile(r".+\.experts\.(gate_up|down)_proj")
# Biases of routers, which are published in float32 whatever the config says.
_FLOAT32 = re.compile(r".+\.e_score_correction_bias")


def config_directory(path: PathLike, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Return the directory of the `config.json` that `path` stands for; None if `path` stands for a checkpoint.

    `path` is that of a `config.json`, or a directory with one that has neither safetensors files nor an Orbax
    checkpoint.
    """
    text = as_text(path)
    if posixpath.basename(text) == CONFIG_NAME:
        return posixpath.dirname(text) or "."
    if not (is_on_gcs(absolute_path(path)) or os.path.isdir(text)):
        return None
    store, directory = store_of(path, storage_options)
    names = list(store.list(directory) or ())
    if CONFIG_NAME not in names or any(map(is_part, names)):
        return None
    try:
        find_finished(epath.Path(absolute_path(path)))
    except MissingError:
        return text
    except StorageError:
        pass
    return None


def read_for_plan(
    path: PathLike,
    family: FamilyLike,
    variant: Mapping[str, Any] | None,
    storage_options: Mapping[str, Any] | None,
    *,
    partial: bool = False,
) -> Checkpoint:
    """Return `read_checkpoint`, or the checkpoint that a family describes if there is only a `config.json`.

    It has all tensors that the variant may have, in the config's dtype. Raises `MissingError` without a family, and
    `MappingError` if the tensors do not follow from the config.
    """
    directory = config_directory(path, storage_options)
    if directory is None:
        return read_checkpoint(path, storage_options, partial=partial)
    store, directory = store_of(directory, storage_options)
    config_path = posixpath.join(directory, CONFIG_NAME)
    config = parse_config(store.open(config_path))
    try:
        chosen = registry.find(family, config)
        if chosen is None:
            raise MissingError(f"{directory}: holds no {SUFFIX} file; a plan of its {CONFIG_NAME} alone needs a family")
        return _checkpoint_from_config(store, directory, config, chosen, switches_of(variant))
    except MappingError as error:
        raise MappingError(f"{config_path}: {error}") from error


def _checkpoint_from_config(
    store: Store, directory: str, config: Mapping[str, Any], family: Family, variant: Variant
) -> Checkpoint:
    stored = _stored_by(config)
    tree, shapes = tree_of_config(family, config, variant)
    used = sorted({name for view in tree.values() for name in view.tensors}, key=by_number)
    facts = [fact for name in used for fact in stored(name, shapes[name])]
    layout = lay_out(facts, {}, max_file_bytes=MAX_FILE_BYTES, alignment=_ALIGNMENT)
    return _checkpoint(store, directory, layout)


def _stored_by(config: Mapping[str, Any]) -> Callable[[str, tuple[int, ...]], Sequence[TensorFacts]]:
    """Return what a config says of how a tensor is stored: as one tensor, or as codes and scales."""
    if (dtype := config_dtype(config)) is None:
        raise MappingError("has no dtype or torch_dtype, so a plan needs the files")
    floats = from_numpy(dtype)
    quantized = quantization_config(config)
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
    if method not in (None, "mxfp4"):
        raise MappingError(
            f"quantization_config {method!r:.80} does not name the quantised tensors; a plan needs the files"
        )

    def stored(name: str, shape: tuple[int, ...]) -> Sequence[TensorFacts]:
        if method == "mxfp4" and _MXFP4.fullmatch(name):
            *leading, columns, rows = shape
            grid = (*leading, rows, columns // 32)
            return [(f"{name}_blocks", DTYPES["U8"], (*grid, 16)), (f"{name}_scales", DTYPES["U8"], grid)]
        return [(name, DTYPES["F32"] if _FLOAT32.fullmatch(name) else floats, shape)]

    return stored


def _checkpoint(store: Store, directory: str, layout: Layout) -> Checkpoint:
    """Return the checkpoint that these files will be."""
    files, tensors = [], {}
    for number, (name, header) in enumerate(layout.files):
        stamp = Stamp(header.file_bytes, "")
        seal = fingerprint(header.file_bytes, header.encoded[PREFIX_BYTES:])
        files.append(StoredFile(posixpath.join(directory, name), stamp, header, seal))
        for tensor, entry in header.tensors.items():
            piece = StoredPiece(number, entry, (0,) * len(entry.shape))
            tensors[tensor] = StoredTensor(entry.dtype, entry.shape, (piece,))
    requests = 1 + (layout.index is not None) + len(files)
    return Checkpoint(directory, tuple(files), tensors, store, open_requests=requests)
