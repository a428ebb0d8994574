"""Conversions that are killed or stopped in a process of their own: what they read, and what they have made."""

import os
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

import orbax_safetensors as ost
from orbax_safetensors.orbax_store import open_orbax
from tests.support import interrupted
from tests.support.files import random_bits, write_indexed
from tests.support.roots import ROOT

F4 = np.dtype(np.float32)
SHAPES = {f"w{number}": (16, 64 + 8 * number) for number in range(12)} | {"b": (40,)}
TO_ORBAX = ("to_orbax", "reshard_orbax")
OF_SAFETENSORS = ("to_orbax", "reshard_safetensors")


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {name: random_bits(rng, shape, F4) for name, shape in SHAPES.items()}


def make_source(kind, path, seed=0):
    if kind in OF_SAFETENSORS:
        path.mkdir(exist_ok=True)
        whole = list(arrays(seed).items())
        write_indexed(path, [dict(whole[:5]), dict(whole[5:])])
    else:
        tree = {name: jax.numpy.asarray(array) for name, array in arrays(seed).items()}
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(path / "0" / "items", tree, force=True)
        path = path / "0" / "items"
    return path


def check(kind, destination, seed=0):
    if kind in TO_ORBAX:
        found = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(
            destination / "0" / "items",
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in SHAPES},
        )
    else:
        found = ost.SafetensorsHandler().restore(epath.Path(destination))
    for name, array in arrays(seed).items():
        assert found[name].tobytes() == array.tobytes(), name


def opens(kind, destination):
    try:
        if kind in TO_ORBAX:
            open_orbax(destination)
        else:
            ost.open_checkpoint(destination)
    except ost.SafetensorsError:
        return False
    return True


def start(kind, source, destination, where, name, locks="locks"):
    """A process that gets the signal `name` at some point of a conversion."""
    return subprocess.Popen(
        [sys.executable, interrupted.__file__, kind, *map(str, (source, destination, where)), name, locks],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def killed(kind, source, destination, where):
    process = start(kind, source, destination, where, "SIGKILL")
    _, told = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, told
