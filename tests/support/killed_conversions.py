"""Conversions that are killed or stopped in a process of their own: what they read, and what they have made."""

import contextlib
import json
import os
import select
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


class Conversion:
    """One in a process of its own that has got a signal somewhere, with its number, status and file of errors."""

    def __init__(self, forks, number, status, errors):
        self._forks, self.number, self.status, self._errors = forks, number, status, errors

    def go_on(self):
        """To its end; returns its exit code and what it says."""
        return self._end(signal.SIGCONT)

    def kill(self):
        """Whether it has ended or not."""
        if os.WIFSTOPPED(self.status):
            self._end(signal.SIGKILL)

    def _end(self, number):
        os.kill(self.number, number)
        _, self.status = self._forks.ask(self.number)
        return os.waitstatus_to_exitcode(self.status), self._errors.read_text()


class Forks:
    """A process that forks conversions: it has imported what takes longer than they do."""

    def __init__(self, directory):
        self._directory, self._count = directory, 0
        self._process = subprocess.Popen(
            [sys.executable, interrupted.__file__],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what):
        print(json.dumps(what), file=self._process.stdin, flush=True)
        answers, _, _ = select.select([self._process.stdout], [], [], 120)
        assert answers, "the conversion neither stops nor ends"
        return json.loads(self._process.stdout.readline())

    def start(self, kind, source, destination, where, name, locks="locks"):
        """A conversion that gets the signal `name` at some point."""
        self._count += 1
        errors = self._directory / str(self._count)
        return Conversion(self, *self.ask([*map(str, (errors, kind, source, destination, where)), name, locks]), errors)

    def killed(self, kind, source, destination, where):
        assert os.WTERMSIG(self.start(kind, source, destination, where, "SIGKILL").status) == signal.SIGKILL

    @contextlib.contextmanager
    def stopped(self, kind, source, destination, where, locks="locks"):
        """A conversion that has stopped somewhere, and is there until the end of the block."""
        conversion = self.start(kind, source, destination, where, "SIGSTOP", locks)
        try:
            assert os.WIFSTOPPED(conversion.status)
            yield conversion
        finally:
            conversion.kill()

    def close(self):
        self._process.communicate()
