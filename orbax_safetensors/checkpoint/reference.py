"""`Reference`: the checkpoint that a save is like, with names, dtypes, order, files and config of its tensors."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint, StoredTensor
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.family import (
    FamilyLike,
    TensorTypes,
    add_tensor,
    decoded,
    without_family,
)
from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.checkpoint.model_files import ModelFiles, files_beside
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.checkpoint.record import recalled
from orbax_safetensors.devices.bits import is_float
from orbax_safetensors.errors import MappingError, TensorMismatchError
from orbax_safetensors.format.dtypes import from_numpy
from orbax_safetensors.format.index import SUFFIX
from orbax_safetensors.format.names import by_path, by_same
from orbax_safetensors.format.sharding_info import without_sharding_info
from orbax_safetensors.mapping import registry
from orbax_safetensors.mapping.coverage import check_use, codes_hint, doubles, leaf_problems, problems_text
from orbax_safetensors.mapping.family import Family, Shapes, Tree
from orbax_safetensors.options import Dequantize, SafetensorsOptions
from orbax_safetensors.storage.paths import PathLike


@dataclass(frozen=True)
class Reference:
    """A checkpoint as a save stores it again.

    Attributes:
      checkpoint: each tensor is in one piece, and plain if a family sees it decoded.
      listed: the same without tensors that the index does not name; a family sees these.
      source: the same checkpoint, from which these tensors can be read.
      family: the family whose tree is saved; None for a tree of stored names.
      config: the content of the config, {} if there is none.
      model_files: the files that are copied, with the config that is written.
      splits: whether the tree has codes and scales of quantised tensors, and stores them again.
    """

    checkpoint: Checkpoint
    listed: Checkpoint
    source: Checkpoint
    family: Family | None
    config: Mapping[str, Any]
    model_files: ModelFiles
    splits: bool = False

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the headers."""
        return without_sharding_info(self.checkpoint.metadata)

    def stored_leaves(self, leaves: Sequence[Leaf], variant: Mapping[str, Any]) -> tuple[list[Leaf], TensorTypes]:
        """Return `leaves` with their views, and dtype and shape of the tensors to store, in the checkpoint's order.

        The dtype of a tensor is the stored one, unless the caller casts the leaf. Raises `MappingError` if the leaves
        are not those of the checkpoint, and `TensorMismatchError` if one cannot be cast to the stored dtype.
        """
        stored = self.checkpoint
        name = registry.IDENTITY.name if self.family is None else self.family.name
        mapped = self._mapped(variant)
        spelled = by_same if self.family is None else by_path
        paths = spelled({leaf.name: leaf for leaf in leaves}, mapped)
        self._check_leaves(mapped, {path: leaf.shape for path, leaf in paths.items()})
        left_out = doubles(mapped, stored.shapes)
        viewed, tensors = [], TensorTypes()
        try:
            for path, leaf in paths.items():
                # The view of a tensor without elements does not name it; a family has none.
                names = (path,) if self.family is None else mapped[path].tensors
                dtypes = {tensor: self._dtype(leaf, tensor) for tensor in names}
                for tensor, dtype in dtypes.items():
                    add_tensor(tensors, name, leaf.name, tensor, dtype, stored.shapes[tensor])
                # A leaf of tensors of several dtypes is computed, so that no index for Orbax needs its dtype.
                dtype = next(iter(dtypes.values()), leaf.dtype)
                view = replace(mapped[path], dtype=leaf.value.dtype)
                viewed.append(replace(leaf, view=view, dtype=dtype, is_double=path in left_out))
            # A family may leave out parts of tensors that it does not need, and a save has to fill every tensor.
            if self.family is not None:
                check_use(name, mapped, {tensor: shape for tensor, (_, shape) in tensors.items()})
        except MappingError as error:
            raise MappingError(f"like {stored.path}: {error}") from error
        return viewed, {tensor: tensors[tensor] for tensor in stored.tensors if tensor in tensors}

    def files(self, tensors: Iterable[str]) -> dict[str, list[str]] | None:
        """Return the names of `tensors` by file, as the checkpoint has them, or None if a save needs other files.

        It does if the files hold pieces of tensors, if one file of any name was passed, or if a file has none of
        `tensors`, which would leave a gap in the numbers of the others.
        """
        names = [posixpath.basename(file.path) for file in self.checkpoint.files]
        in_pieces = self.metadata != self.checkpoint.metadata
        if in_pieces or (self.checkpoint.is_file and names != [f"{self.checkpoint.stem}{SUFFIX}"]):
            return None
        files: dict[str, list[str]] = {name: [] for name in sorted(names)}
        for tensor in tensors:
            files[names[self.checkpoint[tensor].file]].append(tensor)
        return files if all(files.values()) else None

    def _mapped(self, variant: Mapping[str, Any]) -> Tree:
        if self.family is None:
            without_family(variant)
            return Tree(self.listed.leaves)
        dequantize: Dequantize = "split" if self.splits else False
        try:
            listed = decoded(self.listed, self.config, dequantize)
            mapped = listed.mapped_by(self.family, self.config, variant, complete=True)
        except MappingError as error:
            raise MappingError(f"like {self.checkpoint.path}: {error}") from error
        leaves = mapped.leaves
        return Tree(leaves, shared=leaves.shared if isinstance(leaves, Tree) else ())

    def _check_leaves(self, mapped: Tree, leaves: Shapes) -> None:
        """Raise `MappingError` if the leaves to save are not exactly those of the checkpoint."""
        whose = "the checkpoint" if self.family is None else f"the tree of {self.family.name}"
        _, missing, wrong = leaf_problems(mapped, leaves, whose)
        if missing or wrong:
            hint = " (ocp.PLACEHOLDER in place of a leaf leaves it out)" if leaves.keys() > mapped.keys() else ""
            if self.family is None and leaves.keys().isdisjoint(mapped):
                hint += "; the tree has none of its tensors: a model's own tree is saved with family="
            hint += codes_hint(leaves, mapped)
            raise MappingError(f"like {self.checkpoint.path}: {problems_text(missing, wrong)}{hint}")

    def _dtype(self, leaf: Leaf, tensor: str) -> np.dtype:
        """Return the dtype in which a part of a leaf is stored; `TensorMismatchError` if it does not take the leaf."""
        stored = self.checkpoint[tensor].stored_dtype
        if leaf.dtype_is_chosen:
            return leaf.dtype
        if stored.numpy is None or not _takes(stored.numpy, np.dtype(leaf.value.dtype)):
            raise TensorMismatchError(
                f"{leaf.name!r} is {leaf.value.dtype}, and {tensor!r} of {self.checkpoint.path} is {stored.name}: a "
                "save casts floats to floats of 16 bits or more, and integers to longer ones; ocp.SaveArgs(dtype=...) "
                "stores another dtype"
            )
        return stored.numpy


def read_reference(path: PathLike, family: FamilyLike, config: Any, options: SafetensorsOptions) -> Reference:
    """Read what a save takes from the checkpoint at `path`; a `config` has precedence over the config there.

    Raises what `open_checkpoint` raises.
    """
    checkpoint = read_checkpoint(path, options.storage_options)
    stored_config = read_config(checkpoint)
    known = registry.find(family, config or stored_config)
    if known is not None:
        (known,) = recalled([known], checkpoint)
    model_files = ModelFiles(stored_config or None) if checkpoint.is_file else files_beside(checkpoint)
    is_decoded = known is not None and options.dequantize is True
    source, encoded, *_ = decoded(checkpoint.with_omitted(), stored_config, is_decoded)
    listed = replace(source, tensors=checkpoint.tensors, omitted=checkpoint.omitted)
    if encoded.tensors and config is None:
        model_files = replace(model_files, config=stored_config).plain()
    if config is not None:
        model_files = replace(model_files, config=config)
    return Reference(
        _as_saved(source, encoded.unused),
        _as_saved(listed, encoded.unused),
        source,
        known,
        config or stored_config,
        model_files,
        options.dequantize == "split",
    )


def _as_saved(source: Checkpoint, spared: Set[str]) -> Checkpoint:
    """Return `source` with each tensor in one piece, and with plain tensors in place of codes, scales and `spared`."""
    name_of = {quantized.codes: name for name, quantized in source.quantized.items()}
    left_out = spared | {name for quantized in source.quantized.values() for name in quantized.parameters}
    tensors = {}
    for name, tensor in source.tensors.items():
        if name in name_of:
            plain = name_of[name]
            tensors[plain] = StoredTensor(from_numpy(source.decoded_dtype), source.shapes[plain], tensor.pieces)
        elif name not in left_out:
            tensors[name] = tensor._replace(pieces=tensor.pieces[:1])
    return replace(source, tensors=tensors, quantized={})


def _takes(stored: np.dtype, saved: np.dtype) -> bool:
    """Return whether values of dtype `saved` may be cast to the stored dtype."""
    if stored == saved:
        return True
    if is_float(stored):
        return is_float(saved) and stored.itemsize > 1
    return stored.kind == saved.kind and stored.kind in "iu" and stored.itemsize > saved.itemsize
