"""What `test_shared_headers.py` runs in many processes: loads from a server, while one process is killed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.checkpoint import shared_headers
from orbax_safetensors.devices.agreement import new_key, together
from tests.support.measure import different_shards

LOADED = 3  # tensors: the server, which is of one process, is busy with headers


def values(files: int, processes: int) -> dict[str, np.ndarray]:
    """The tensors of each file: one."""
    size = processes * 4
    return {f"t{number}": np.arange(size, dtype=np.float32) + number * size for number in range(files)}


def _end(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Loads twice with all processes: which shards are wrong, and how long it took.

    In the second load, a process is killed after it has read its headers, and before it sends them.
    """
    killed = jax.process_index() == job["killed"]
    expected = values(job["files"], jax.process_count())
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    target = {
        name: jax.ShapeDtypeStruct(expected[name].shape, expected[name].dtype, sharding=sharding)
        for name in list(expected)[:LOADED]
    }
    found: dict[str, Any] = {"wrong": [], "seconds": []}
    for url, wait in zip(job["urls"], job["waits"], strict=True):
        mock.patch.object(shared_headers, "_WAIT_SECONDS", wait).start()
        if killed and url == job["urls"][-1]:
            mock.patch.object(shared_headers, "publish", _end).start()
        together(new_key("ready"), lambda: None)  # imports take some processes far longer than others
        began = time.monotonic()
        restored = ost.SafetensorsHandler().restore(url, ost.SafetensorsRestore(target, partial_restore=True))
        found["seconds"].append(time.monotonic() - began)
        found["wrong"] += [
            f"{url} {name}" for name, array in restored.items() if list(different_shards(array, expected[name]))
        ]
    return found
