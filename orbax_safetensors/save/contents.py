"""What a save stores, which follows from its arguments alone: tensors and their files, and the model's other files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import orbax.checkpoint as ocp

from orbax_safetensors.checkpoint.family import FamilyLike, TensorTypes, taken_apart
from orbax_safetensors.checkpoint.leaf import Leaf, leaves_of
from orbax_safetensors.checkpoint.model_files import ModelFiles, model_files_of
from orbax_safetensors.checkpoint.reference import Reference, read_reference
from orbax_safetensors.checkpoint.variants import with_variant
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.format.dtypes import from_numpy, nbytes
from orbax_safetensors.format.layout import Layout, TensorFacts, lay_out, lay_out_files
from orbax_safetensors.format.names import some
from orbax_safetensors.mapping import registry
from orbax_safetensors.mapping.family import NO_FAMILY, Variant
from orbax_safetensors.mapping.inference import nearest_variant
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.save.whole import file_bytes
from orbax_safetensors.storage.paths import PathLike, check_one_store

logger = logging.getLogger(__name__)

# Hugging Face's loaders refuse a file whose metadata does not name a framework.
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Contents:
    """What a save stores.

    Attributes:
      item: the tree, with None in place of `ocp.PLACEHOLDER`.
      leaves: with their views.
      tensors: in the order of the files.
      metadata: of every file.
      model_files: what belongs to the model besides tensors.
      like: the checkpoint that decides on the files; None if there is none.
    """

    item: Any
    leaves: Sequence[Leaf]
    tensors: TensorTypes
    metadata: Mapping[str, str]
    model_files: ModelFiles
    like: Reference | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether this is an adapter of PEFT, which reads one file."""
        if self.model_files.is_adapter:
            return True
        return self.like is not None and self.like.checkpoint.is_adapter

    def layout(self, max_file_bytes: int, alignment: int, *, writers: int = 1) -> Layout:
        """Return the files of `tensors`: those of the checkpoint to be like, if they hold at most `max_file_bytes`.

        Otherwise files are filled one after the other, and so they are for several `writers` of whole files, with files
        enough for all. Raises `HeaderError` if a tensor cannot be stored.
        """
        facts = {name: (name, from_numpy(dtype), shape) for name, (dtype, shape) in self.tensors.items()}
        if writers > 1:
            max_file_bytes = file_bytes(_nbytes(facts.values()), max_file_bytes, writers)
        names = None if self.like is None or writers > 1 or self.is_adapter else self.like.files(self.tensors)
        if names is not None:
            files = {file: [facts[name] for name in of_file] for file, of_file in names.items()}
            if all(len(of_file) == 1 or _nbytes(of_file) <= max_file_bytes for of_file in files.values()):
                return lay_out_files(files, self.metadata, alignment=alignment)
        return lay_out(
            list(facts.values()),
            self.metadata,
            max_file_bytes=max_file_bytes,
            alignment=alignment,
            adapter=self.is_adapter,
        )


def _nbytes(tensors: Iterable[TensorFacts]) -> int:
    return sum(nbytes(dtype, shape) for _, dtype, shape in tensors)


def contents_of(
    directory: PathLike,
    item: Any,
    save_args: Any,
    *,
    metadata: Mapping[str, str] | None,
    max_file_bytes: int,
    family: FamilyLike,
    variant: Mapping[str, Any] | None,
    config: Any,
    like: PathLike | None,
    options: SafetensorsOptions,
    abstract: bool = False,
) -> Contents:
    """Check the arguments of a save to `directory`; `abstract` is as for `leaves_of`.

    Raises `TensorMismatchError`, `MappingError` or `SafetensorsError` if they are wrong or do not fit each other, and
    what `open_checkpoint` raises if `like` cannot be opened.
    """
    if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise SafetensorsError(f"max_file_bytes is {max_file_bytes!r}, must be an integer of at least 1")
    if not isinstance(metadata, Mapping | None):
        raise SafetensorsError(f"metadata is {metadata!r:.80}, must be a dict of strings")
    check_one_store(options.storage_options, directory, config, like)
    if any(leaf is ocp.PLACEHOLDER for leaf in jax.tree.leaves(item)):
        item = jax.tree.map(lambda leaf: None if leaf is ocp.PLACEHOLDER else leaf, item)
    leaves = leaves_of(item, save_args, abstract=abstract)
    model_files = model_files_of(config, options.storage_options)
    if like is None:
        reference, of_files = None, _METADATA
        config = model_files.config or {}
        known = registry.find(family, config)
    else:
        reference = read_reference(like, family, model_files.config, options)
        known, config, model_files = reference.family, reference.config, reference.model_files
        of_files = _METADATA | reference.metadata

    def attempt(switches: Variant) -> tuple[list[Leaf], TensorTypes, Variant]:
        if reference is None:
            return *taken_apart(leaves, family, switches, config), switches
        return *reference.taken_apart(leaves, switches), switches

    def nearest(passed: Variant) -> Variant | None:
        shapes = {leaf.name: leaf.shape for leaf in leaves}
        stored = None if reference is None else reference.checkpoint.shapes
        return None if known is None else nearest_variant(known, config, shapes, passed, stored)

    viewed, tensors, switches = with_variant(attempt, variant, nearest)
    if reference is not None and (unused := [name for name in reference.checkpoint.tensors if name not in tensors]):
        logger.warning("%s: the family does not use these tensors, which the save leaves out: %s", like, some(unused))
    stored = None if reference is None else reference.checkpoint.shapes
    use = NO_FAMILY if known is None else known.use(config, stored, switches)
    model_files = replace(model_files.storing(tensors), use=use)
    return Contents(item, viewed, tensors, of_files | dict(metadata or {}), model_files, reference)
