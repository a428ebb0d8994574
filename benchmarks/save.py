"""Saving a tree of arrays: this package beside `save_file` of safetensors, Orbax's own format, and PyTorch's DCP.

    python benchmarks/save.py [--quick] [--rounds 5] [--directory DIR] [--json FILE] [--only SCENARIO ...]

Every measurement is a fresh process; savers take turns, round after round. Each saves twice and removes the first
checkpoint before the second, which is measured, and memory is touched and freed in between: memory that a virtual
machine gave back to its host costs a fault when it is touched again, in the page cache too, and how much of it a saver
meets is chance. The clock runs from a tree of
arrays on devices until the checkpoint has been committed, and nobody waits for the disk unless the name says so. Then
every tensor is read back with another library and compared bit by bit, and the files are removed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from checkpoints import Tensor, Tensors, add_directory, llama
from loaders import anonymous, fresh, memory
from restore import Runs, Target, at_least, at_most, seconds, versions
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.numpy import save_file

ONE, DEFAULT, ASYNC, SYNC = (f"this package{text}" for text in (", 1 thread", "", ", async", ", fsync"))
REFERENCE, TORCH, DCP = "safetensors.numpy", "safetensors.torch", "DCP to one checkpoint of Hugging Face, fsync"
ORBAX, ORBAX_ASYNC = "Orbax OCDBT", "Orbax OCDBT, async"
LIMIT, LIMIT_SYNC = "write limit", "write limit, fsync"
SAVERS = (LIMIT, REFERENCE, TORCH, ONE, DEFAULT, ASYNC, ORBAX, ORBAX_ASYNC, LIMIT_SYNC, SYNC, DCP)
# Well below the bytes of the tree, so that exceeding it would show.
IN_FLIGHT_BYTES = 2**28
WRITE_BYTES = 2**24
SAMPLE_SECONDS = 0.002
TIMEOUT_SECONDS = 300
RAM = Path("/dev/shm")

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Job:
    """One run of a saver: a tree on `devices` devices, of which `layout` says which dimension is cut, to `files` files.

    Orbax has its own idea of files. With `sample`, memory is looked at every now and then, which takes a little time.
    """

    saver: str
    directory: str
    layout: str
    devices: int
    files: int
    quick: bool
    sample: bool


def run(job: Job) -> dict[str, Any]:
    """Saves, measures and checks. Memory is in bytes above what the process had with the arrays."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job.devices)
    arrays = make_arrays(tensors(job.quick), job.layout, job.devices)
    nbytes = sum(array.nbytes for array in arrays.values())
    save = SAVE[job.saver](job.files)
    directory = Path(job.directory)
    save(renewed(arrays), directory / "first")()
    shutil.rmtree(directory / "first")
    gc.collect()
    fresh(2 * nbytes)
    os.sync()  # whatever else has been written to this disk is not ours to wait for
    again = renewed(arrays)
    samples = [anonymous_bytes()]
    stop = threading.Event()
    sampler = threading.Thread(target=look, args=(samples, stop))
    if job.sample:
        sampler.start()
    cpu = time.process_time()
    began = time.monotonic()
    finish = save(again, directory / "saved")
    returned = time.monotonic()
    finish()
    ended = time.monotonic()
    cpu = time.process_time() - cpu
    if job.sample:
        stop.set()
        sampler.join()
    disk_bytes = sum(512 * path.stat().st_blocks for path in (directory / "saved").rglob("*"))
    CHECK.get(job.saver, check_safetensors)(directory / "saved", arrays)
    return {
        "seconds": ended - began,
        "blocked_seconds": returned - began,
        "cpu_seconds": cpu,
        "nbytes": nbytes,
        "disk_bytes": disk_bytes,
        **({"extra_bytes": max(samples) - samples[0]} if job.sample else {}),
    }


def tensors(quick: bool) -> Tensors:
    """A small Llama in bf16, with its embedding and norms in f32: 1.2 GB."""
    sizes = {"layers": 2, "hidden": 1024, "vocabulary": 8192} if quick else {"layers": 9, "vocabulary": 16_000}
    wide = ("embed_tokens", "norm.weight")
    return {
        name: Tensor("F32", tensor.shape) if any(part in name for part in wide) else tensor
        for name, tensor in llama(**sizes).items()
    }


def make_arrays(wanted: Tensors, layout: str, devices: int) -> Arrays:
    """Arrays of random bits, in memory that JAX shares where it can."""
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    random = np.random.default_rng(0)
    out = {}
    for name, tensor in wanted.items():
        spec = ("x",) if layout == "leading" else (*(None for _ in tensor.shape[1:]), "x")
        bits = anonymous(tensor.nbytes)
        bits.view(np.uint64)[:] = random.integers(0, 2**64, tensor.nbytes // 8, np.uint64)
        values = bits.view({"F32": np.float32, "BF16": ml_dtypes.bfloat16}[tensor.dtype]).reshape(tensor.shape)
        out[name] = jax.device_put(values, jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    return jax.block_until_ready(out)


def renewed(arrays: Arrays) -> Arrays:
    """The same memory as new arrays: JAX keeps what it has put together for NumPy with an array."""
    return {
        name: jax.make_array_from_single_device_arrays(
            array.shape, array.sharding, [shard.data for shard in array.addressable_shards]
        )
        for name, array in arrays.items()
    }


def anonymous_bytes() -> int:
    kinds = memory()
    return kinds["RssAnon"] + kinds["RssShmem"]


def look(samples: list[int], stop: threading.Event) -> None:
    while not stop.wait(SAMPLE_SECONDS):
        samples.append(anonymous_bytes())


# Each saver, told how many files to make, is what saves into a new directory and returns what waits for the end of it.

Save = Callable[[Arrays, Path], Callable[[], object]]


def done() -> None:
    """Nothing to wait for."""


def package(*, background: bool = False, **options: Any) -> Callable[[int], Save]:
    """This package."""
    import orbax.checkpoint as ocp

    import orbax_safetensors as ost

    def saver(files: int) -> Save:
        handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(in_flight_bytes=IN_FLIGHT_BYTES, **options))
        checkpointer = (ocp.AsyncCheckpointer if background else ocp.Checkpointer)(handler)

        def save(arrays: Arrays, directory: Path) -> Callable[[], object]:
            checkpointer.save(directory, args=ost.SafetensorsSave(arrays, max_file_bytes=file_bytes(arrays, files)))
            return checkpointer.wait_until_finished if background else done

        return save

    return saver


def orbax(*, background: bool = False) -> Callable[[int], Save]:
    """Orbax's handler of trees."""
    import orbax.checkpoint as ocp

    def saver(files: int) -> Save:
        checkpointer = (ocp.AsyncCheckpointer if background else ocp.Checkpointer)(ocp.PyTreeCheckpointHandler())

        def save(arrays: Arrays, directory: Path) -> Callable[[], object]:
            checkpointer.save(directory, args=ocp.args.PyTreeSave(arrays))
            return checkpointer.wait_until_finished if background else done

        return save

    return saver


def reference(files: int) -> Save:
    """`safetensors.numpy.save_file`, which wants whole arrays."""

    def save(arrays: Arrays, directory: Path) -> Callable[[], object]:
        directory.mkdir()
        for number, names in enumerate(parts(arrays, files)):
            save_file({name: np.asarray(arrays[name]) for name in names}, directory / f"{number}.safetensors")
        return done

    return save


def torch_reference(files: int) -> Save:
    """`safetensors.torch.save_file`, of tensors that share the arrays' memory."""
    from safetensors.torch import save_file

    def save(arrays: Arrays, directory: Path) -> Callable[[], object]:
        directory.mkdir()
        for number, names in enumerate(parts(arrays, files)):
            save_file({name: as_torch(arrays[name]) for name in names}, directory / f"{number}.safetensors")
        return done

    return save


def dcp(files: int) -> Save:
    """PyTorch's writer of sharded safetensors, with consolidation into the files of a Hugging Face checkpoint."""
    import torch.distributed.checkpoint as dcp

    def save(arrays: Arrays, directory: Path) -> Callable[[], object]:
        numbers = {name: number for number, names in enumerate(parts(arrays, files), 1) for name in names}
        writer = dcp.HuggingFaceStorageWriter(
            os.fspath(directory),
            fqn_to_index_mapping=numbers,
            thread_count=2,
            save_distributed=True,
            enable_consolidation=True,
            thread_count_consolidation=2,
        )
        dcp.save({name: as_torch(array) for name, array in arrays.items()}, storage_writer=writer, no_dist=True)
        return done

    return save


def as_torch(array: jax.Array) -> Any:
    """The same memory as a tensor of PyTorch, if the array is on one device. PyTorch warns that it is read-only."""
    import torch

    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    bits = np.asarray(array)
    if bits.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits)


def write_limit(*, sync: bool = False) -> Callable[[int], Save]:
    """Not a saver: a thread for each file, two at most, writes as many bytes, which lie in memory as in the file.

    Into one file the system lets only one thread write.
    """
    source: list[np.ndarray] = []

    def saver(files: int) -> Save:
        def save(arrays: Arrays, directory: Path) -> Callable[[], object]:
            size = sum(array.nbytes for array in arrays.values()) // files
            if not source:
                source.append(anonymous(size * files))
                source[0][:] = 1
            directory.mkdir()

            def write(number: int) -> None:
                descriptor = os.open(directory / str(number), os.O_WRONLY | os.O_CREAT)
                memory = source[0][number * size : (number + 1) * size].data
                for begin in range(0, size, WRITE_BYTES):
                    buffer = memory[begin : begin + WRITE_BYTES]
                    assert os.pwritev(descriptor, [buffer], begin) == buffer.nbytes
                if sync:
                    os.fsync(descriptor)
                os.close(descriptor)

            with ThreadPoolExecutor(2) as pool:
                list(pool.map(write, range(files)))
            return done

        return save

    return saver


def file_bytes(arrays: Arrays, files: int) -> int:
    """The most that a file may have so that there are about as many as asked for, one at least."""
    total = sum(array.nbytes for array in arrays.values())
    # A file is full as soon as the next tensor does not fit.
    return total if files == 1 else total // files + max(array.nbytes for array in arrays.values()) // 2


def parts(arrays: Arrays, files: int) -> list[list[str]]:
    """Names of the arrays by file, filled up one after the other."""
    out: list[list[str]] = [[]]
    filled, limit = 0, file_bytes(arrays, files)
    for name, array in arrays.items():
        if filled + array.nbytes > limit:
            out.append([])
            filled = 0
        out[-1].append(name)
        filled += array.nbytes
    return out


SAVE: dict[str, Callable[[int], Save]] = {
    LIMIT: write_limit(),
    LIMIT_SYNC: write_limit(sync=True),
    REFERENCE: reference,
    TORCH: torch_reference,
    DCP: dcp,
    ONE: package(threads=1),
    DEFAULT: package(),
    ASYNC: package(background=True),
    SYNC: package(fsync=True),
    ORBAX: orbax(),
    ORBAX_ASYNC: orbax(background=True),
}


def check_safetensors(directory: Path, arrays: Arrays) -> None:
    """Raises where one bit of one tensor is not that of its array."""
    found: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert_same(name, file.get_tensor(name), arrays[name])
                found.add(name)
    assert found == arrays.keys()


def check_orbax(directory: Path, arrays: Arrays) -> None:
    import orbax.checkpoint as ocp

    args = jax.tree.map(lambda array: ocp.RestoreArgs(restore_type=np.ndarray), arrays)
    restored = ocp.PyTreeCheckpointer().restore(directory, restore_args=args)
    assert restored.keys() == arrays.keys()
    for name, array in restored.items():
        assert_same(name, array, arrays[name])


def check_limit(directory: Path, arrays: Arrays) -> None:
    assert sum(path.stat().st_size for path in directory.iterdir()) > sum(a.nbytes for a in arrays.values()) * 0.99


CHECK = {ORBAX: check_orbax, ORBAX_ASYNC: check_orbax, LIMIT: check_limit, LIMIT_SYNC: check_limit}


def assert_same(name: str, found: np.ndarray, array: jax.Array) -> None:
    assert (found.dtype, found.shape) == (array.dtype, array.shape), name
    assert np.array_equal(found.view(np.uint8), np.asarray(array).view(np.uint8)), name


@dataclass(frozen=True)
class Scenario:
    """What all `savers` do in turn; `ram` is a file system in memory, which shows what the processor has to do."""

    title: str
    layout: str
    devices: int
    files: int = 1
    ram: bool = False
    savers: tuple[str, ...] = SAVERS
    targets: tuple[Target, ...] = ()


def faster(saver: str, other: str) -> Callable[[Runs], float]:
    return lambda runs: seconds(runs, other) / seconds(runs, saver)


def extra(runs: Runs) -> float:
    """Memory beside the arrays over the in-flight budget, in the saver that needs most of those that are to keep it."""
    return max(run["extra_bytes"] for saver in (ONE, DEFAULT) for run in runs[saver] if "extra_bytes" in run) / (
        IN_FLIGHT_BYTES
    )


def blocked(runs: Runs) -> float:
    return statistics.median(run["blocked_seconds"] for run in runs[ASYNC])


def beside_orbax(runs: Runs) -> float:
    return blocked(runs) / statistics.median(run["blocked_seconds"] for run in runs[ORBAX_ASYNC])


def extra_disk(runs: Runs) -> float:
    return max(run["disk_bytes"] / run["nbytes"] - 1 for run in runs[ASYNC])


MEMORY = at_most("extra memory / in-flight budget", extra, 1.0)
# A file system takes one write to a file at a time, so that threads gain what is not writing, or write several files.
LIMITED = at_least("default, times the write limit", faster(DEFAULT, LIMIT), 0.9)


def times_numpy(ratio: float) -> Target:
    return at_least("default, times safetensors.numpy", faster(DEFAULT, REFERENCE), ratio)


FEW = (LIMIT, REFERENCE, ONE, DEFAULT)
SCENARIOS = {
    "whole": Scenario(
        "1 device",
        "leading",
        1,
        targets=(times_numpy(1.3), LIMITED, at_most("asynchronous, seconds blocked", blocked, 0.05), MEMORY),
    ),
    "leading": Scenario(
        "leading dimension, 8 devices", "leading", 8, savers=(*FEW, ORBAX), targets=(times_numpy(1.5), MEMORY)
    ),
    "inner": Scenario(
        "last dimension, 8 devices", "inner", 8, savers=(*FEW, ORBAX), targets=(times_numpy(1.5), MEMORY)
    ),
    "step": Scenario(
        "a training step in the background, 8 devices",
        "leading",
        8,
        savers=(REFERENCE, ASYNC, ORBAX_ASYNC),
        targets=(
            at_most("blocked, times Orbax's AsyncCheckpointer", beside_orbax, 1.05),
            at_most("disk beside the arrays' bytes", extra_disk, 0.01),
        ),
    ),
    "files": Scenario(
        "1 device, several files",
        "leading",
        1,
        files=4,
        savers=(*FEW, LIMIT_SYNC, SYNC, DCP),
        targets=(times_numpy(1.8), LIMITED, MEMORY),
    ),
    "ram-whole": Scenario("1 device, in memory", "leading", 1, ram=True, savers=FEW, targets=(LIMITED, MEMORY)),
    "ram-inner": Scenario(
        "last dimension, 8 devices, in memory", "inner", 8, ram=True, savers=FEW, targets=(times_numpy(1.5), MEMORY)
    ),
    "ram-files": Scenario(
        "1 device, several files, in memory", "leading", 1, files=4, ram=True, savers=FEW, targets=(LIMITED, MEMORY)
    ),
}


def measure(scenario: Scenario, saver: str, parent: Path, quick: bool, sample: bool) -> dict[str, Any]:
    """One run in a process of its own. Raises RuntimeError where it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="orbax-safetensors-save-", dir=RAM if scenario.ram else parent) as scratch:
        job = Job(saver, scratch, scenario.layout, scenario.devices, scenario.files, quick, sample)
        command = [sys.executable, __file__, "--job", json.dumps(vars(job))]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"took more than {TIMEOUT_SECONDS} s") from None
        except subprocess.CalledProcessError as error:
            raise RuntimeError("failed:\n" + error.stderr[-2000:]) from None
        result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
        return result


def measure_all(scenario: Scenario, parent: Path, rounds: int, quick: bool, console: Console) -> Runs:
    """All runs of a scenario, by saver; a saver that fails has none."""
    runs: Runs = {saver: [] for saver in scenario.savers}
    failed: set[str] = set()
    for number in range(rounds):
        for saver in scenario.savers:
            if saver in failed:
                continue
            try:
                runs[saver].append(measure(scenario, saver, parent, quick, sample=number == 0))
            except RuntimeError as error:
                failed.add(saver)
                runs[saver].clear()
                console.print(f"{scenario.title}: {saver} {error}", style="red", markup=False)
    return runs


def show(scenario: Scenario, runs: Runs, console: Console) -> None:
    """The table of a scenario."""
    table = Table(title=scenario.title)
    columns = ("saver", "median s", "best s", "GB/s", "of safetensors.numpy", "blocked s", "CPU s", "extra MB", "runs")
    for column in columns:
        table.add_column(column, justify="left" if column == "saver" else "right")
    for saver, own in runs.items():
        if not own:
            table.add_row(saver, "failed")
            continue
        took = seconds(runs, saver)
        table.add_row(
            saver,
            f"{took:.3f}",
            f"{min(run['seconds'] for run in own):.3f}",
            f"{own[0]['nbytes'] / took / 1e9:.2f}",
            f"{faster(saver, REFERENCE)(runs):.2f}",
            f"{statistics.median(run['blocked_seconds'] for run in own):.3f}",
            f"{statistics.median(run['cpu_seconds'] for run in own):.2f}",
            f"{max(run.get('extra_bytes', 0) for run in own) / 1e6:.0f}",
            str(len(own)),
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_directory(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of 0.1 GB: shows that everything runs")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(run(Job(**json.loads(args.job)))))
        return 0
    console = Console(width=140)
    report: dict[str, Any] = {"versions": versions(), "scenarios": {}}
    console.print(report["versions"])
    broken = False
    for name in args.only:
        scenario = SCENARIOS[name]
        # What is there at a time: arrays, files, and the copies of a save in the background.
        if scenario.ram and (not RAM.is_dir() or shutil.disk_usage(RAM).free < 2**32):
            console.print(f"{scenario.title}: left out, {RAM} has no room")
            continue
        runs = measure_all(scenario, args.directory, 1 if args.quick else args.rounds, args.quick, console)
        show(scenario, runs, console)
        complete = all(runs[saver] for saver in runs if saver.startswith(DEFAULT)) and bool(runs[REFERENCE])
        broken = broken or not complete
        targets = []
        # The targets are for trees that take longer to save than starting up.
        for target in scenario.targets if complete and not args.quick else ():
            value = target.figure(runs)
            targets.append({"target": target.text, "found": value, "met": target.met(value)})
            console.print(f"  {'met    ' if target.met(value) else 'NOT MET'} {target.text}: {value:.3f}", markup=False)
        report["scenarios"][name] = {"scenario": scenario.title, "runs": runs, "targets": targets}
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
