"""Conversions into a checkpoint of Orbax: from safetensors files, or from another checkpoint of Orbax."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from typing import Any

from orbax_safetensors.checkpoint.family import mapped
from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.checkpoint.quantized import check_casts
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.convert.convert_request import ConvertRequest, ReshardRequest
from orbax_safetensors.devices.partition import Partition, partition
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping.family import RECORD_KEY
from orbax_safetensors.orbax_store import (
    OrbaxCheckpoint,
    OrbaxItem,
    OrbaxLeaf,
    array_name,
    open_step,
    sharded_leaf,
)
from orbax_safetensors.orbax_store.leaf import ARRAYS
from orbax_safetensors.streaming.cutting import batch_bytes, interleaved
from orbax_safetensors.streaming.orbax_sink import orbax_sink
from orbax_safetensors.streaming.orbax_source import OrbaxSource
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from orbax_safetensors.streaming.tile_job import TileJob

# The most bytes of a chunk, which Orbax reads whole even for a part, if the caller does not say how arrays will be
# sharded. TensorStore reads and writes chunks through its buffers, and glibc maps buffers of 32 MiB or more anew, page
# by page: with chunks of 64 MiB, reading back took the system 1.7 times the time.
_CHUNK_BYTES = 16 * 2**20

logger = logging.getLogger(__name__)


def orbax_from_files(request: ConvertRequest) -> TileJob:
    """Return the job that makes a step of Orbax of safetensors files."""
    checkpoint = read_checkpoint(request.source, request.options.storage_options)
    checkpoint = mapped(checkpoint, request.family, request.variant, complete=True, dequantize=True)
    check_casts(checkpoint, request.casts, dequantize=True)
    dtypes = request.casts.of({name: view.dtype for name, view in checkpoint.leaves.items()})
    cut = request.partition or partition(None, None)
    cut.check((name, view.shape) for name, view in checkpoint.leaves.items())
    wrapper = checkpoint.wrapper
    custom_metadata = wrapper.custom_metadata
    if checkpoint.use.family is not None:
        custom_metadata = {**(custom_metadata or {}), RECORD_KEY: checkpoint.use.record()}
    above = wrapper.above
    views = {f"{above}{name}": view for name, view in checkpoint.leaves.items()}
    casted = {f"{above}{name}": dtype for name, dtype in dtypes.items()}

    def leaf(name: str, view: View) -> OrbaxLeaf:
        return sharded_leaf(cut, name, view.shape, dtypes[name])

    source = SafetensorsSource(checkpoint, views, casted, request.memory_bytes, request.options.direct)
    sink = orbax_sink(
        source,
        os.path.join(request.destination, str(request.step)),
        {"items": OrbaxItem(wrapper.around(checkpoint.tree(leaf)))},
        interleaved(views),
        memory_bytes=request.memory_bytes,
        chunk_bytes=_chunk_bytes(cut, request.memory_bytes),
        metadata={"custom_metadata": custom_metadata},
        compression=request.compression,
    )
    return TileJob(source, sink, checkpoint.use)


def orbax_from_orbax(request: ReshardRequest) -> TileJob:
    """Return the job that stores a step or an item of Orbax anew, in other chunks."""
    step = open_step(request.source, memory_bytes=batch_bytes(request.memory_bytes))
    request.check_outside(step.whole)
    items = {name: item for name, item in step.items.items() if item.leaves}
    if not items:
        raise SafetensorsError(f"{request.source}: holds no arrays")
    for item in items.values():
        if not is_orbax(item.path, request.options.storage_options):
            logger.warning(
                "%s: is a model of Hugging Face and becomes a tree of Orbax, which SafetensorsHandler does not "
                "restore; reshard it by itself to keep its format",
                item.path,
            )
    stored = {
        array_name(items, item, name): (checkpoint, name)
        for item, checkpoint in items.items()
        for name, leaf in checkpoint.leaves.items()
        if leaf.kind in ARRAYS
    }
    source = OrbaxSource(step, stored, request.memory_bytes)
    cut = request.partition or partition(None, None)
    cut.check((name, item.leaves[name].shape) for item, name in stored.values())

    def anew(item: OrbaxCheckpoint, name: str, facts: OrbaxLeaf) -> Any:
        if facts.kind not in ARRAYS:
            return item.value(name)
        leaf = sharded_leaf(cut, name, facts.shape, facts.dtype)
        record = leaf.sharding if request.partition else facts.sharding
        return replace(leaf, kind=facts.kind, random_key=facts.random_key, sharding=record)

    sink = orbax_sink(
        source,
        request.destination if step.step is None else os.path.join(request.destination, step.step),
        {
            name: OrbaxItem(
                item.tree(partial(anew, item)), item.recorded.custom_metadata, item.ocdbt, item.recorded.zarr3
            )
            for name, item in items.items()
        },
        [(name,) for name in source.leaves],
        memory_bytes=request.memory_bytes,
        chunk_bytes=_chunk_bytes(cut, request.memory_bytes),
        metadata=step.metadata,
        others={**step.others, **{name: item.path for name, item in step.items.items() if name not in items}},
        compression=request.compression,
    )
    return TileJob(source, sink)


def _chunk_bytes(sharding: Partition, memory_bytes: int) -> int:
    """Return the most bytes of a chunk; if the caller says how arrays are sharded, a chunk is a device's shard."""
    return memory_bytes if sharding.patterns or sharding.names else _CHUNK_BYTES
