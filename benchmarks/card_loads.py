"""One loader that loads a checkpoint onto one device, several times, in a process that `accelerator.py` starts.

Off the clock: imports, starting JAX (and PyTorch), and touching as much host memory as a load may need. On it: the
loader, and `jax.block_until_ready`. After each load the device computes `digests` of the arrays; after the last, these
are compared with those that NumPy made of the files.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import digests
import emulation
import jax
import models
import numpy as np
from loaders import fresh, memory

import orbax_safetensors as ost

PRETOUCH_BYTES = ost.SafetensorsOptions().in_flight_bytes

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Job:
    """What to load how often: a `directory`'s tensors as stored, or the tree of a `family`.

    `expected` is a file that has the digests. On a device that is `emulated`, nothing is measured.
    """

    loader: str
    directory: str
    family: str
    expected: str
    loads: int
    emulated: bool


def run(job: Job) -> dict[str, Any]:
    """Loads, measures and checks. Times are lists of seconds, of each load; memory is in bytes."""
    if job.emulated:
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    jax.block_until_ready(jax.device_put(np.zeros(1), device))
    load = LOADERS[job.loader](job, jax.sharding.SingleDeviceSharding(device))
    fresh(0 if job.emulated else PRETOUCH_BYTES)
    expected = {name: tuple(found) for name, found in json.loads(Path(job.expected).read_text()).items()}
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = memory()["VmRSS"]
    device_before = device_bytes(device, "bytes_in_use")
    seconds, cpu_seconds = [], []
    device_peak = None
    for _ in range(job.loads):
        gc.collect()
        cpu, began = cpu_time(), time.perf_counter()
        with emulation.accelerator() if job.emulated else contextlib.nullcontext():
            arrays = load()
            jax.block_until_ready(arrays)
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(cpu_time() - cpu)
        nbytes = sum(array.nbytes for array in arrays.values())
        if device_peak is None:  # before any program of the check has run
            host_peak = memory()["VmHWM"] - before
            device_peak = device_bytes(device, "peak_bytes_in_use") - device_before - nbytes
        compare(digests.of_devices(arrays), expected)
        del arrays
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "array_bytes": nbytes,
        "host_bytes": host_peak,
        "device_bytes": device_peak,
    }


def compare(found: dict[str, digests.Described], expected: dict[str, digests.Described]) -> None:
    """Ends the process with a message if a leaf is missing, or is another one."""
    wrong = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
    if wrong:
        lines = [f"{name}: {found.get(name)}, must be {expected.get(name)}" for name in sorted(wrong)[:5]]
        raise SystemExit("\n".join([f"{len(wrong)} of {len(expected)} leaves are wrong:", *lines]))


def cpu_time() -> float:
    """Seconds of all threads of this process, of the system's for it too."""
    times = os.times()
    return times.user + times.system


def device_bytes(device: Any, figure: str) -> int:
    return (device.memory_stats() or {}).get(figure, 0)


def files_of(job: Job) -> list[str]:
    return [os.fspath(path) for path in sorted(Path(job.directory).glob("*.safetensors"))]


# Each loader gets ready off the clock and returns what the clock is for.


def package(job: Job, sharding: jax.sharding.Sharding) -> Callable[[], Arrays]:
    """This package, with its default options."""

    def load() -> Arrays:
        return by_path(ost.load(job.directory, sharding, family=job.family or None))

    return load


def by_path(tree: Any) -> Arrays:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(key.key for key in path): leaf for path, leaf in leaves}


def instanttensor(job: Job, sharding: jax.sharding.Sharding) -> Callable[[], Arrays]:
    """InstantTensor, from the page cache. JAX takes PyTorch's tensors as they lie on the GPU."""
    import torch
    from instanttensor import BackendPolicy, safe_open

    torch.zeros(1, device="cuda")

    def load() -> Arrays:
        with safe_open(files_of(job), framework="pt", device=0, backend=BackendPolicy.BUFFERED) as file:
            out = {name: jax.dlpack.from_dlpack(tensor) for name, tensor in file.tensors()}
        torch.cuda.synchronize()
        return out

    return load


def torch_cuda(job: Job, sharding: jax.sharding.Sharding) -> Callable[[], Arrays]:
    """`safetensors.torch.load_file` onto the GPU. JAX takes PyTorch's tensors as they lie there."""
    import torch
    from safetensors.torch import load_file

    torch.zeros(1, device="cuda")

    def load() -> Arrays:
        return {
            name: jax.dlpack.from_dlpack(tensor)
            for path in files_of(job)
            for name, tensor in load_file(path, device="cuda").items()
        }

    return load


def pinned_limit(job: Job, sharding: jax.sharding.Sharding) -> Callable[[], Arrays]:
    """Not a loader: the tensors lie in memory that the GPU reads itself. What the way to it can give."""
    tensors = models.map_tensors(Path(job.directory))
    pinned = jax.block_until_ready(jax.device_put(tensors, sharding.with_memory_kind("pinned_host")))
    return lambda: jax.device_put(pinned, sharding)


LOADERS: dict[str, Callable[[Job, jax.sharding.Sharding], Callable[[], Arrays]]] = {
    "this package": package,
    "InstantTensor": instanttensor,
    "safetensors.torch": torch_cuda,
    "pinned limit": pinned_limit,
}


if __name__ == "__main__":
    print(json.dumps(run(Job(**json.loads(sys.argv[1])))))
