"""Which work a conversion or a reshard comes to: what is read and decided before the first byte of an array moves."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.family import AskedFamily, mapped, taken_apart
from orbax_safetensors.checkpoint.files import SUFFIX, is_orbax
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.checkpoint.source import Source
from orbax_safetensors.devices.partition import AskedMesh, Partition, Spec, partition
from orbax_safetensors.errors import MappingError, SafetensorsError, StorageError, TensorMismatchError
from orbax_safetensors.format.dtypes import DType, from_numpy
from orbax_safetensors.format.layout import MAX_FILE_BYTES, lay_out
from orbax_safetensors.format.sharding_info import without_sharding_info
from orbax_safetensors.geometry.view import View
from orbax_safetensors.mapping import registry
from orbax_safetensors.mapping.envelope import envelope, is_maxtext
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store import (
    OrbaxCheckpoint,
    OrbaxItem,
    OrbaxLeaf,
    array_name,
    named_sharding,
    open_orbax,
    open_step,
)
from orbax_safetensors.orbax_store.leaf import ARRAYS, STRING
from orbax_safetensors.storage.paths import PathLike, place
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.streaming import file_layout
from orbax_safetensors.streaming.bundles import interleaved
from orbax_safetensors.streaming.casts import Casts
from orbax_safetensors.streaming.model_files import Beside, beside, copied
from orbax_safetensors.streaming.orbax_tiles import OrbaxSource
from orbax_safetensors.streaming.pipeline import TileSource, Work, batch_bytes, bundle_bytes, check_fits, is_below
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from orbax_safetensors.streaming.to_objects import ToObjects
from orbax_safetensors.streaming.to_orbax import OrbaxTarget, ToOrbax
from orbax_safetensors.streaming.to_safetensors import ToSafetensors

logger = logging.getLogger(__name__)

MEMORY_BYTES = 2 * 2**30
_LEAST_MEMORY_BYTES = 4  # of which a quarter can hold something
# What Orbax restores in one piece even where it wants a part, where nobody says how arrays will be sharded. TensorStore
# has a chunk in buffers of its own as it is read and written, and glibc maps anew, page by page, what takes 32 MiB or
# more: with 64 MiB, reading back took the system 1.7 times the time.
_CHUNK_BYTES = 16 * 2**20
_ALIGNMENT = SafetensorsOptions().alignment
_METADATA = {"format": "pt"}


class Asked:
    """What every conversion is asked for: absolute paths or URLs, and memory in bytes; all of it is to be checked."""

    def __init__(self, source: PathLike, destination: PathLike, memory_bytes: int) -> None:
        """Raises nothing: processes agree on what is wrong."""
        self._given = {"source": source, "destination": destination}
        self.memory_bytes = memory_bytes

    @cached_property
    def source(self) -> str:
        """What is read."""
        return place(self._given["source"])

    @cached_property
    def destination(self) -> str:
        """What is made, or the directory of steps that it is made in."""
        return place(self._given["destination"])

    def check(self) -> None:
        """Raises `SafetensorsError` where one of them is nothing that could be meant."""
        for argument, path in self._given.items():
            if not isinstance(path, str | os.PathLike) or not os.fsdecode(path):
                raise SafetensorsError(f"{argument} is {path!r}, must be a path or a URL")
            place(path)
        if type(self.memory_bytes) is not int or self.memory_bytes < _LEAST_MEMORY_BYTES:
            raise SafetensorsError(
                f"memory_bytes is {self.memory_bytes!r}, must be an integer of at least {_LEAST_MEMORY_BYTES}"
            )

    def of_step(self, name: str) -> str:
        """The directory of a step, where the destination is one of steps."""
        return os.path.join(self.destination, name)

    def check_outside(self, source: str) -> None:
        """Raises `StorageError` where what is made would be in the source."""
        if is_below(self.destination, source):
            raise StorageError(f"{self.destination}: is in the source, {source}")


def conversion(
    asked: Asked,
    *,
    to: str,
    family: AskedFamily,
    variant: Mapping[str, Any] | None,
    config: Any,
    dtype: Any,
    mesh: AskedMesh,
    spec: Mapping[str, Spec] | None,
    like: Any,
    step: int,
    compression: bool,
) -> Work:
    """What `convert` does; its source is to be closed. Arguments and errors are those of `convert`."""
    asked.check()
    if to == "orbax":
        _not_for("to='orbax'", config=config)
        sharding = partition(mesh, spec, like)
        return _safetensors_to_orbax(asked, family, variant, Casts(dtype), sharding, step, compression)
    if to == "safetensors":
        _not_for("to='safetensors'", mesh=mesh, spec=spec, like=like, step=step, compression=not compression)
        return _orbax_to_safetensors(asked, family, variant, config, Casts(dtype))
    raise SafetensorsError(f"to is {to!r}, must be 'orbax' or 'safetensors'")


def resharding(
    asked: Asked,
    *,
    mesh: AskedMesh,
    spec: Mapping[str, Spec] | None,
    like: Any,
    max_file_bytes: int,
    compression: bool,
) -> Work:
    """What `reshard` does; its source is to be closed. Arguments and errors are those of `reshard`."""
    asked.check()
    sharding = None if mesh is None and not spec and like is None else partition(mesh, spec, like)
    if is_orbax(asked.source):
        _not_for("checkpoints of Orbax", max_file_bytes=max_file_bytes != MAX_FILE_BYTES)
        return _reshard_orbax(asked, sharding, compression)
    _not_for("safetensors", compression=not compression)
    meshed = mesh or like is not None
    _not_for("a mesh, whose devices have a file each", max_file_bytes=meshed and max_file_bytes != MAX_FILE_BYTES)
    return _reshard_safetensors(asked, sharding, max_file_bytes)


def _not_for(what: str, **given: Any) -> None:
    for argument, value in given.items():
        if value:
            raise SafetensorsError(f"{argument} is not for {what}")


def _safetensors_to_orbax(
    asked: Asked,
    family: AskedFamily,
    variant: Mapping[str, Any] | None,
    casts: Casts,
    sharding: Partition,
    step: int,
    compression: bool,
) -> Work:
    path = asked.source
    if type(step) is not int or step < 0:
        raise SafetensorsError(f"step is {step!r}, must be an integer of at least 0")
    if is_orbax(path):
        raise SafetensorsError(f"{path}: has no {SUFFIX} files; reshard makes another checkpoint of one of Orbax")
    checkpoint = mapped(read_checkpoint(path), family, variant, complete=True, dequantize=True)
    found = registry.find(family, read_config(checkpoint))
    dtypes = casts.of({name: view.dtype for name, view in checkpoint.leaves.items()})
    sharding.check((name, view.shape) for name, view in checkpoint.leaves.items())
    around = envelope(found, variant)
    above = around.above
    views = {f"{above}{name}": view for name, view in checkpoint.leaves.items()}
    casted = {f"{above}{name}": dtype for name, dtype in dtypes.items()}
    source = SafetensorsSource(checkpoint, views, casted, asked.memory_bytes)

    def leaf(name: str, view: View) -> OrbaxLeaf:
        return _leaf(sharding, name, view.shape, dtypes[name])

    tree: Any = checkpoint.tree(leaf)
    target = OrbaxTarget(
        path=asked.of_step(str(step)),
        items={"items": OrbaxItem(around.around(tree))},
        names={f"{above}{name}": ("items", name) for name in checkpoint.leaves},
        metadata={"custom_metadata": around.custom_metadata},
        others={},
        compression=compression,
        chunk_bytes=_chunk_bytes(sharding, asked.memory_bytes),
    )
    return ToOrbax(source, target, interleaved(views), asked.memory_bytes)


def _reshard_orbax(asked: Asked, sharding: Partition | None, compression: bool) -> Work:
    path = asked.source
    step = open_step(path, memory_bytes=batch_bytes(asked.memory_bytes))
    asked.check_outside(step.whole)
    items = {name: item for name, item in step.items.items() if item.leaves}
    if not items:
        raise SafetensorsError(f"{path}: has no leaf")
    names = {
        array_name(items, name, own): (name, own)
        for name, item in items.items()
        for own, leaf in item.leaves.items()
        if leaf.kind in ARRAYS
    }
    stored = {array: (items[name], own) for array, (name, own) in names.items()}
    source = OrbaxSource(step, stored, asked.memory_bytes)
    cut = sharding or partition(None, None)
    cut.check((own, item.leaves[own].shape) for item, own in stored.values())

    def anew(item: OrbaxCheckpoint, name: str, facts: OrbaxLeaf) -> Any:
        if facts.kind not in ARRAYS:
            return item.value(name)
        leaf = _leaf(cut, name, facts.shape, facts.dtype)
        record = leaf.sharding if sharding else facts.sharding
        return replace(leaf, kind=facts.kind, random_key=facts.random_key, sharding=record)

    target = OrbaxTarget(
        path=asked.destination if step.step is None else asked.of_step(step.step),
        items={
            name: OrbaxItem(item.tree(partial(anew, item)), item.tree_custom_metadata, item.ocdbt, item.zarr3)
            for name, item in items.items()
        },
        names=names,
        metadata=step.metadata,
        others={**step.others, **{name: item.path for name, item in step.items.items() if name not in items}},
        compression=compression,
        chunk_bytes=_chunk_bytes(cut, asked.memory_bytes),
    )
    alone = [(name,) for name in source.leaves]
    return ToOrbax(source, target, alone, asked.memory_bytes)


def _orbax_to_safetensors(
    asked: Asked,
    family: AskedFamily,
    variant: Mapping[str, Any] | None,
    config: Any,
    casts: Casts,
) -> Work:
    path = asked.source
    if not is_orbax(path):
        read_checkpoint(path)  # which says what is wrong where it is neither
        raise SafetensorsError(f"{path}: is no checkpoint of Orbax; reshard lays out safetensors files anew")
    checkpoint = open_orbax(path, memory_bytes=batch_bytes(asked.memory_bytes))
    asked.check_outside(checkpoint.whole)
    around = beside(config)
    if isinstance(family, str) and around.config is None:
        raise MappingError(f"{path}: a family needs the config of the model: pass config")
    found = registry.find(family, around.config or {})
    variant = dict(variant or {})
    if is_maxtext(found) and "scan_layers" in checkpoint.custom_metadata:
        variant.setdefault("scan_layers", checkpoint.custom_metadata["scan_layers"])
    stored = _arrays(checkpoint, maxtext=is_maxtext(found))
    source = OrbaxSource(checkpoint, {name: (checkpoint, own) for name, own in stored.items()}, asked.memory_bytes)
    # Arrays without memory, which say shape and dtype.
    given = [
        Source(name, np.broadcast_to(np.zeros((), fact.dtype), fact.shape), fact.dtype, View.tensor(name, *fact))
        for name, fact in source.leaves.items()
    ]
    viewed, tensors = taken_apart(given, family, variant, around.config or {})
    max_file_bytes = MAX_FILE_BYTES
    if store_of(asked.destination, None)[0].whole:
        # There a file waits in memory until it is whole, as its tensors come in another order.
        max_file_bytes = min(max_file_bytes, bundle_bytes(asked.memory_bytes))
        # A chunk is read for every file that it has a part in, so that a file has what is stored together.
        tensors = {name: tensors[name] for one in viewed for name in one.view.tensors} | tensors
    dtypes = casts.of({name: dtype for name, (dtype, _) in tensors.items()})
    layout = lay_out(
        [(name, _stored(path, name, dtypes[name]), shape) for name, (_, shape) in tensors.items()],
        _METADATA,
        max_file_bytes=max_file_bytes,
        alignment=_ALIGNMENT,
    )
    if casts.everywhere is not None:
        around = around.stored_as(casts.everywhere)
    files = file_layout.whole(layout, {one.name: one.view for one in viewed})
    joined = interleaved(files.views)
    for names in joined:
        for name in names:
            check_fits(name, len(names) * checkpoint.leaves[stored[name]].chunk_nbytes, asked.memory_bytes)
    return _to_files(source, asked, files, around, joined)


def _reshard_safetensors(asked: Asked, sharding: Partition | None, max_file_bytes: int) -> Work:
    path = asked.source
    checkpoint = read_checkpoint(path)
    source = SafetensorsSource(checkpoint, checkpoint.leaves, {}, asked.memory_bytes)
    stored = {name: (tensor.stored_dtype, tensor.stored_shape) for name, tensor in checkpoint.tensors.items()}
    metadata = _METADATA | without_sharding_info(checkpoint.metadata)
    if sharding is None:
        if type(max_file_bytes) is not int or max_file_bytes < 1:
            raise SafetensorsError(f"max_file_bytes is {max_file_bytes!r}, must be an integer of at least 1")
        layout = lay_out(
            [(name, *facts) for name, facts in stored.items()],
            metadata,
            max_file_bytes=max_file_bytes,
            alignment=_ALIGNMENT,
        )
        files = file_layout.whole(layout, {name: View.tensor(name, *source.leaves[name]) for name in source.leaves})
    else:
        sharding.check((name, shape) for name, (_, shape) in stored.items())
        boxes = {name: sharding.boxes(name, shape) for name, (_, shape) in stored.items()}
        for name, (dtype, shape) in stored.items():
            if dtype.bits < 8 and sharding.shard(name, shape) != shape:
                raise TensorMismatchError(f"{name!r}: elements of {dtype.name} share bytes, so it cannot be sharded")
        files = file_layout.in_pieces(stored, boxes, metadata, _ALIGNMENT)
    of_one_file = checkpoint.files[0].path == checkpoint.path
    around = Beside() if of_one_file else Beside(copies=copied(path))
    alone = [(name,) for name in source.leaves]
    return _to_files(source, asked, files, around, alone)


def _to_files(
    source: TileSource, asked: Asked, files: file_layout.Files, around: Beside, groups: Sequence[tuple[str, ...]]
) -> Work:
    """Safetensors files; `groups` are leaves that interleave in them."""
    store, destination = store_of(asked.destination, None)
    if store.whole:
        return ToObjects(source, store, destination, files, around, asked.memory_bytes)
    return ToSafetensors(source, destination, files, around, groups, asked.memory_bytes)


def _stored(path: str, name: str, dtype: np.dtype) -> DType:
    try:
        return from_numpy(dtype)
    except TensorMismatchError as error:
        raise TensorMismatchError(f"{path}: {name!r}: {error}") from None


def _leaf(sharding: Partition, name: str, shape: tuple[int, ...], dtype: np.dtype) -> OrbaxLeaf:
    """An array whose chunks are its shards."""
    record = named_sharding(sharding.mesh, sharding.spec(name, shape))
    return OrbaxLeaf(shape, dtype, sharding.shard(name, shape), sharding=record)


def _chunk_bytes(sharding: Partition, memory_bytes: int) -> int:
    """The most that a chunk has where nobody says how arrays will be sharded; else it is what a device will have."""
    return memory_bytes if sharding.patterns or sharding.names else _CHUNK_BYTES


def _arrays(checkpoint: OrbaxCheckpoint, *, maxtext: bool) -> dict[str, str]:
    """The leaves to store as tensors, and the names of their arrays.

    Of MaxText, parameters only, which families have below `params`. Its training states have them below
    `params.params`, those of NNX below `params`, and the state of an NNX model by themselves.
    """
    names = [name for name, leaf in checkpoint.leaves.items() if leaf.kind != STRING]
    if not maxtext:
        for what, lost in (
            ("strings are left out", [name for name in checkpoint.leaves if name not in names]),
            ("random keys become their data", [name for name in names if checkpoint.leaves[name].random_key]),
        ):
            if lost:
                logger.warning("%s: safetensors files hold arrays only, so %s: %s", checkpoint.path, what, lost)
        return {name: name for name in names}
    for above in ("params.params.", "params.", ""):
        if parameters := [name for name in names if name.startswith(above)]:
            break
    return {f"params.{name.removeprefix(above)}": name for name in parameters}
