"""What a save stores, which follows from its arguments alone: tensors and their files, and the model's other files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from orbax_safetensors.checkpoint.family import TensorTypes, nearest_to, other_family_of, stored_leaves, with_variant
from orbax_safetensors.checkpoint.leaf import Leaf, leaves_of
from orbax_safetensors.checkpoint.model_files import ModelFiles, model_files_of
from orbax_safetensors.checkpoint.quantized import casts_codes, stores_codes
from orbax_safetensors.checkpoint.reference import Reference, read_reference
from orbax_safetensors.devices.casts import Casts
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import from_numpy, nbytes
from orbax_safetensors.format.index import INDEX_SUFFIX
from orbax_safetensors.format.layout import ADAPTER_STEM, Layout, TensorFacts, lay_out, lay_out_files
from orbax_safetensors.format.names import some
from orbax_safetensors.mapping import registry
from orbax_safetensors.mapping.family import NO_FAMILY, Variant
from orbax_safetensors.save.copied import copied_leaves, follows
from orbax_safetensors.save.request import SaveRequest

logger = logging.getLogger(__name__)

# Hugging Face's loaders refuse a file whose metadata does not name a framework.
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Contents:
    """What a save stores.

    Attributes:
      leaves: of the tree, with their views.
      tensors: in the order of the files.
      metadata: of every file.
      model_files: what belongs to the model besides tensors.
      like: the checkpoint that decides on the files; None if there is none.
      copied: leaves that stand for the tensors that are copied from it.
    """

    leaves: Sequence[Leaf]
    tensors: TensorTypes
    metadata: Mapping[str, str]
    model_files: ModelFiles
    like: Reference | None = None
    copied: Sequence[Leaf] = ()

    @property
    def written(self) -> list[Leaf]:
        """All leaves whose bytes a save writes."""
        return [*(leaf for leaf in self.leaves if not leaf.is_double), *self.copied]

    def layout(
        self, max_file_bytes: int, alignment: int, writers: Mapping[str, frozenset[int]] | None = None, count: int = 1
    ) -> Layout:
        """Return the files of `tensors`: those of the checkpoint to be like, if they hold at most `max_file_bytes`.

        Otherwise files are filled one after the other. If each file has one of `count` writers, there are enough files
        for all, and the tensors of each file have the same `writers`. Raises `HeaderError` if a tensor cannot be
        stored.
        """
        facts = {name: (name, from_numpy(dtype), shape) for name, (dtype, shape) in self.tensors.items()}
        for leaf in self.copied:  # of dtypes that NumPy may lack
            assert self.like is not None
            stored = self.like.checkpoint[leaf.name]
            facts[leaf.name] = (leaf.name, stored.stored_dtype, stored.stored_shape)
        omitted: Set[str] = frozenset()
        if self.like is not None:
            omitted = self.like.checkpoint.tensors.keys() - self.like.listed.tensors.keys()
        stem = self.model_files.stem
        if self.like is not None and not self.model_files.is_adapter:
            stem = self.like.checkpoint.stem
        if count > 1:
            max_file_bytes = min(max_file_bytes, max(1, -(-_nbytes(facts.values()) // count)))
        elif self.like is not None and stem != ADAPTER_STEM and (names := self.like.files(self.tensors)) is not None:
            files = {file: [facts[name] for name in tensors] for file, tensors in names.items()}
            if all(len(tensors) == 1 or _nbytes(tensors) <= max_file_bytes for tensors in files.values()):
                index_name = self.like.checkpoint.index_name or f"{stem}{INDEX_SUFFIX}"
                return lay_out_files(files, self.metadata, alignment=alignment, index_name=index_name, omitted=omitted)
        return lay_out(
            list(facts.values()),
            self.metadata,
            max_file_bytes=max_file_bytes,
            alignment=alignment,
            stem=stem,
            group=(writers or {}).get,
            omitted=omitted,
        )


def _nbytes(tensors: Iterable[TensorFacts]) -> int:
    return sum(nbytes(dtype, shape) for _, dtype, shape in tensors)


def contents_of(request: SaveRequest, *, abstract: bool = False) -> Contents:
    """Check a request, and return what it stores; `abstract` is as for `leaves_of`.

    Raises `TensorMismatchError`, `MappingError` or `SafetensorsError` if arguments are wrong or do not fit each other,
    and what `open_checkpoint` raises if `like` cannot be opened.
    """
    request.check()
    family, like, options = request.family, request.like, request.options
    casts = Casts(request.dtype)
    leaves = leaves_of(request.item, request.save_args, casts, abstract=abstract)
    model_files = model_files_of(request.config, options.storage_options)
    if like is None:
        reference, metadata = None, _METADATA
        config = model_files.config or {}
        known = registry.find(family, config, saves=True)
    else:
        reference = read_reference(like, family, model_files.config, options)
        known, config, model_files = reference.family, reference.config, reference.model_files
        metadata = _METADATA | reference.metadata

    def attempt(switches: Variant) -> tuple[list[Leaf], TensorTypes, Variant]:
        if reference is None:
            return *stored_leaves(leaves, known, switches, config), switches
        return *reference.stored_leaves(leaves, switches), switches

    stored = None if reference is None else reference.listed.shapes
    nearest = nearest_to(leaves, known, config, stored)
    viewed, tensors, switches = with_variant(
        attempt,
        request.variant,
        nearest,
        lambda: other_family_of({leaf.name: leaf.shape for leaf in leaves}, config, known),
    )
    if twice := [leaf.name for leaf in viewed if leaf.is_double]:
        logger.warning("These leaves are not saved, as other leaves are made of the same tensors: %s", some(twice))
    if casts.everywhere is not None:
        before = {name: (leaf.value.dtype, tensors[name][1]) for leaf in viewed for name in leaf.view.tensors}
        if stores_codes(before, config if model_files.config is None else model_files.config):
            raise TensorMismatchError(f"the tree has codes of quantised tensors, and {casts_codes(casts)}")
    copied: list[Leaf] = []
    if reference is not None:
        unused = [name for name in reference.checkpoint.tensors if name not in tensors]
        rest = [name for name in unused if request.rest == "copy" and not follows(name)]
        if left_out := [name for name in unused if name not in rest]:
            logger.warning("%s: the tree has no leaf for these tensors, which are not saved: %s", like, some(left_out))
        if rest:
            logger.info("%s: the tree has no leaf for these tensors, which are copied: %s", like, some(rest))
        copied = copied_leaves(reference.source, rest, options)
        types = tensors | {leaf.name: (leaf.dtype, leaf.shape) for leaf in copied}
        tensors = {name: types[name] for name in reference.checkpoint.tensors if name in types}
    use = NO_FAMILY if known is None else known.use(config, stored, switches)
    if reference is not None and request.config is None:
        model_files = model_files.cast(tensors, reference.checkpoint, config)
    if known is not None:
        model_files = model_files.naming(known)
    model_files = replace(model_files.storing(tensors), use=use)
    return Contents(viewed, tensors, metadata | dict(request.metadata or {}), model_files, reference, copied)
