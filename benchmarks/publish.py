"""Publishing a training run: how long a step is blocked, and what a program sees that reads meanwhile.

    python benchmarks/publish.py [--quick] [--steps 12] [--directory DIR] [--json FILE]

A process trains for a while, that is, it adds one to the bits of each element of a random model of 0.5 GB on 8 CPU
devices, so that a reader knows the step of each element. After each step it saves twice with `CheckpointManager`, in
turn: the parameters as safetensors, like a source, and the same tree in Orbax's own format. The clock runs while
`save` blocks; the next begins once the last is complete. Without readers, these are the times. Then the same goes on
with two processes that read as fast as they can: one polls for numbered steps, and one reads a name that is replaced.
They look at every element.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoints
import jax
import numpy as np
import orbax.checkpoint as ocp
from restore import Target, at_most, versions
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

import orbax_safetensors as ost

OURS, ORBAX = "this package", "Orbax's own format"
NUMBERED, REPLACED = "numbered steps", "one name, replaced"
SOURCE, RUN, CURRENT, DONE = "source", "run", "current", "done"
ITEM = "params"
FIRST_STEPS = 2  # of a process, which import and compile
DELETION_SECONDS = 10
TIMEOUT_SECONDS = 120

Arrays = dict[str, jax.Array]


def sizes(*, quick: bool) -> dict[str, int]:
    """The model: 99 tensors."""
    return {"layers": 11, **({"hidden": 128, "feed_forward": 512, "vocabulary": 1024} if quick else {"hidden": 1024})}


def managers(directory: Path) -> dict[str, tuple[ocp.CheckpointManager, Callable[[Arrays, Path], Any]]]:
    """Both managers, and the arguments with which each saves."""
    options = ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=True)

    def manager(name: str, handler: ocp.CheckpointHandler) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(directory / name, item_handlers={ITEM: handler}, options=options)

    return {
        OURS: (manager(RUN, ost.SafetensorsHandler()), lambda tree, source: ost.SafetensorsSave(tree, like=source)),
        ORBAX: (manager("orbax", ocp.PyTreeCheckpointHandler()), lambda tree, _: ocp.args.PyTreeSave(tree)),
    }


def disk_bytes(directory: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in directory.rglob("*"))


def by_safetensors(directory: Path) -> dict[str, np.ndarray]:
    return {name: array for file in directory.glob("*.safetensors") for name, array in load_file(file).items()}


def steps_of(tensors: Mapping[str, Any], source: Mapping[str, np.ndarray]) -> set[int]:
    """The steps of all elements."""
    assert tensors.keys() == source.keys()
    bits = (np.asarray(tensor).view(np.uint16) - source[name].view(np.uint16) for name, tensor in tensors.items())
    return {int(step) for differences in bits for step in np.unique(differences)}


def latest(run: Path) -> Path:
    steps = [path for path in run.iterdir() if path.name.isdigit()]
    return max(steps, key=lambda path: int(path.name))


def look_numbered(directory: Path, source: Mapping[str, np.ndarray], one_device: Any) -> tuple[int, set[int]] | None:
    """Read as the guide does, and with the `safetensors` package; return the step, and those of all elements."""
    step = latest(directory / RUN)
    try:
        if faults := ost.verify(step / ITEM, data=True):
            raise faults[0]
        tensors = ost.load(step / ITEM, one_device, options=ost.SafetensorsOptions(checksums=True))
        theirs = by_safetensors(step / ITEM)
        if theirs.keys() != source.keys():  # files are deleted one by one
            raise FileNotFoundError(step)
        return int(step.name), steps_of(tensors, source) | steps_of(theirs, source)
    except OSError:
        gone = time.monotonic() + DELETION_SECONDS
        while step.exists():
            if time.monotonic() > gone:
                raise
            time.sleep(0.01)
        return None


def look_replaced(directory: Path, source: Mapping[str, np.ndarray], one_device: Any) -> tuple[int, set[int]] | None:
    try:
        tensors = ost.load(directory / CURRENT, one_device, options=ost.SafetensorsOptions(checksums=True))
    except ost.StorageError as error:
        if "changed while it was in use" not in str(error):
            raise
        return None
    steps = steps_of(tensors, source)
    return max(steps), steps


def read(kind: str, directory: Path) -> dict[str, Any]:
    """Read until the training is done: which steps, how often one was gone, and how often they were mixed."""
    look = {NUMBERED: look_numbered, REPLACED: look_replaced}[kind]
    source = by_safetensors(directory / SOURCE)
    one_device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    seen: Counter[int] = Counter()
    gone = mixtures = 0
    while not (directory / DONE).exists():
        found = look(directory, source, one_device)
        if found is None:
            gone += 1
            continue
        step, steps = found
        mixtures += steps != {step}
        seen[step] += 1
    return {"reads": seen.total(), "steps": sorted(seen), "gone": gone, "mixtures": mixtures}


@contextmanager
def readers(directory: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Let both readers run, and give what they found at the end."""
    found: dict[str, dict[str, Any]] = {}
    processes = {
        kind: subprocess.Popen([sys.executable, __file__, "--read", kind, directory], stdout=subprocess.PIPE, text=True)
        for kind in (NUMBERED, REPLACED)
    }
    try:
        yield found
        (directory / DONE).touch()
        for kind, process in processes.items():
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
            if process.returncode:
                raise RuntimeError(f"the reader of {kind} has failed")
            found[kind] = json.loads(output)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def measure(directory: Path, steps: int, *, quick: bool) -> dict[str, Any]:
    """Train and save without readers, then with them."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    source = directory / SOURCE
    checkpoints.write(source, checkpoints.llama(**sizes(quick=quick)), files=1)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    tree = ost.load(source, mesh)
    nbytes = sum(array.nbytes for array in tree.values())

    @jax.jit
    def advance(tree: Arrays) -> Arrays:
        def plus_one(array: jax.Array) -> jax.Array:
            bits = jax.lax.bitcast_convert_type(array, jax.numpy.uint16) + jax.numpy.uint16(1)
            return jax.lax.bitcast_convert_type(bits, array.dtype)

        return jax.tree.map(plus_one, tree)

    savers = managers(directory)
    blocked: dict[str, list[float]] = {saver: [] for saver in savers}
    disk: dict[str, int] = {}
    for step in range(1, steps + 1):
        tree = jax.block_until_ready(advance(tree))
        for saver in sorted(savers, reverse=step % 2 == 1):
            manager, args = savers[saver]
            os.sync()  # whatever else has been written to this disk is not ours to wait for
            arguments = ocp.args.Composite(**{ITEM: args(tree, source)})
            began = time.perf_counter()
            manager.save(step, args=arguments)
            blocked[saver].append(time.perf_counter() - began)
            manager.wait_until_finished()
            disk[saver] = disk_bytes(Path(manager.directory) / str(step) / ITEM)
    savers[ORBAX][0].close()

    manager, args = savers[OURS]
    ost.save(directory / CURRENT, tree, like=source)
    with readers(directory) as found:
        for step in range(steps + 1, 2 * steps + 1):
            tree = jax.block_until_ready(advance(tree))
            manager.save(step, args=ocp.args.Composite(**{ITEM: args(tree, source)}))
            ost.save(directory / CURRENT, tree, like=source, force=True)
            time.sleep(0.5)  # what a step of training takes
        manager.wait_until_finished()
    manager.close()
    return {"nbytes": nbytes, "blocked": blocked, "disk_bytes": disk, "readers": found}


def median_blocked(report: dict[str, Any], saver: str) -> float:
    return statistics.median(report["blocked"][saver][FIRST_STEPS:])


def ratio(report: Any) -> float:
    return median_blocked(report, OURS) / median_blocked(report, ORBAX)


def extra_disk(report: Any) -> float:
    return float(report["disk_bytes"][OURS] / report["nbytes"] - 1)


TARGETS: tuple[Target, ...] = (
    at_most("blocked, times Orbax's own format", ratio, 1.05),
    at_most("disk beside the arrays' bytes", extra_disk, 0.01),
)


def show(report: dict[str, Any], console: Console) -> None:
    blocked = Table("saves", "blocked, ms", "from", "to", "on disk / bytes", title="A step, without readers")
    for saver, times in report["blocked"].items():
        of_steps = [1000 * taken for taken in times[FIRST_STEPS:]]
        figures = (statistics.median(of_steps), min(of_steps), max(of_steps))
        on_disk = report["disk_bytes"][saver] / report["nbytes"]
        blocked.add_row(saver, *(f"{figure:.1f}" for figure in figures), f"{on_disk:.4f}")
    console.print(blocked)
    reads = Table("reader", "reads", "steps", "gone meanwhile", "mixtures", title="Readers meanwhile")
    for kind, found in report["readers"].items():
        counts = (found["reads"], len(found["steps"]), found["gone"], found["mixtures"])
        reads.add_row(kind, *map(str, counts))
    console.print(reads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoints.add_directory(parser)
    parser.add_argument("--steps", type=int, default=12, help="with readers, and without (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few steps of a small model: shows that everything runs")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--read", nargs=2, metavar=("KIND", "DIRECTORY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read(args.read[0], Path(args.read[1]))))
        return 0
    console = Console(width=140)
    console.print(versions())
    with tempfile.TemporaryDirectory(prefix="orbax-safetensors-publish-", dir=args.directory) as scratch:
        report = measure(Path(scratch), 4 if args.quick else args.steps, quick=args.quick)
    show(report, console)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    # The targets are for a model that takes longer to save than starting up.
    for target in () if args.quick else TARGETS:
        value = target.figure(report)
        console.print(f"  {'met    ' if target.met(value) else 'NOT MET'} {target.text}: {value:.3f}", markup=False)
    return int(any(found["mixtures"] or not found["reads"] for found in report["readers"].values()))


if __name__ == "__main__":
    sys.exit(main())
