"""Forced saves that end in a SIGKILL, meet a limit, or are watched: `test_forced_saves.py` runs this as a module.

Programs are forked from one interpreter, to import JAX only once, so that it must not use JAX itself.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import orbax_safetensors as ost
from orbax_safetensors.save import new_directory
from orbax_safetensors.storage import local, replace

SIZE = 50_000


def version(number: int) -> dict[str, np.ndarray]:
    """A checkpoint in several files that all say which one it is."""
    return {name: np.full(SIZE, number, np.float32) for name in "abc"}


def save(path: Path, number: int) -> None:
    """Replaces the checkpoint, by one that has two files."""
    ost.save(path, version(number), force=True, max_file_bytes=2 * 4 * SIZE + 1000)


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _amid_data() -> None:
    real, calls = os.pwritev, []

    def pwritev(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        return _die() if len(calls) == 3 else real(descriptor, buffers, offset)  # type: ignore[return-value]

    mock.patch.object(local.os, "pwritev", pwritev).start()


def _at(where: Any, name: str) -> Callable[[], None]:
    return lambda: mock.patch.object(where, name, _die).start() and None


def _after(where: Any, name: str, calls: int = 1) -> Callable[[], None]:
    def patch() -> None:
        real, done = getattr(where, name), []

        def call(*args: Any, **more: Any) -> None:
            real(*args, **more)
            done.append(args)
            if len(done) == calls:
                _die()

        mock.patch.object(where, name, call).start()

    return patch


def _without_exchange(calls: int) -> Callable[[], None]:
    def patch() -> None:
        replace._RENAMEAT2 = None
        _after(replace.os, "rename", calls)()

    return patch


# Where a save is killed: what makes it so, and whether the new checkpoint is in place by then.
STAGES: dict[str, tuple[Callable[[], None], bool]] = {
    "amid the data": (_amid_data, False),
    "before it is on the disk": (_at(new_directory, "flush"), False),
    "before the exchange": (_at(replace, "_exchange"), False),
    "after the exchange": (_after(replace, "_exchange"), True),
    "amid the deletion": (_after(os, "unlink"), True),
}
# Orbax renames first, once it has written.
ASIDE = {"between the renames": (_without_exchange(2), False), "after the renames": (_without_exchange(3), True)}


def start(call: Callable[[], None], log: Path) -> int:
    """Return the id of a process that runs `call`."""
    pid = os.fork()
    if not pid:
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    return pid


def exit_code(pid: int) -> int:
    """Return how a process ends: its exit code, or the signal, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(root: Path) -> dict[str, int]:
    """For each stage, a checkpoint that a save was killed at replacing; returns how the processes ended."""
    ended = {}
    for stage, (patch, _) in {**STAGES, **ASIDE}.items():
        place = root / stage
        place.mkdir()

        def replaces(place: Path = place, patch: Callable[[], None] = patch) -> None:
            save(place / "model", 1)
            patch()
            save(place / "model", 2)

        ended[stage] = exit_code(start(replaces, root / f"{stage}.log"))
    return ended


def limited(root: Path) -> list[list[str]]:
    """Saves in a process whose files must not be long: what is there after each, and the error."""
    found = []

    def saves() -> None:
        save(root / "model", 1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for limit in (0, 100, 4096, 4 * SIZE, 8 * SIZE):
            for name, force in (("model", True), ("other", False)):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                try:
                    ost.save(root / name, version(2), force=force)
                    error = ""
                except OSError as raised:
                    error = str(raised)
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                found.append([*sorted(os.listdir(root)), error])
        (root.parent / "limited.json").write_text(json.dumps(found))

    log = root.parent / "limited.log"
    assert exit_code(start(saves, log)) == 0, log.read_text()
    return json.loads((root.parent / "limited.json").read_text())


def without_the_other(root: Path, port: int) -> int:
    """One of two processes ends before the save that both would make; returns how the other ended."""

    def program(index: int) -> None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, heartbeat_timeout_seconds=20)
        save(root / "model", 1)
        if index:
            _die()
        save(root / "model", 2)

    pids = [start(lambda index=index: program(index), root / f"{index}.log") for index in range(2)]
    return next(exit_code(pid) for pid in pids)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for name in ("killed", "limited", "absent"):
        (root / name).mkdir()
    report = {
        "killed": killed(root / "killed"),
        "limited": limited(root / "limited"),
        "absent": without_the_other(root / "absent", int(sys.argv[2])),
    }
    (root / "report.json").write_text(json.dumps(report))
