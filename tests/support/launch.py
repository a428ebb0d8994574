"""Runs one function in several Python processes that are one JAX program, as hosts of a cluster are.

`launch` is for tests; run as a module, this file is one of the processes. Starting them takes seconds, so a function
should go through many cases and return what it found in all of them. Judging it is the test's business.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.support import hang
from tests.support.roots import ROOT

# The end of a process's stderr that a failure shows, in characters.
_SHOWN = 6000
# Seconds that a process has to dump its stacks before it is killed.
_GRACE_SECONDS = 5.0


class LaunchError(Exception):
    """A process failed or did not end; the message has what each of them wrote to stderr."""


def launch(
    function: str,
    arguments: Any,
    *,
    processes: int,
    devices: int,
    killed: Collection[int] = (),
    heartbeat_seconds: int = 100,
) -> list[Any]:
    """Calls `function`, as `module:name`, with `arguments` in every process; returns their results in order.

    Arguments and results are JSON. Every process has `devices` simulated CPU devices. Once one fails, or if they
    hang, the others are killed and `LaunchError` is raised. Those in `killed`, not the first, may end as
    they like, and have no results. Who is silent for `heartbeat_seconds` is no living process to the others.
    """
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as reserved:
        # Bound and never listening: it keeps the port from others, and shares it with the coordinator.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        job = {
            "function": function,
            "arguments": arguments,
            "processes": processes,
            "coordinator": f"127.0.0.1:{reserved.getsockname()[1]}",
            "heartbeat_seconds": heartbeat_seconds,
            "lasting": [index for index in range(processes) if index not in killed],
        }
        Path(scratch, "job.json").write_text(json.dumps(job))
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        running: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(processes):
                with open(Path(scratch, f"{index}.err"), "wb") as stderr:
                    command = [sys.executable, "-m", __spec__.name, scratch, str(index)]
                    running.append(
                        subprocess.Popen(
                            command,
                            cwd=scratch,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=stderr,
                            stderr=stderr,
                        )
                    )
            _wait([running[index] for index in job["lasting"]], hang.SECONDS + _GRACE_SECONDS)
        finally:
            for process in running:
                process.kill()
            codes = [process.wait() for process in running]
        results = [Path(scratch, f"{index}.json") for index in job["lasting"]]
        if any(codes[index] for index in job["lasting"]):
            raise LaunchError(
                f"{function} with {processes} processes:\n"
                + "\n".join(
                    f"--- process {index}, exit status {code}:\n"
                    + Path(scratch, f"{index}.err").read_text(errors="replace")[-_SHOWN:]
                    for index, code in enumerate(codes)
                )
            )
        return [json.loads(result.read_text()) for result in results]


def check_scenarios(results: list[dict[str, Any]]) -> None:
    """Fails where a scenario failed in a process: `results` have a `failure` of each, by name."""
    alike: dict[tuple[str, str], list[int]] = {}
    for process, of_process in enumerate(results):
        for name, found in of_process.items():
            if found["failure"]:
                alike.setdefault((name, found["failure"]), []).append(process)
    text = "\n".join(f"--- {name}, processes {processes}:\n{why}" for (name, why), processes in alike.items())
    assert not alike, text


def _wait(running: list[subprocess.Popen[bytes]], timeout: float) -> None:
    """Returns when all processes have ended, one has failed, or time is up."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in running]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)


def _main(scratch: str, index: int) -> None:
    job = json.loads(Path(scratch, "job.json").read_text())
    # Without `exit=True`: the first to exit would end the others through JAX before their stacks are shown.
    faulthandler.dump_traceback_later(hang.SECONDS)

    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(
        job["coordinator"],
        job["processes"],
        index,
        initialization_timeout=int(hang.SECONDS),
        shutdown_timeout_seconds=int(hang.SECONDS),
        heartbeat_timeout_seconds=job["heartbeat_seconds"],
    )
    try:
        module, name = job["function"].split(":")
        function = getattr(importlib.import_module(module), name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = function(job["arguments"])
        Path(scratch, f"{index}.part").write_text(json.dumps(result))
        Path(scratch, f"{index}.part").rename(Path(scratch, f"{index}.json"))
        if len(job["lasting"]) < job["processes"]:  # JAX ends all that are left once it notices, or when the first ends
            while not all(Path(scratch, f"{other}.json").exists() for other in job["lasting"]):
                time.sleep(0.05)
            os._exit(0)
    except BaseException:
        # An ordinary exit would first wait for the processes that this one has let down.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    jax.distributed.shutdown()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
