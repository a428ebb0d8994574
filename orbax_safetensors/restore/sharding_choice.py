"""Shard every array of a checkpoint over a mesh, each in the dimension of which shards read least."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import prod

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.devices.sharding import device_boxes
from orbax_safetensors.geometry.view import View
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore.advice import pieces
from orbax_safetensors.restore.request import ShardingOf
from orbax_safetensors.transfer.plan import Block


def choose_shardings(checkpoint: Checkpoint, mesh: Mesh | AbstractMesh, options: SafetensorsOptions) -> ShardingOf:
    """Return a function from the names of leaves to shardings over `mesh`.

    All axes of the mesh shard one dimension, in the order of the mesh. If they do not divide it, as many are left out
    as must be. Of the dimensions that are cut into most shards, it is the one of which shards read fewest bytes; if
    several read as few, the longest. An array of which no dimension can be cut is replicated.
    """
    limits = checkpoint.request_limits(options)
    known: dict[object, NamedSharding] = {}

    def read_bytes(view: View, sharding: NamedSharding) -> int:
        boxes = device_boxes(sharding, view.shape)  # those between the first and the last read as much
        blocks = [Block(view, box, box.shape, view.dtype, lossless=True) for box in (boxes[0], boxes[-1])]
        return sum(checkpoint.transfer([block], limits).moved_bytes for block in blocks)

    def sharding_of(name: str, shape: tuple[int, ...]) -> NamedSharding:
        view = checkpoint.leaves[name]
        form = (shape, *pieces(view, checkpoint.location))
        if form not in known:
            cuts = sorted(_cuts(mesh, shape), key=lambda cut: -cut[0])
            most = [(dimension, NamedSharding(mesh, spec)) for count, dimension, spec in cuts if count == cuts[0][0]]
            if len(most) > 1:
                most.sort(key=lambda cut: (read_bytes(view, cut[1]), -shape[cut[0]]))
            known[form] = most[0][1] if most else NamedSharding(mesh, PartitionSpec())
        return known[form]

    return sharding_of


def _cuts(mesh: Mesh | AbstractMesh, shape: tuple[int, ...]) -> Iterator[tuple[int, int, PartitionSpec]]:
    """Yield how often each dimension can be cut, the dimension, and the partition that does so."""
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    choices = [axes for count in range(len(sizes), 0, -1) for axes in combinations(sizes, count)]
    for dimension, length in enumerate(shape):
        counts = {axes: prod(sizes[axis] for axis in axes) for axes in choices}
        dividing = {axes: count for axes, count in counts.items() if length and length % count == 0}
        if dividing:
            axes = max(dividing, key=lambda axes: dividing[axes])
            yield dividing[axes], dimension, PartitionSpec(*[None] * dimension, axes if len(axes) > 1 else axes[0])
