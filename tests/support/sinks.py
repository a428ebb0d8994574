"""A sink of the layout that `CheckpointManager` and MaxText have: one step with one item."""

import os

from orbax_safetensors.orbax_store import OrbaxItem, OrbaxSink


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
    **options,
):
    """Writes `<destination>/<step>/<item>`."""
    items = {item: OrbaxItem(tree, tree_custom_metadata, ocdbt, zarr3)}
    path = os.path.join(os.fspath(destination), str(step))
    return OrbaxSink(path, items, metadata={"custom_metadata": custom_metadata}, **options)
