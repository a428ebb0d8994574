"""A checkpoint of any kind as a source of tiles: safetensors files, a link, or a checkpoint of Orbax."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.family import FamilyLike, mapped
from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.checkpoint.quantized import quantized_tensors
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.errors import MappingError
from orbax_safetensors.geometry.view import View
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store import array_name, open_step
from orbax_safetensors.orbax_store.discovery import TREE_FILE
from orbax_safetensors.orbax_store.leaf import STRING
from orbax_safetensors.storage.paths import PathLike, absolute_path
from orbax_safetensors.streaming.cutting import batch_bytes, memory_for
from orbax_safetensors.streaming.orbax_source import OrbaxSource
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from orbax_safetensors.streaming.tiles import TileSource


def open_source(
    path: PathLike,
    memory_bytes: int,
    *,
    family: FamilyLike = None,
    variant: Mapping[str, Any] | None = None,
    decode: bool = False,
    as_orbax: bool = False,
) -> TileSource:
    """Open all arrays of a checkpoint, under the names that `inspect` lists; the caller closes the source.

    Of safetensors files, these are the leaves of the family, or without one the stored tensors. With `decode`, tensors
    that hold codes are read as the float32 values that they stand for, if the format is known. With `as_orbax`, the
    arrays are those that Orbax restores, if a link has made the files a checkpoint of Orbax. Reads take about
    `memory_bytes`, or what the largest chunk of Orbax needs.
    """
    if is_orbax(absolute_path(path)) or (as_orbax and os.path.exists(os.path.join(absolute_path(path), TREE_FILE))):
        return _of_orbax(path, memory_bytes)
    checkpoint = read_checkpoint(path)
    if decode and family is None:
        views = _decoded(checkpoint)
    else:
        checkpoint = mapped(checkpoint, family, variant, complete=True, dequantize=True)
        views = checkpoint, checkpoint.leaves
    return SafetensorsSource(*views, {}, memory_bytes, SafetensorsOptions().direct)


def _of_orbax(path: PathLike, memory_bytes: int) -> OrbaxSource:
    step = open_step(path, memory_bytes=batch_bytes(memory_bytes))
    stored = {
        array_name(step.items, item, name): (checkpoint, name)
        for item, checkpoint in step.items.items()
        for name, leaf in checkpoint.leaves.items()
        if leaf.kind != STRING
    }
    chunks = [item.leaves[name].chunk_nbytes for item, name in stored.values()]
    source = OrbaxSource(step, stored, max(memory_bytes, memory_for(max(chunks, default=0))))
    source.path = step.item_path
    return source


def _decoded(checkpoint: Checkpoint) -> tuple[Checkpoint, Mapping[str, View]]:
    """Return a checkpoint and the views of its stored tensors, with values in place of codes."""
    with suppress(MappingError):  # what cannot be decoded is read as it is stored
        encoded = quantized_tensors(checkpoint, read_config(checkpoint)).tensors
        decoded = replace(checkpoint, quantized=encoded, decoded_dtype=np.dtype(np.float32))
        values = {tensor.codes: decoded.view(name) for name, tensor in encoded.items()}
        return decoded, {**checkpoint.leaves, **values}
    return checkpoint, checkpoint.leaves
