"""A checkpoint in Orbax's own format with a leaf of every kind, and how to write it and check what is read."""

import json
import re

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from orbax_safetensors.errors import StorageError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store import (
    OrbaxLeaf,
    named_sharding,
    open_orbax,
)
from orbax_safetensors.streaming.tiles import Tile
from tests.support.sinks import missing, step_sink

SAMPLES = {
    "deepseek3_scanned": ("deepseek3/mt_scanned.npz", {"scan_layers": True}),
    "qwen3_unscanned": ("qwen3/mt_unscanned.npz", {"scan_layers": False}),
}
BF16 = np.dtype(ml_dtypes.bfloat16)
# Whole leaves by name: dtype, shape, and spec over the mesh `x` 2, `y` 4.
LEAVES = {
    "params.kernel": (BF16, (8, 12), PartitionSpec("x", "y")),
    "params.cube": (np.dtype(np.float32), (4, 6, 8), PartitionSpec(None, None, ("x", "y"))),
    "params.table": (np.dtype(ml_dtypes.float8_e4m3fn), (16, 4), PartitionSpec("y")),
    "params.levels": (np.dtype(np.int8), (8, 8), PartitionSpec("x")),
    "params.mask": (np.dtype(np.bool_), (8,), PartitionSpec()),
    "params.scale": (np.dtype(np.float32), (), PartitionSpec()),
    "layers.0.bias": (np.dtype(np.uint32), (4,), PartitionSpec("y")),
    "layers.1.bias": (np.dtype(np.float16), (4,), PartitionSpec("y")),
}
MESH = {"x": 2, "y": 4}
FORMATS = [(ocdbt, zarr3) for ocdbt in (True, False) for zarr3 in (True, False)]
NAMES = ["ocdbt zarr3", "ocdbt zarr2", "files zarr3", "files zarr2"]
all_formats = pytest.mark.parametrize(("ocdbt", "zarr3"), FORMATS, ids=NAMES)


def random(dtype, shape, seed=0):
    """Any bits, so that NaN payloads, -0.0 and subnormals are among them."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def values():
    return {name: random(dtype, shape, seed) for seed, (name, (dtype, shape, _)) in enumerate(LEAVES.items())}


def tree_of(leaf):
    """The tree that `LEAVES` are of, in which there are scalars and empty nodes too."""
    return {
        "step": 7,
        "params": {name.split(".")[1]: leaf(name) for name in LEAVES if name.startswith("params.")},
        "layers": [{"bias": leaf("layers.0.bias")}, {"bias": leaf("layers.1.bias")}],
        "opt_state": {},
        "nothing": None,
        "rate": 0.5,
    }


def sharded(mesh):
    arrays = values()
    return tree_of(lambda name: jax.device_put(arrays[name], NamedSharding(mesh, LEAVES[name][2])))


def leaf_of(name):
    dtype, shape, spec = LEAVES[name]
    parts = [1 if part is None else np.prod([MESH[axis] for axis in np.atleast_1d(part)]) for part in spec]
    parts += [1] * (len(shape) - len(parts))
    chunks = tuple(size // int(part) for size, part in zip(shape, parts, strict=True))
    return OrbaxLeaf(shape, dtype, chunks, sharding=named_sharding(tuple(MESH.items()), spec))


def index(box):
    return (*box.slices, ...)  # an array, also where there is no dimension


def fill(sink, arrays, names=None):
    """Writes all chunks of all arrays, the last first."""
    for name in names or sink.leaves:
        left = [Tile(name, box) for box in reversed(missing(sink, name))]
        sink.write(left, [arrays[name][index(tile.box)] for tile in left])


def write(destination, **options):
    arrays = values()
    with step_sink(destination, tree_of(leaf_of), **options) as sink:
        fill(sink, arrays)
        sink.commit()
    return destination / "0" / "items"


def same_bits(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def is_values(tree):
    arrays = values()
    jax.tree.map(lambda leaf, name: same_bits(np.asarray(leaf), arrays[name]), arrays_of(tree), arrays_of(tree_of(str)))
    assert tree["step"] == 7
    assert tree["rate"] == 0.5
    assert tree["opt_state"] == {}
    assert tree["nothing"] is None


def arrays_of(tree):
    return {"params": tree["params"], "layers": tree["layers"]}


@st.composite
def boxes(draw, shape):
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box((start, stop) for start, stop in ends)


def file_names(root):
    """Names of files, except those that OCDBT chooses at random, of which there may be any number."""
    names = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    if ocp.__version__.startswith("0.11."):  # writes it on Google Cloud Storage only
        names = {name for name in names if not name.endswith("commit_success.txt")}
    return {re.sub(r"(^|/)d/[0-9a-f]{32}$", r"\1d/*", name) for name in names}


def json_files(root, item="0/items"):
    """What Orbax writes besides arrays, byte for byte, and the step's metadata without its times."""
    step = json.loads((root / item / ".." / "_CHECKPOINT_METADATA").read_text())
    assert step.pop("init_timestamp_nsecs") < step.pop("commit_timestamp_nsecs")
    names = ["_METADATA", "_sharding", "array_metadatas/process_0"]
    texts = {name: (root / item / name).read_bytes() for name in names}
    texts["_sharding"] = sorted(json.loads(texts["_sharding"]).items())  # in the order of a hash
    return texts, json.dumps(step)


def restore_args(sharding):
    """All leaves over `sharding` but those that it would cut unevenly."""
    parts = sharding.shard_shape((8,))[0]
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    tree = tree_of(
        lambda name: ocp.ArrayRestoreArgs(
            sharding=sharding if LEAVES[name][1] and LEAVES[name][1][0] % (8 // parts) == 0 else replicated
        )
    )
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, ocp.RestoreArgs) else ocp.RestoreArgs(), tree)


def is_not_there(root):
    with pytest.raises(StorageError):
        open_orbax(root)
    for path in root.rglob("*tmp*"):
        with pytest.raises(StorageError, match="was never finished"):
            open_orbax(path)
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.latest_step() is None


def plain_registry():
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=False,
        array_metadata_store=ocp.type_handlers.get_type_handler(jax.Array)._array_metadata_store,
    )
    scalars = ocp.type_handlers.ScalarHandler()
    return ocp.type_handlers.create_type_handler_registry((int, scalars), (float, scalars), (jax.Array, arrays))
