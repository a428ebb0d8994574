"""Conversions into safetensors files: from a checkpoint of Orbax, or from other safetensors files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.family import TensorTypes, mapped, nearest_to, stored_leaves, with_variant
from orbax_safetensors.checkpoint.leaf import Leaf
from orbax_safetensors.checkpoint.model_files import ModelFiles, files_beside, model_files_of
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.convert.convert_request import ConvertRequest, ReshardRequest
from orbax_safetensors.devices.partition import Partition
from orbax_safetensors.errors import MappingError, StorageError, TensorMismatchError
from orbax_safetensors.format.dtypes import DType, from_numpy
from orbax_safetensors.format.layout import MAX_FILE_BYTES, lay_out
from orbax_safetensors.format.sharding_info import without_sharding_info
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping import registry
from orbax_safetensors.mapping.architectures import architecture_text
from orbax_safetensors.mapping.config_tree import tree_of_config
from orbax_safetensors.mapping.families import DEQUANTIZED
from orbax_safetensors.mapping.family import NO_FAMILY, RECORD_KEY, FamilyUse, StateWrapper, Variant, wrapper_of
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store import OrbaxCheckpoint, open_orbax
from orbax_safetensors.orbax_store.leaf import STRING
from orbax_safetensors.storage.paths import is_below
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.streaming.cutting import batch_bytes, bundle_bytes, check_fits, interleaved
from orbax_safetensors.streaming.file_layout import Files, Tensors, in_pieces
from orbax_safetensors.streaming.files_sink import FilesSink
from orbax_safetensors.streaming.objects_sink import ObjectsSink
from orbax_safetensors.streaming.orbax_source import OrbaxSource
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from orbax_safetensors.streaming.sink import Sink
from orbax_safetensors.streaming.tile_job import TileJob
from orbax_safetensors.streaming.tiles import TileSource
from orbax_safetensors.transfer.plan import in_file_order, locations

logger = logging.getLogger(__name__)

_ALIGNMENT = SafetensorsOptions().alignment
_METADATA = {"format": "pt"}


def files_from_orbax(request: ConvertRequest) -> TileJob:
    """Return the job that makes safetensors files of an item of Orbax."""
    path = request.source
    checkpoint = open_orbax(path, memory_bytes=batch_bytes(request.memory_bytes))
    request.check_outside(checkpoint.whole)
    model_files = model_files_of(request.config, request.options.storage_options)
    if isinstance(request.family, str) and model_files.config is None:
        raise MappingError(f"{path}: a family needs the config of the model: pass config (--config)")
    config, custom_metadata = model_files.config or {}, checkpoint.custom_metadata
    family = registry.find(request.family, config)
    wrapper = wrapper_of(family, request.variant)
    recorded: Variant = {}
    if family is not None:
        recorded = {**family.recorded(custom_metadata.get(RECORD_KEY)), **wrapper.variant(custom_metadata)}
    stored = _arrays(checkpoint, wrapper)
    if request.family is None and family is None:
        made_by = _made_by(custom_metadata.get(RECORD_KEY))
        if config:
            _check_plain(path, stored, config, made_by)
        elif made_by:
            logger.warning(
                "%s: was converted with %s; without family and config (--family, --config) the files are not a Hugging "
                "Face model",
                path,
                made_by,
            )
    source = OrbaxSource(checkpoint, {leaf: (checkpoint, name) for leaf, name in stored.items()}, request.memory_bytes)
    # Arrays without memory, for their shape and dtype.
    leaves = [
        Leaf(
            name,
            np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape),
            leaf.dtype,
            View.tensor(name, leaf.shape, leaf.dtype),
        )
        for name, leaf in source.leaves.items()
    ]

    def attempt(switches: Variant) -> tuple[list[Leaf], TensorTypes, Variant]:
        variant = {**recorded, **switches}
        return *stored_leaves(leaves, family, variant, config), variant

    nearest = nearest_to(leaves, family, config)
    viewed, tensors, variant = with_variant(attempt, request.variant, nearest)
    use = NO_FAMILY if family is None else family.use(config, None, variant)
    max_file_bytes = MAX_FILE_BYTES
    if not store_of(request.destination, request.options.storage_options)[0].is_local:
        # A file waits in memory until it is whole, because its tensors come in another order.
        max_file_bytes = min(max_file_bytes, bundle_bytes(request.memory_bytes))
        # A chunk is read for every file that has a part of it, so tensors that are stored together go into one file.
        tensors = {name: tensors[name] for leaf in viewed for name in leaf.view.tensors} | tensors
    dtypes = request.casts.of({name: dtype for name, (dtype, _) in tensors.items()})
    layout = lay_out(
        [(name, _stored(path, name, dtypes[name]), shape) for name, (_, shape) in tensors.items()],
        _METADATA,
        max_file_bytes=max_file_bytes,
        alignment=_ALIGNMENT,
        stem=model_files.stem,
    )
    model_files = model_files.storing({name: (dtypes[name], shape) for name, (_, shape) in tensors.items()})
    model_files = replace(model_files if family is None else model_files.naming(family), use=use)
    files = Files(layout, locations(layout), {leaf.name: leaf.view for leaf in viewed if not leaf.is_double})
    groups = interleaved(files.views)
    for names in groups:
        for name in names:
            check_fits(name, len(names) * checkpoint.leaves[stored[name]].chunk_nbytes, request.memory_bytes)
    return _to_files(source, request, files, model_files, groups, use)


def files_from_files(request: ReshardRequest) -> TileJob:
    """Return the job that lays out safetensors files anew: files of limited size, or one for each device."""
    listed = read_checkpoint(request.source, request.options.storage_options)
    # Files with pieces of tensors have no index, so they cannot hold what it omits.
    checkpoint = listed.with_omitted() if request.partition is None else listed
    source = SafetensorsSource(checkpoint, checkpoint.leaves, {}, request.memory_bytes, request.options.direct)
    stored = {name: (tensor.stored_dtype, tensor.stored_shape) for name, tensor in checkpoint.tensors.items()}
    metadata = _METADATA | without_sharding_info(checkpoint.metadata)
    if request.partition is None:
        layout = lay_out(
            [(name, *facts) for name, facts in stored.items()],
            metadata,
            max_file_bytes=request.max_file_bytes,
            alignment=_ALIGNMENT,
            stem=checkpoint.stem,
            omitted=listed.omitted,
        )
        files = Files.of(layout, source.leaves)
    else:
        files = _in_shards(stored, request.partition, metadata)
    return _to_files(source, request, files, files_beside(checkpoint), [(name,) for name in source.leaves])


def plain_files_from_files(request: ConvertRequest) -> TileJob:
    """Return the job that makes plain safetensors files of quantised ones, under the stored names."""
    listed = read_checkpoint(request.source, request.options.storage_options)
    checkpoint = listed.with_omitted()
    request.check_outside(checkpoint.directory)
    if request.config is None:
        model_files = replace(files_beside(checkpoint), config=read_config(checkpoint) or None)
    else:
        model_files = model_files_of(request.config, request.options.storage_options)
    checkpoint = mapped(checkpoint, DEQUANTIZED, request.variant, complete=True, dequantize=True)
    dtypes = request.casts.of({name: view.dtype for name, view in checkpoint.leaves.items()})
    names = in_file_order(checkpoint.leaves, checkpoint.location)
    views = {name: checkpoint.leaves[name] for _, name in names}
    source = SafetensorsSource(checkpoint, views, dtypes, request.memory_bytes, request.options.direct)
    stored = {name: {*map(checkpoint.codes, view.tensors)} or {name} for name, view in views.items()}
    layout = lay_out(
        [(name, from_numpy(leaf.dtype), leaf.shape) for name, leaf in source.leaves.items()],
        _METADATA | without_sharding_info(checkpoint.metadata),
        max_file_bytes=MAX_FILE_BYTES,
        alignment=_ALIGNMENT,
        stem=checkpoint.stem,
        omitted=[name for name, tensors in stored.items() if tensors <= listed.omitted.keys()],
    )
    model_files = model_files.storing({name: (leaf.dtype, leaf.shape) for name, leaf in source.leaves.items()})
    files = Files.of(layout, source.leaves)
    return _to_files(source, request, files, model_files, [(name,) for name in source.leaves], checkpoint.use)


def _in_shards(stored: Tensors, sharding: Partition, metadata: dict[str, str]) -> Files:
    """Return a file for each device."""
    sharding.check((name, shape) for name, (_, shape) in stored.items())
    for name, (dtype, shape) in stored.items():
        if dtype.bits < 8 and sharding.shard(name, shape) != shape:
            raise TensorMismatchError(f"{name!r}: elements of {dtype.name} share bytes, so it cannot be sharded")
    boxes = {name: sharding.boxes(name, shape) for name, (_, shape) in stored.items()}
    return in_pieces(stored, boxes, metadata, _ALIGNMENT)


def _to_files(
    source: TileSource,
    request: ConvertRequest | ReshardRequest,
    files: Files,
    model_files: ModelFiles,
    groups: Sequence[tuple[str, ...]],
    use: FamilyUse = NO_FAMILY,
) -> TileJob:
    """Return the job that writes files; `groups` are leaves that interleave in them, `use` is the family."""
    store, destination = store_of(request.destination, request.options.storage_options)
    sink: Sink
    if store.is_local:
        sink = FilesSink(source, destination, files, model_files, groups, request.memory_bytes)
    else:
        sink = ObjectsSink(source, store, destination, files, model_files, request.memory_bytes)
    if is_below(source.path, unfinished := sink.workspace.path):
        what = "the destination" if unfinished == destination else f"which is what becomes {destination}; move it away"
        raise StorageError(f"{source.path}: is in {unfinished}, {what}")
    return TileJob(source, sink, use)


def _made_by(record: Any) -> str | None:
    """Return the family that has changed names in a recorded conversion, if there is one."""
    made_by = record.get("family") if isinstance(record, Mapping) else None
    return made_by if isinstance(made_by, str) and made_by != DEQUANTIZED.name else None


def _check_plain(path: str, names: Iterable[str], config: Mapping[str, Any], made_by: str | None) -> None:
    """Raise `MappingError` if tensors of these names would stand beside the config of a model that has none of them.

    A conversion has recorded so, or families know it. A reader of the config would find no weights, and may take random
    ones.
    """
    own_names = "; family='identity' (--family identity) keeps its own names"
    if made_by:
        raise MappingError(f"{path}: was converted with {made_by}: pass family={made_by!r} (--family){own_names}")
    try:
        models = [(each, tree_of_config(each, config, {})[1]) for each in registry.known_for(config)]
    except MappingError:  # there is no family for the config, or the config lacks something
        return
    if all(shapes.keys().isdisjoint(each.renamed(names, config).values()) for each, shapes in models):
        short = " or ".join(sorted({each.name.partition(".")[0] for each, _ in models}))
        raise MappingError(
            f"{path}: has no tensor of {architecture_text(config)} under its stored name: pass the family of "
            f"the tree, as {short} (--family){own_names}"
        )


def _stored(path: str, name: str, dtype: np.dtype) -> DType:
    try:
        return from_numpy(dtype)
    except TensorMismatchError as error:
        raise TensorMismatchError(f"{path}: {name!r}: {error}") from None


def _arrays(checkpoint: OrbaxCheckpoint, wrapper: StateWrapper) -> dict[str, str]:
    """Return the leaves to store as tensors, and the names of their arrays.

    Without a wrapper around the tree, a warning names the leaves that safetensors files cannot hold as they are.
    """
    names = [name for name, leaf in checkpoint.leaves.items() if leaf.kind != STRING]
    if not wrapper.key:
        for what, lost in (
            ("strings are left out", [name for name in checkpoint.leaves if name not in names]),
            ("random keys become their data", [name for name in names if checkpoint.leaves[name].random_key]),
        ):
            if lost:
                logger.warning("%s: safetensors files hold arrays only, so %s: %s", checkpoint.path, what, lost)
    return wrapper.leaves(names)
