"""What stock Orbax and TensorStore make of linked directories, in a process that never imports this package.

    python stock.py JOBS FOUND

`JOBS` is a JSON file: for each link its path, the `.npz` file of what it has to hold, the path in the tree at which
that is, and the ways to read it. `FOUND` is written: for each link and way what was wrong, or a traceback.
"""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def expected(job):
    """The tree that a link has to hold, of NumPy arrays."""
    with np.load(job["npz"]) as arrays:
        tree = dict(job["around"])
        for name in arrays:
            *above, last = [*job["above"], *name.split("-")]
            at = tree
            for part in above:
                at = at.setdefault(part, {})
            at[last] = arrays[name]
    return tree


def different(found, tree):
    """The names of leaves that differ, or in which way the trees do."""
    if jax.tree.structure(found) != jax.tree.structure(tree):
        return [f"{jax.tree.structure(found)} is not {jax.tree.structure(tree)}"]
    wrong = []
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(tree), strict=True):
        other = np.asarray(other)
        shards = [(shard.data, shard.index) for shard in getattr(leaf, "addressable_shards", [])] or [(leaf, ...)]
        if any(np.asarray(part).tobytes() != other[index].tobytes() for part, index in shards) or (
            hasattr(leaf, "dtype") and (leaf.dtype, leaf.shape) != (other.dtype, other.shape)
        ):
            wrong.append(jax.tree_util.keystr(path))
    return wrong


def eight_ways(tree):
    """A target: each array is sharded over a dimension that divides by eight, the first or the last by turns."""
    mesh = Mesh(np.array(jax.devices()), ("d",))

    def leaf(array):
        if not isinstance(array, np.ndarray):
            return array
        dimensions = [axis for axis, size in enumerate(array.shape) if size % 8 == 0]
        spec = [None] * array.ndim
        if dimensions:
            spec[dimensions[-(sum(array.shape) // 8 % 2)]] = "d"
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(leaf, tree)


def whole(path, tree):
    return different(ocp.PyTreeCheckpointer().restore(path), tree)


def sharded(path, tree):
    target = eight_ways(tree)
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(target, restore_args=restore_args)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(path, args=args)
    for leaf, asked in zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True):
        if isinstance(asked, jax.ShapeDtypeStruct):
            assert leaf.sharding == asked.sharding
    return different(found, tree)


def standard(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        return different(checkpointer.restore(path), tree)


def standard_with_a_target(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        return different(checkpointer.restore(path, eight_ways(tree)), tree)


def metadata(path, tree):
    """Of all arrays, from the item, and what is recorded of the step."""
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.metadata(path)
    shapes = jax.tree.map(lambda leaf: getattr(leaf, "shape", ()), found.item_metadata.tree)
    arrays = jax.tree.map(lambda leaf: np.empty(leaf, np.uint8), shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    same = jax.tree.map(np.shape, arrays) == jax.tree.map(np.shape, tree)
    return [] if same and found.commit_timestamp_nsecs else [repr(found)]


def manager(path, tree):
    """The link is an item of a step."""
    root, step, item = Path(path).parents[1], int(Path(path).parent.name), Path(path).name
    wrong = []
    for restores in (
        (ocp.args.PyTreeRestore(),),
        (ocp.args.StandardRestore(), ocp.args.StandardRestore(eight_ways(tree))),
    ):
        with ocp.CheckpointManager(root, item_names=(item,)) as steps:
            assert steps.latest_step() == step
            for args in restores:
                wrong += different(steps.restore(step, args=ocp.args.Composite(**{item: args}))[item], tree)
    return wrong


def v1(path, tree):
    from orbax.checkpoint import v1

    if Path(path).parent.name.isdecimal():  # v1 opens steps, not their items
        path = Path(path).parent
    wrong = different(v1.load_pytree(path), tree)
    wrong += different(v1.load_pytree(path, eight_ways(tree)), tree)
    found = v1.pytree_metadata(path).metadata
    return wrong if jax.tree.structure(found) == jax.tree.structure(tree) else [*wrong, repr(found)]


def zarr3(path, tree):
    """TensorStore alone, without the files of Orbax."""
    wrong, context = [], ts.Context()
    for at, array in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(at, simple=True, separator=".")
        kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}, "path": f"{name}/"}
        store = ts.open({"driver": "zarr3", "kvstore": kvstore}, context=context, open=True).result()
        if store.read().result().tobytes() != np.asarray(array).tobytes():
            wrong.append(name)
    return wrong


def sharded_over_all(jobs):
    """In every process of a program: what is wrong with its shards of each link."""
    found = [sharded(job["path"], expected(job)) for job in json.loads(jobs)]
    assert "orbax_safetensors" not in sys.modules
    return found


WAYS = {way.__name__: way for way in (whole, sharded, standard, standard_with_a_target, metadata, manager, v1, zarr3)}


def main(jobs, found):
    results = {}
    for name, job in json.loads(Path(jobs).read_text()).items():
        tree = expected(job)
        for way in job["ways"]:
            try:
                result = WAYS[way](job["path"], tree)
            except Exception:
                result = traceback.format_exc()
            results.setdefault(name, {})[way] = result
    assert "orbax_safetensors" not in sys.modules
    Path(found).write_text(json.dumps(results))


if __name__ == "__main__":
    # Of shardings that are taken from a file, and of names in v1 that are to go.
    for message in ("Sharding info not provided", "Use `"):
        warnings.filterwarnings("ignore", message)
    main(*sys.argv[1:])
