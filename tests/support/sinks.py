"""Sinks of the layout that `CheckpointManager` and MaxText have: one step with one item."""

import os
from itertools import product

from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store import OrbaxItem, OrbaxSink, UnfinishedCheckpoint
from orbax_safetensors.orbax_store.leaf import box_of


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
    return OrbaxSink(checkpoint, **options).begin(resume=resume)


def missing(sink, name):
    """The boxes of the chunks of an array that are not written, in row-major order."""
    leaf = sink.leaves[name]
    chunks = (Box((at, at + 1) for at in index) for index in product(*map(range, leaf.grid)))
    return [box for box in (box_of(chunk, leaf) for chunk in chunks) if not sink.written(name, box)]


def wait(sink):
    """Waits until all writes so far are done; raises the error if one has failed."""
    sink._budget.drain()
    sink._check()
