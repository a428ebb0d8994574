"""Decides, from headers alone, which leaves of a checkpoint become addresses, and which have to be made."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.family import mapped
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.geometry.view import View
from orbax_safetensors.link.request import LinkRequest
from orbax_safetensors.mapping import registry
from orbax_safetensors.mapping.envelope import Envelope
from orbax_safetensors.mapping.family import envelope_of
from orbax_safetensors.orbax_store import OrbaxItem, OrbaxLeaf, named_sharding
from orbax_safetensors.orbax_store.addressed_item import (
    AddressedArray,
    addressed_array,
    array_entries,
    misread,
    scalar_entries,
)
from orbax_safetensors.orbax_store.directories import is_on_gcs
from orbax_safetensors.orbax_store.leaf import SCALAR
from orbax_safetensors.orbax_store.ocdbt import Entry
from orbax_safetensors.streaming.bundles import interleaved
from orbax_safetensors.streaming.orbax_output import OrbaxContent, OrbaxOutput
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from orbax_safetensors.streaming.work import Work

# A subdirectory of a link: a separate OCDBT database of the arrays that had to be made.
MADE = "made"
# A Python integer, as Orbax stores it.
_SCALAR = OrbaxLeaf((), np.dtype(np.int64), (), SCALAR)

# The work that makes arrays, and these arrays.
Making = tuple[Work, Mapping[str, OrbaxLeaf]]


@dataclass(frozen=True)
class Decision:
    """The content of a link. Names are those of the new checkpoint.

    Attributes:
      linked: leaves that become addresses.
      reasons: leaves that have to be made, and the reason for each.
    """

    checkpoint: Checkpoint
    envelope: Envelope
    linked: Mapping[str, AddressedArray]
    reasons: Mapping[str, str]
    sharded: Mapping[str, OrbaxLeaf]  # all leaves, with their shards as chunks
    request: LinkRequest

    @cached_property
    def digest(self) -> str:
        """A digest that is equal for links of the same files into the same index."""
        stamps = [(file.path, file.stamp) for file in self.checkpoint.files]
        # The result of a family: its repr has the addresses of its functions, which differ between processes.
        mapped = None if self.checkpoint.mapped is None else sorted(self.checkpoint.mapped.items())
        what = (stamps, mapped, self.request.facts)
        return hashlib.sha256(repr(what).encode("utf-8", "backslashreplace")).hexdigest()

    def view(self, name: str) -> View:
        """Return the view that a leaf is made of."""
        return self.checkpoint.leaves[name.removeprefix(self.envelope.above)]

    def making(self, directory: str) -> Making | None:
        """Return the work that makes the leaves that are not addresses, in `directory`, and the arrays that it makes.

        The caller closes the work's source. Returns None if there are no such leaves. Raises `SafetensorsError` if
        memory does not suffice.
        """
        if not self.reasons:
            return None
        views = {name: self.view(name) for name in self.reasons}
        source = SafetensorsSource(self.checkpoint, views, {}, self.request.memory_bytes, "auto")
        content = OrbaxContent(
            path=os.path.join(directory, MADE),
            items={"": OrbaxItem({name: self.sharded[name] for name in views})},
            names={name: ("", name.removeprefix(self.envelope.above)) for name in views},
            metadata={},
            others={},
            compression=False,
            chunk_bytes=self.request.chunk_bytes,
        )
        output = OrbaxOutput(source, content, interleaved(views), self.request.memory_bytes)
        return Work(source, output), output.leaves

    def tree(self, made: Mapping[str, OrbaxLeaf]) -> Any:
        """Return the checkpoint's tree of `OrbaxLeaf`; `made` has the leaves that had to be made."""

        def leaf(name: str, _: View) -> OrbaxLeaf:
            name = self.envelope.above + name
            return self.linked[name].leaf if name in self.linked else made[name]

        rest = {key: _SCALAR if isinstance(value, int) else value for key, value in self.envelope.rest.items()}
        return replace(self.envelope, rest=rest).around(self.checkpoint.tree(leaf))

    def entries(self) -> Iterator[Entry]:
        """Yield the entries of the index, without the leaves that have to be made."""
        for name, array in self.linked.items():
            yield from array_entries(name, array, self._locate)
        for name, value in self.envelope.rest.items():
            if isinstance(value, int):
                yield from scalar_entries(name, np.asarray(value, np.int64))

    def num_chunks(self, name: str, made: OrbaxLeaf | None) -> int:
        """Return the number of stored chunks of an array, which is in `linked` or was `made`."""
        if name in self.linked:
            return self.linked[name].chunks.count
        assert made is not None
        return prod(made.grid)

    @property
    def whole(self) -> bool:
        """Whether all chunks of all arrays will be stored; chunks of padding are not."""
        return all(array.is_whole for array in self.linked.values())

    def _locate(self, tensor: str) -> tuple[str, int]:
        location = self.checkpoint.location(tensor)
        return os.path.basename(self.checkpoint.files[location.file].path), location.begin


def decide(request: LinkRequest) -> Decision:
    """Read all headers and decide on every leaf.

    Raises the errors of `convert` for a source, a family or a spec, and `StorageError` for files that are not local.
    """
    checkpoint = read_checkpoint(request.source)
    if is_on_gcs(request.source) and checkpoint.files[0].path == request.source:
        raise StorageError(f"{request.source}: is one object; on gs://, pass the directory with it")
    if not checkpoint.tensors:
        raise TensorMismatchError(f"{request.source}: holds no tensors")
    checkpoint = mapped(checkpoint, request.family, request.variant, complete=True, dequantize=True)
    envelope = envelope_of(registry.find(request.family, read_config(checkpoint)), checkpoint.use.variant)
    partition = request.partition
    partition.check((name, view.shape) for name, view in checkpoint.leaves.items())
    addressed, reasons, sharded, records = {}, {}, {}, {}  # records are long, and the same for many leaves
    for leaf, view in checkpoint.leaves.items():
        name = envelope.above + leaf
        shard = partition.shard(leaf, view.shape)
        spec = partition.spec(leaf, view.shape)
        if spec not in records:
            records[spec] = named_sharding(partition.mesh, spec)
        sharded[name] = OrbaxLeaf(view.shape, view.dtype, shard, sharding=records[spec])
        if reason := misread(name, view.shape):
            raise TensorMismatchError(f"{request.source}: {name!r:.200}: {reason}")
        quantized = checkpoint.quantized.keys() & view.tensors
        addresses = "it has to be decoded" if quantized else addressed_array(view, sharded[name], request.chunk_bytes)
        if isinstance(addresses, str):
            reasons[name] = addresses
        else:
            addressed[name] = addresses
    return Decision(checkpoint, envelope, addressed, reasons, sharded, request)


def nbytes(leaf: OrbaxLeaf) -> int:
    """Return the bytes of an array."""
    return prod(leaf.shape) * leaf.dtype.itemsize
