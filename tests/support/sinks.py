"""Sinks of the layout that `CheckpointManager` and MaxText have: one step with one item."""

import os
from itertools import product

from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store import OrbaxItem, UnfinishedCheckpoint
from orbax_safetensors.orbax_store.leaf import box_of, chunks_of
from orbax_safetensors.orbax_store.operations import Budget
from orbax_safetensors.streaming.orbax_sink import OrbaxSink
from orbax_safetensors.streaming.tiles import Tile


class AnySink(OrbaxSink):
    """Takes any boxes of whole chunks rather than the tiles of a source."""

    def __init__(self, checkpoint, memory_bytes=256 << 20):
        super().__init__(checkpoint, units=(), batch_bytes=1)
        self.leaves = checkpoint.leaves
        self._budget = Budget(memory_bytes)

    def write(self, tiles, arrays):
        super().write(tiles, arrays)
        for name, box in tiles:
            self._present[name][chunks_of(box, self.leaves[name]).slices] = True

    def write_box(self, name, box, array):
        self.write([Tile(name, box)], [array])

    def written(self, name, box):
        return bool(self._present[name][chunks_of(box, self.leaves[name]).slices].all())


def step_sink(
    destination,
    tree,
    *,
    step=0,
    item="items",
    custom_metadata=None,
    tree_custom_metadata=None,
    ocdbt=True,
    zarr3=True,
    others=None,
    compression=True,
    source="",
    resume=False,
    **options,
):
    """Writes `<destination>/<step>/<item>`."""
    items = {item: OrbaxItem(tree, tree_custom_metadata, ocdbt, zarr3)}
    path = os.path.join(os.fspath(destination), str(step))
    checkpoint = UnfinishedCheckpoint(
        path,
        items,
        metadata={"custom_metadata": custom_metadata},
        others=others,
        compression=compression,
        source=source,
    )
    return AnySink(checkpoint, **options).begin(resume=resume)


def missing(sink, name):
    """The boxes of the chunks of an array that are not written, in row-major order."""
    leaf = sink.leaves[name]
    chunks = (Box((at, at + 1) for at in index) for index in product(*map(range, leaf.grid)))
    return [box for box in (box_of(chunk, leaf) for chunk in chunks) if not sink.written(name, box)]
