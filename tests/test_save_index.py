"""What a save writes for Orbax: stock Orbax restores the saved tree from the files, and so do we if nothing is asked."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests import stock_orbax
from tests.files import FOR_ORBAX, random_bits
from tests.handlers.test_type_handler import make_handler

RNG = np.random.default_rng(0)
BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


class Pair(NamedTuple):
    left: Any
    right: Any


def array(mesh, shape, dtype, *spec):
    return jax.device_put(random_bits(RNG, shape, np.dtype(dtype)), NamedSharding(mesh, P(*spec)))


def kinds(mesh):
    """Containers, empty nodes, arrays, scalars."""
    return {
        "list": [array(mesh, (4, 6), "f4", "x"), np.arange(3), 5, 2.5, True],
        "tuple": (np.float32(1.5), np.int64(7), {"in": (array(mesh, (2,), "i4"), [])}),
        "pair": Pair(array(mesh, (8,), "f4", ("x", "y")), {"z": 3}),
        "empty dict": {},
        "empty list": [],
        "empty tuple": (),
        "none": None,
        "numpy": {"bf16": random_bits(RNG, (2, 3), BF16), "point": np.array(3.0), "swapped": np.arange(4, dtype=">i4")},
        "with.a dot": np.arange(2.0),
    }


def dtypes(mesh):
    names = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", BF16, FP8, "float8_e5m2")
    return {str(np.dtype(name)): array(mesh, (4, 8), name, "y") for name in names}


def shardings(mesh):
    host = random_bits(RNG, (16, 8, 4), np.dtype("f4"))
    specs = {
        "leading": ("x",),
        "leading, both": (("x", "y"),),
        "inner": (None, None, "y"),
        "middle": (None, "y"),
        "two": ("y", "x"),
        "replicated": (),
    }
    placed = {name: NamedSharding(mesh, P(*spec)) for name, spec in specs.items()}
    placed["single"] = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    placed["host"] = NamedSharding(mesh, P("x"), memory_kind="unpinned_host")
    tree = {name: jax.device_put(host, sharding) for name, sharding in placed.items()}
    return tree | {"point": array(mesh, (), "f4"), "one": array(mesh, (1, 1), BF16)}


def train_state(mesh):
    params = {"w": array(mesh, (16, 8), "f4", "x", "y"), "b": array(mesh, (8,), BF16, "y")}
    return flax.training.train_state.TrainState.create(
        apply_fn=lambda x: x, params=params, tx=optax.chain(optax.clip(1.0), optax.adam(1e-3))
    )


TREES: dict[str, Callable[[Mesh], Any]] = {
    "kinds": kinds,
    "dtypes": dtypes,
    "shardings": shardings,
    "train state": train_state,
}


def by_checkpointer(kind=ocp.Checkpointer, **more):
    def save(path, tree):
        with kind(ost.SafetensorsHandler()) as checkpointer:
            checkpointer.save(path, args=ost.SafetensorsSave(tree, index=True, **more))
        return path

    return save


def by_manager(path, tree):
    with ocp.CheckpointManager(path, item_handlers=ost.SafetensorsHandler()) as manager:
        manager.save(3, args=ost.SafetensorsSave(tree, index=True))
    return path / "3" / "default"


def by_composite(path, tree):
    with ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(params=ost.SafetensorsHandler())) as checkpointer:
        checkpointer.save(path, args=ocp.args.Composite(params=ost.SafetensorsSave(tree, index=True)))
    return path / "params"


def by_type_handler(**more):
    def save(path, tree):
        with ocp.Checkpointer(make_handler(**more)) as checkpointer:
            checkpointer.save(path, tree)
        return path

    return save


SAVES = {
    "Checkpointer": by_checkpointer(),
    "AsyncCheckpointer": by_checkpointer(ocp.AsyncCheckpointer),
    "several files": by_checkpointer(max_file_bytes=1000),
    "CheckpointManager": by_manager,
    "CompositeCheckpointHandler": by_composite,
    "type handler": by_type_handler(),
    "type handler, zarr3": by_type_handler(use_zarr3=True),
}


def all_trees(mesh):
    with jax.enable_x64(True):
        return {name: make(mesh) for name, make in TREES.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of ours and of Orbax's by tree and save."""
    root = tmp_path_factory.mktemp("saved")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    directories = {}
    with jax.enable_x64(True):
        for name, tree in all_trees(mesh).items():
            with ocp.PyTreeCheckpointer() as checkpointer:
                checkpointer.save(root / name / "stock", tree)
            for way, save in SAVES.items():
                directories[name, way] = save(root / name / way, tree), root / name / "stock"
    return directories


@pytest.fixture(scope="module")
def by_stock_orbax(saved):
    """The differences that a process which does not import this package finds between them."""
    program = subprocess.run(
        [sys.executable, stock_orbax.__file__],
        input=json.dumps([list(map(str, pair)) for pair in saved.values()]),
        env=os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": ""},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-5000:]
    return json.loads(program.stdout.splitlines()[-1])


EACH = pytest.mark.parametrize(("tree", "way"), [(tree, way) for tree in TREES for way in SAVES])


@EACH
def test_stock_orbax_restores_what_it_would_of_its_own(saved, by_stock_orbax, tree, way):
    ours, _ = saved[tree, way]
    assert {key: lines for key, lines in by_stock_orbax.items() if key.startswith(f"{ours}: ")} == {}
