"""Steps of several items: two trees, and two items that are none."""

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_safetensors.orbax_store.discovery import step_number
from tests.support.files import random_bits

F4 = np.dtype(np.float32)
PARAMS = {"layers": {"w": random_bits(np.random.default_rng(0), (16, 512), F4)}, "b": np.arange(8, dtype=np.int32)}
# With names that the other item has as well.
OPT = {"layers": {"w": random_bits(np.random.default_rng(1), (16, 512), F4)}, "count": 3, "name": "adam", "empty": {}}
SMALL = 40_000  # bytes of memory with which all takes many tiles


def step_of(checkpoint):
    """The number of the step that a checkpoint of Orbax is; None without one."""
    return step_number(epath.Path(checkpoint.whole).name)


def arrays(tree):
    """With matrices sharded over all devices, so that they are stored in chunks."""
    rows = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("rows",)), P("rows"))

    def array(leaf):
        return jax.device_put(leaf, rows if leaf.ndim == 2 else None) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(array, tree)


def save(directory, step=7, options=None):
    """A step of two trees and two other items."""
    options = ocp.CheckpointManagerOptions(**(options or {}), best_fn=lambda metrics: metrics["loss"])
    handlers = {
        "params": ocp.StandardCheckpointHandler(),
        "opt": ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False),
        "metadata": ocp.JsonCheckpointHandler(),
    }
    with ocp.CheckpointManager(directory, options=options, item_handlers=handlers) as manager:
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(arrays(PARAMS)),
            opt=ocp.args.PyTreeSave(arrays(OPT)),
            metadata=ocp.args.JsonSave({"tokens": 10}),
        )
        manager.save(step, args=args, metrics={"loss": 0.5}, custom_metadata={"scan_layers": True})


def same(found, expected):
    jax.tree.map(lambda own, other: np.testing.assert_array_equal(np.asarray(own), np.asarray(other)), found, expected)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(other, np.ndarray):
            assert own.dtype == other.dtype
            assert np.asarray(own).tobytes() == other.tobytes()


def files(directory):
    """All files below a directory, by their path in it."""
    out = {}
    for path in directory.iterdir():
        if path.is_dir():
            out |= {f"{path.name}/{name}": content for name, content in files(path).items()}
        else:
            out[path.name] = path.read_bytes()
    return out


def is_whole(directory, step=7, **options):
    """A manager that was told nothing restores all items, each as it was saved."""
    options = ocp.CheckpointManagerOptions(**options, best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(directory, options=options) as manager:
        assert manager.latest_step() == step
        assert manager.best_step() == step
        found = manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays(PARAMS))),
                opt=ocp.args.PyTreeRestore(),
                metadata=ocp.args.JsonRestore(),
            ),
        )
        same(found["params"], PARAMS)
        same(found["opt"], OPT)
        assert found["metadata"] == {"tokens": 10}
        assert manager.metrics(step) == {"loss": 0.5}
        assert manager.metadata(step).custom_metadata == {"scan_layers": True}


W, B = PARAMS["layers"]["w"], PARAMS["b"]
