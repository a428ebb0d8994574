"""`open_checkpoint`: a checkpoint as the tree of a family, or as it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.family import FamilyLike, mapped
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.storage.paths import PathLike


def open_checkpoint(
    path: PathLike,
    *,
    family: FamilyLike = None,
    variant: Mapping[str, Any] | None = None,
    options: SafetensorsOptions | None = None,
) -> Checkpoint:
    """Read the index and all headers of a checkpoint, and validate them.

    ```python
    checkpoint = ost.open_checkpoint("/models/qwen3", family="maxtext")
    for path, view in checkpoint.leaves.items():
        print(path, view.shape, view.dtype)
    ```

    `path` is one `.safetensors` file or a directory: its `model.safetensors`, or if it has an index
    (`*.safetensors.index.json`), the files and tensors that it names, otherwise all `.safetensors` files that are not
    hidden. A warning names files and tensors besides these. A `~` at its beginning is the home directory. With a
    family, or one registered for the architecture in `config.json`, the checkpoint's `leaves` are the model's tree; see
    `SafetensorsRestore`. Of `options`, `dequantize` and `storage_options` count.

    `path` may be a URL as well: of an object store (`gs://`, `s3://`, `az://`, `abfs://`), of a plain server
    (`https://`, `http://`) or on the Hugging Face Hub (`hf://owner/name[@revision][/path]`). A plain server, which does
    not list, has a directory's files by their usual names, `model.safetensors` or those of the index. A revision of the
    Hub is pinned to its commit, which is in the checkpoint's `path`.

    Raises:
      StorageError: something is missing or cannot be read; also a file that the numbers in other names imply.
      HeaderError: a file is not valid.
      IndexFileError: the index is not valid or does not agree with the files, or two files have a tensor of one name.
      MappingError: there is no such family, or it does not fit the checkpoint.
    """
    options = SafetensorsOptions.of(options)
    checkpoint = read_checkpoint(path, options.storage_options)
    return mapped(checkpoint, family, variant, complete=True, dequantize=options.dequantize)


def stored_arrays(checkpoint: Checkpoint) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of every leaf by name, as a restore without an `item` returns it. Needs no device."""
    return {name: jax.ShapeDtypeStruct(view.shape, np.dtype(view.dtype)) for name, view in checkpoint.leaves.items()}
