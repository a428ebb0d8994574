"""Saves in several processes that end in a SIGKILL: `test_save.py` runs this file as a module.

It forks every program from one interpreter, to import JAX only once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp

import orbax_safetensors as ost
from orbax_safetensors.devices import agreement as processes
from orbax_safetensors.storage import local
from tests.multiprocess.workers_save import TREES, arguments, full_mesh


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_first_file() -> None:
    mock.patch.object(local.LocalStore, "create", side_effect=_die).start()


def _amid_data() -> None:
    real, calls = os.pwritev, []

    def pwritev(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 3:
            real(descriptor, [memoryview(buffers[0])[: buffers[0].nbytes // 2]], offset)
            _die()
        return real(descriptor, buffers, offset)

    mock.patch.object(local.os, "pwritev", pwritev).start()


def _after_agreement(phase: str) -> None:
    real = processes.agree

    def agree(key: str, *args: Any, **more: Any) -> None:
        real(key, *args, **more)
        if key.endswith(phase):
            _die()

    mock.patch.object(processes, "agree", agree).start()


def _between_headers() -> None:
    real, headers = os.pwritev, []

    def pwritev(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == 0 and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            headers.append(descriptor)
        if len(headers) == 2:
            _die()
        return real(descriptor, buffers, offset)

    mock.patch.object(local.os, "pwritev", pwritev).start()


def _before_the_index() -> None:
    real = local.LocalStore.create

    def create(store: local.LocalStore, path: str, *args: Any, **more: Any) -> local.NewLocalFile:
        if path.endswith(".index.json"):
            _die()
        return real(store, path, *args, **more)

    mock.patch.object(local.LocalStore, "create", create).start()


# Where a save is killed: what makes it so, and whether all files are whole by then.
STAGES: dict[str, tuple[Callable[[], None], bool]] = {
    "before the first file": (_at_first_file, False),
    "amid the data": (_amid_data, False),
    "before the headers": (lambda: _after_agreement("/data"), False),
    "between the headers": (_between_headers, False),
    "before the index": (_before_the_index, False),
    "before the commit": (lambda: _after_agreement("/facts"), True),
}


# Directory of the program of which one process is killed, and the others are left alone.
SURVIVED = "amid the data, in one process"


def _killed_save(directory: Path, stage: str | None, port: int, index: int, count: int, background: bool) -> None:
    """One process of a program that saves step 1, and is killed at a stage of saving step 2."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if count > 1:
        # Longer than a living process is silent, on any machine: the survivors of a killed one wait for it once.
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index, heartbeat_timeout_seconds=20)
    tree = TREES["leading, in pairs"](full_mesh())
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=background)
    manager = ocp.CheckpointManager(directory, item_handlers=ost.SafetensorsHandler(), options=options)
    manager.save(1, args=arguments(tree))
    manager.wait_until_finished()
    if stage is not None:
        STAGES[stage][0]()
    manager.save(2, args=arguments(tree))
    manager.wait_until_finished()


def _fork(call: Callable[[], None], log: Path) -> int:
    """The id of a process that runs `call`, and fails if it comes to its end."""
    pid = os.fork()
    if pid:
        return pid
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        call()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _program(root: Path, name: str, stages: list[str | None], port: int, *, background: bool) -> list[int]:
    """Starts a process for each of `stages`."""
    count = len(stages)
    return [
        _fork(
            lambda index=index, stage=stage: _killed_save(root / name, stage, port, index, count, background),
            root / f"{name}.{index}.log",
        )
        for index, stage in enumerate(stages)
    ]


def _kill_saves(root: Path, count: int, ports: list[int]) -> None:
    """For each stage a program of `count` processes in a directory of its own, all killed once one has killed itself.

    How the first of them ended goes into `<stage>.json`: the signal, negative, or its exit code. For the program whose
    survivors are left alone that is how all of them ended.
    """
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // count}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    for number, stage in enumerate(STAGES):
        pids = _program(root, stage, [stage] * count, ports.pop(), background=bool(number % 2))
        first, status = os.waitpid(-1, 0)
        for pid in pids:
            if pid != first:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        (root / f"{stage}.json").write_text(json.dumps([os.waitstatus_to_exitcode(status)]))
    if count > 1:
        stages = [*[None] * (count - 1), "amid the data"]
        pids = _program(root, SURVIVED, stages, ports.pop(), background=False)
        ended = {}
        for _ in pids:
            pid, status = os.waitpid(-1, 0)
            ended[pid] = os.waitstatus_to_exitcode(status)
        (root / f"{SURVIVED}.json").write_text(json.dumps([ended[pid] for pid in pids]))


if __name__ == "__main__":
    _kill_saves(Path(sys.argv[1]), int(sys.argv[2]), [int(port) for port in sys.argv[3:]])
