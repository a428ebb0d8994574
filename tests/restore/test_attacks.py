"""Files that another process changes while a restore has them mapped: the old bits or an error, and no `SIGBUS`."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.support import attacked
from tests.support.files import write_indexed
from tests.support.roots import ROOT

pytestmark = pytest.mark.process

# A program that waits for its file to be free would otherwise wait for the system to break the lease, 45 seconds.
BRIEFLY = 20


def truncate(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


def overwrite(path, rng):
    with open(path, "r+b") as file:
        file.seek(rng.randrange(path.stat().st_size))
        file.write(rng.randbytes(5000))


def grow(path, rng):
    with open(path, "ab") as file:
        file.write(rng.randbytes(5000))


def replace(path, rng):
    path.with_suffix(".new").write_bytes(rng.randbytes(5000))
    os.replace(path.with_suffix(".new"), path)


def delete(path, rng):
    path.unlink()


ATTACKS = (truncate, overwrite, grow, replace, delete)


class Restores:
    """The child process, the files that it restores, and a clean copy of each."""

    def __init__(self, directory, with_leases="yes"):
        write_indexed(directory, attacked.tensors())
        self.files = {path: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}
        self._child = subprocess.Popen(
            [sys.executable, attacked.__file__, directory, with_leases],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._child.stdin.close()
        self._child.stdout.close()
        self._child.wait()

    def attacked(self, attack, path, rng, arrival, pause):
        """What came of a restore, or the signal that has ended it; and how long the attack took."""
        self._say(f"{arrival} {rng.randrange(2**16)} {pause}")
        assert self._hear() == "now"
        began = time.monotonic()
        attack(path, rng)
        seconds = time.monotonic() - began
        self._say("")
        outcome = self._hear() or f"signal {-self._child.wait()}"
        path.with_suffix(".new").write_bytes(self.files[path])
        os.replace(path.with_suffix(".new"), path)
        return outcome, seconds

    def _say(self, line):
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def _hear(self):
        return self._child.stdout.readline().rstrip("\n")


@pytest.mark.parametrize("arrival", ["late", "random"])
def test_files_that_another_process_changes(tmp_path, arrival):
    rng = random.Random(1)
    with Restores(tmp_path) as restores:
        for attack in ATTACKS * 2:
            path = rng.choice(list(restores.files))
            pause = rng.randint(1, attacked.LEAVES)
            outcome, seconds = restores.attacked(attack, path, rng, arrival, pause)
            case = f"{attack.__name__} {path.name} before leaf {pause}"
            assert outcome == "the old bits" or outcome.startswith(f"StorageError: {path}: "), case
            assert seconds < BRIEFLY, case


def test_without_leases_the_same_ends_the_process(tmp_path):
    """So that the test above can fail."""
    rng = random.Random(1)
    with Restores(tmp_path, with_leases="no") as restores:
        path = min(restores.files)
        outcome, _ = restores.attacked(lambda path, rng: os.truncate(path, 4096), path, rng, "late", 2)
    assert outcome == f"signal {signal.SIGBUS}"
