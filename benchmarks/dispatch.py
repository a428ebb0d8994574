"""Dispatch: what a restore costs in Python, with files that read nothing and copies that move nothing.

    python benchmarks/dispatch.py [--quick] [--rounds 5] [--directory DIR] [--json FILE] [--only LAYOUT ...]

The checkpoint has real headers and holes for data: 64 tensors of 100 MB. A restore goes the usual way, but its files
fill no buffer, and copies out of staging buffers are left out. So what is left is planning, requests, the hand-over to
threads, and the assembly of arrays. The clock counts CPU seconds, from which follows how many bytes one core dispatches
in a second. `many` has 200,000 tensors of 32 bytes on one device instead, with real reads, beside
`safetensors.numpy.load_file` and JAX's own work for as many arrays. Requests and bytes have to be those of
`plan_restore`, and no array may be copied.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import checkpoints
from rich.console import Console
from rich.table import Table

DEVICES = 8
TENSORS, ROWS, COLUMNS = 64, 4096, 12_288  # 100 MB each in bf16
LAYOUTS: dict[str, tuple[int, tuple[str | None, ...]]] = {  # devices, and the mesh axes of the dimensions
    "whole": (1, ()),
    "leading": (DEVICES, ("x",)),
    "inner": (DEVICES, (None, "x")),
    "both": (DEVICES, ("y", "z")),
    "replicated": (DEVICES, ()),
}
OTHER = "other"  # a checkpoint of another geometry, restored before the clock runs
MANY = "many"
MIN_BYTES_PER_SECOND = 40e9
MAX_TIMES_REFERENCE = 3.0


class NullFile:
    """A file whose requests are counted and fill no buffer."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.path, self.stamp = file.path, file.stamp
        self.map, self.check, self.cancel, self.close = file.map, file.check, file.cancel, file.close
        self.requests: list[tuple[int, int]] = []  # number of requests and bytes of each call

    def read(self, ranges: Iterable[tuple[int, Sequence[memoryview]]]) -> None:
        requests = nbytes = 0
        for _, buffers in ranges:
            requests += 1
            nbytes += sum([buffer.nbytes for buffer in buffers])
        self.requests.append((requests, nbytes))

    def scatter(self, offset: int, runs: Any) -> bool:
        self.requests.append((1, int(runs[:, 1].sum())))
        return True

    def fetch(self, offset: int, nbytes: int) -> None:
        return None


def dispatch_once(directory: Path, layout: str) -> dict[str, Any]:
    """Restores once in this process, checks what was requested, and returns what it took."""
    import jax
    import numpy as np

    devices, spec = LAYOUTS[layout]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    import orbax_safetensors as ost
    from orbax_safetensors.checkpoint.checkpoint import Checkpoint
    from orbax_safetensors.transfer import reader

    if "y" in spec:
        mesh = jax.make_mesh((2, DEVICES // 2), ("y", "z"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    else:
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    files: list[NullFile] = []

    def open_file(checkpoint: Checkpoint, index: int) -> Any:
        files.append(NullFile(real_open(checkpoint, index)))
        return files[-1]

    real_open = Checkpoint.open_file
    copies: list[int] = []
    Checkpoint.open_file = open_file  # type: ignore[method-assign]
    reader.assign = lambda destination, source: copies.append(destination.nbytes)  # type: ignore[attr-defined]

    jax.block_until_ready(ost.load(directory / OTHER, sharding))  # imports, and JAX's caches
    files.clear()
    copies.clear()
    cpu_began, began = time.process_time(), time.perf_counter()
    arrays = jax.block_until_ready(ost.load(directory, sharding))
    cpu_seconds, seconds = time.process_time() - cpu_began, time.perf_counter() - began
    planned = ost.plan_restore(directory, sharding).processes[0]
    assert sum(count for file in files for count, _ in file.requests) == planned.num_requests
    assert sum(nbytes for file in files for _, nbytes in file.requests) == planned.read_bytes
    staged = sum(copies)
    assert staged in (0, planned.destination_bytes)
    nbytes = sum(array.nbytes for array in arrays.values())
    # Shards were never written to; only memory that JAX shares with the restore is there without having been read.
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < nbytes / 2, "arrays were copied"
    for array in arrays.values():
        assert array.sharding == sharding
        assert not np.asarray(array.addressable_shards[-1].data[-1]).any()
    return {"cpu_seconds": cpu_seconds, "seconds": seconds, "nbytes": nbytes, "num_requests": planned.num_requests}


def many_once(directory: Path) -> dict[str, Any]:
    """Restores many tensors in this process, beside the reference, and returns CPU seconds of both and of JAX."""
    import jax
    import numpy as np
    from safetensors.numpy import load_file

    jax.config.update("jax_platforms", "cpu")
    import orbax_safetensors as ost

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    paths = sorted(directory.glob("*.safetensors"))
    out: dict[str, float] = {}

    def measure(what: str, work: Any) -> Any:
        began = time.process_time()
        result = jax.block_until_ready(work())
        out[what] = time.process_time() - began
        return result

    expected = measure("reference", lambda: {k: v for path in paths for k, v in load_file(path).items()})
    flat = measure("flat", lambda: ost.load(directory))
    placed = measure("placed", lambda: ost.load(directory, sharding))
    put = measure("device_put", lambda: jax.device_put(list(flat.values()), sharding))
    assert flat.keys() == placed.keys() == expected.keys()
    for name, array, other in zip(flat, put, flat.values(), strict=True):
        want = expected[name].tobytes()
        assert np.asarray(placed[name]).tobytes() == other.tobytes() == np.asarray(array).tobytes() == want
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoints.add_directory(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round with 8 tensors, and with 2,000 small ones")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--only", nargs="+", choices=[*LAYOUTS, MANY], default=[*LAYOUTS, MANY], metavar="LAYOUT")
    parser.add_argument("--once", nargs=2, metavar=("CHECKPOINT", "LAYOUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        path = Path(args.once[0])
        print(json.dumps(many_once(path) if args.once[1] == MANY else dispatch_once(path, args.once[1])))
        return 0
    directory = args.directory / ("orbax-safetensors-bench-quick" if args.quick else "orbax-safetensors-bench")
    large, many = directory / "dispatch", directory / MANY
    tensors = {
        f"layers.{n}.weight": checkpoints.Tensor("BF16", (ROWS, COLUMNS)) for n in range(8 if args.quick else TENSORS)
    }
    checkpoints.write_sparse(large, tensors, files=4)
    checkpoints.write_sparse(large / OTHER, {"weight": checkpoints.Tensor("BF16", (DEVICES, ROWS))}, files=1)
    if MANY in args.only:
        checkpoints.write(many, checkpoints.many(tensors=2000 if args.quick else 200_000), files=1)
    runs: dict[str, list[dict[str, Any]]] = {layout: [] for layout in args.only}
    for _ in range(1 if args.quick else args.rounds):
        for layout, own in runs.items():
            path = many if layout == MANY else large
            command = [sys.executable, os.fspath(Path(__file__)), "--once", os.fspath(path), layout]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            own.append(json.loads(done.stdout.splitlines()[-1]))
    console = Console(width=120)
    show([(layout, own) for layout, own in runs.items() if layout != MANY], console)
    if MANY in runs:
        show_many(runs[MANY], console)
    if args.json:
        args.json.write_text(json.dumps(runs))
    return 0


def show(runs: Sequence[tuple[str, list[dict[str, Any]]]], console: Console) -> None:
    """The table of the large tensors."""
    table = Table(title="tensors of 100 MB; nothing is read or copied")
    for column in ("layout", "devices", "CPU ms", "requests", "us / request", "GB / CPU s", "met"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for layout, own in runs:
        took = statistics.median(run["cpu_seconds"] for run in own)
        speed = own[0]["nbytes"] / took
        table.add_row(
            layout,
            str(LAYOUTS[layout][0]),
            f"{took * 1e3:.1f}",
            str(own[0]["num_requests"]),
            f"{took / own[0]['num_requests'] * 1e6:.1f}",
            f"{speed / 1e9:.1f}",
            "yes" if speed >= MIN_BYTES_PER_SECOND else "NO",
        )
    console.print(table)


def show_many(runs: list[dict[str, Any]], console: Console) -> None:
    """The table of the many small tensors."""
    table = Table(title="many small tensors")
    for column in ("", "CPU s", "times load_file"):
        table.add_column(column, justify="right" if column else "left")
    names = {
        "reference": "safetensors.numpy.load_file",
        "flat": "this package, to NumPy",
        "placed": "this package, onto one device",
        "device_put": "jax.device_put of as many arrays",
    }
    medians = {what: statistics.median(run[what] for run in runs) for what in names}
    for what, name in names.items():
        table.add_row(name, f"{medians[what]:.2f}", f"{medians[what] / medians['reference']:.1f}")
    met = all(medians[what] <= MAX_TIMES_REFERENCE * medians["reference"] for what in ("flat", "placed"))
    console.print(table)
    console.print(f"at most {MAX_TIMES_REFERENCE:g} times load_file: {'met' if met else 'NOT MET'}")


if __name__ == "__main__":
    sys.exit(main())
