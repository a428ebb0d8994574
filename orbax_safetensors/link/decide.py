"""Which leaves of a checkpoint become addresses, and which have to be made: decided from headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint import Checkpoint, read_checkpoint
from orbax_safetensors.errors import StorageError
from orbax_safetensors.link.request import LinkRequest
from orbax_safetensors.mapped import mapped, read_config
from orbax_safetensors.mapping import registry
from orbax_safetensors.mapping.envelope import Envelope, envelope
from orbax_safetensors.orbax_store import OrbaxItem, OrbaxLeaf, named_sharding
from orbax_safetensors.orbax_store.leaves import SCALAR
from orbax_safetensors.orbax_store.linked_item import entries
from orbax_safetensors.orbax_store.ocdbt import Entry, Range
from orbax_safetensors.plan.addresses import Chunks, chunks_in_place
from orbax_safetensors.plan.view import View
from orbax_safetensors.streaming.cutting import interleaved
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from orbax_safetensors.streaming.to_orbax import OrbaxTarget, ToOrbax

# Of a link's directory: the arrays that had to be made, as an OCDBT database of their own.
MADE = "made"


@dataclass(frozen=True)
class Linked:
    """A leaf that needs no copy: its chunks are addresses."""

    leaf: OrbaxLeaf
    chunks: Chunks

    @property
    def num_chunks(self) -> int:
        """Entries of the index."""
        return sum(place.offsets.size for place in self.chunks.places())


@dataclass(frozen=True)
class Decision:
    """What a link will be. Names are those of the checkpoint that is made.

    Attributes:
      linked: leaves that become addresses.
      reasons: leaves that have to be made, and why each of them.
    """

    checkpoint: Checkpoint
    envelope: Envelope
    linked: Mapping[str, Linked]
    reasons: Mapping[str, str]
    sharded: Mapping[str, OrbaxLeaf]  # all leaves, with their shards as chunks
    request: LinkRequest

    def view(self, name: str) -> View:
        """What a leaf is made of."""
        return self.checkpoint.leaves[name.removeprefix(self.envelope.above)]

    def making(self, directory: str) -> ToOrbax | None:
        """The work that makes the leaves that are no addresses, in `directory`; None if there are none.

        Its source is to be closed.
        """
        if not self.reasons:
            return None
        views = {name: self.view(name) for name in self.reasons}
        source = SafetensorsSource(self.checkpoint, views, {}, self.request.memory_bytes)
        target = OrbaxTarget(
            path=os.path.join(directory, MADE),
            items={"": OrbaxItem({name: self.sharded[name] for name in views})},
            names={name: ("", name.removeprefix(self.envelope.above)) for name in views},
            metadata={},
            others={},
            compression=False,
            chunk_bytes=self.request.chunk_bytes,
        )
        return ToOrbax(source, target, interleaved(views), self.request.memory_bytes)

    def tree(self, made: Mapping[str, OrbaxLeaf]) -> Any:
        """The tree of the checkpoint, of an `OrbaxLeaf` each; `made` are those that had to be made."""

        def leaf(name: str, _: View) -> OrbaxLeaf:
            name = self.envelope.above + name
            return self.linked[name].leaf if name in self.linked else made[name]

        tree = self.envelope.around(self.checkpoint.tree(leaf))
        return {key: _scalar(value).leaf if isinstance(value, int) else value for key, value in tree.items()}

    def entries(self) -> Iterator[Entry]:
        """What the index has, without the leaves that have to be made."""
        for name, linked in self.linked.items():
            yield from entries(name, linked.leaf, linked.chunks.order, self._ranges(linked.chunks))
        for key, value in self.envelope.around({}).items():
            if isinstance(value, int):
                scalar = _scalar(value)
                yield from entries(key, scalar.leaf, (), [((), scalar.content)])

    def _ranges(self, chunks: Chunks) -> Iterator[tuple[tuple[int, ...], Range]]:
        itemsize, nbytes = chunks.view.dtype.itemsize, chunks.nbytes
        for place in chunks.places():
            location = self.checkpoint.location(place.tensor)
            file = os.path.basename(self.checkpoint.files[location.file].path)
            at = location.begin + place.offsets * itemsize
            for index, offset in zip(np.ndindex(at.shape), at.reshape(-1).tolist(), strict=True):
                yield tuple(map(int.__add__, place.first, index)), Range(file, offset, nbytes)


@dataclass(frozen=True)
class _Scalar:
    leaf: OrbaxLeaf
    content: bytes


def _scalar(value: int) -> _Scalar:
    """A scalar that is in the index itself, as Orbax stores a Python integer."""
    array = np.asarray(value, np.int64)
    return _Scalar(OrbaxLeaf((), array.dtype, (), SCALAR), array.tobytes())


def decide(request: LinkRequest) -> Decision:
    """Reads all headers and decides for every leaf.

    Raises what `convert` raises of a source, a family or a spec, and `StorageError` for files that are not local.
    """
    checkpoint = read_checkpoint(request.source)
    if not checkpoint.store.maps:
        raise StorageError(f"{request.source}: a link is of files; download them first")
    checkpoint = mapped(checkpoint, request.family, request.variant, complete=True, dequantize=True)
    around = envelope(registry.find(request.family, read_config(checkpoint)), request.variant)
    partition = request.partition
    partition.check_used(checkpoint.leaves)
    linked, reasons, sharded = {}, {}, {}
    for own, view in checkpoint.leaves.items():
        name = around.above + own
        shard = partition.shard(own, view.shape)
        record = named_sharding(partition.mesh, partition.spec(own, view.shape))
        sharded[name] = OrbaxLeaf(view.shape, view.dtype, shard, sharding=record)
        quantized = checkpoint.quantized.keys() & view.tensors
        found = (
            f"{min(quantized)!r} has to be decoded" if quantized else chunks_in_place(view, shard, request.chunk_bytes)
        )
        if isinstance(found, str):
            reasons[name] = found
        else:
            linked[name] = Linked(OrbaxLeaf(view.shape, view.dtype, found.shape, sharding=record), found)
    return Decision(checkpoint, around, linked, reasons, sharded, request)


def nbytes(leaf: OrbaxLeaf) -> int:
    """Bytes of an array."""
    return prod(leaf.shape) * leaf.dtype.itemsize
