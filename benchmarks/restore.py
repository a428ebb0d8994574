"""Restoring a checkpoint: this package beside every other way to get the same arrays.

    python benchmarks/restore.py [--quick] [--rounds 5] [--directory DIR] [--json FILE] [--only SCENARIO ...]

Every measurement is a fresh process (`loaders.py`); loaders take turns, round after round, and every result is compared
with the `safetensors` package bit by bit. `README.md` says what the columns mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import checkpoints
from rich.console import Console
from rich.table import Table

PACKAGE, ALIAS, LIMIT, READ_LIMIT = "this package", "this package, alias", "copy limit", "read limit"
DIRECT, DIRECT_LIMIT = "this package, direct", "direct limit"
ORBAX, TORCH, NUMPY, FAST = "Orbax v1", "safetensors.torch", "safetensors.numpy", "fastsafetensors"
RUNAI = "runai-model-streamer"
LOADERS = (LIMIT, READ_LIMIT, PACKAGE, TORCH, FAST, NUMPY, ORBAX)
COLD = (DIRECT_LIMIT, READ_LIMIT, DIRECT, PACKAGE, RUNAI, TORCH, FAST, NUMPY)
# A loader that needs a package which is not installed is left out.
NEEDS = {
    TORCH: ("torch",),
    FAST: ("fastsafetensors", "torch"),
    RUNAI: ("runai_model_streamer", "torch"),
}
TIMEOUT_SECONDS = 300
SAMPLE_SECONDS = 0.002

Runs = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Target:
    """What is asked of this package: `figure` of a scenario's runs is at least, or at most, `bound`."""

    text: str
    figure: Callable[[Runs], float]
    bound: float
    at_least: bool

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(frozen=True)
class Scenario:
    """Work that all `loaders` do in turn. `job` has the fields of `loaders.Job` that are not left as they are.

    `rounds` has the most rounds for loaders that are too slow for all of them; `memory` the multiple of the bytes that
    any of them needs. `instead` has what `job` says otherwise for some loaders. Where the check is slow, it is made in
    the first round only.
    """

    title: str
    checkpoint: str
    job: dict[str, Any]
    loaders: Sequence[str] = LOADERS
    rounds: dict[str, int] = field(default_factory=dict)
    memory: float = 2.0
    targets: tuple[Target, ...] = ()
    instead: dict[str, dict[str, Any]] = field(default_factory=dict)
    slow_check: bool = False


def seconds(runs: Runs, loader: str) -> float:
    """Median of what a loader took, NaN where it was not measured."""
    return statistics.median([run["seconds"] for run in runs.get(loader, [])] or [float("nan")])


def faster_than(other: str) -> Callable[[Runs], float]:
    return lambda runs: seconds(runs, other) / seconds(runs, PACKAGE)


def over_read(runs: Runs) -> float:
    """Bytes of tensors that were read for each byte needed, in the process where that is most."""
    return max(run["event_bytes"] / run["needed_bytes"] for run in runs[PACKAGE])


def over_read_calls(runs: Runs) -> float:
    """The same as the kernel counts it: whatever read calls returned, headers and Python's own modules included."""
    return max(run["read_bytes"] / run["needed_bytes"] for run in runs[PACKAGE])


def peak(runs: Runs) -> float:
    """Peak of all resident memory over the bytes of the distinct shards."""
    return max(run["peak_bytes"] / run["needed_bytes"] for run in runs[PACKAGE])


def at_least(text: str, figure: Callable[[Runs], float], bound: float) -> Target:
    return Target(f"{text} >= {bound:g}", figure, bound, at_least=True)


def at_most(text: str, figure: Callable[[Runs], float], bound: float) -> Target:
    return Target(f"{text} <= {bound:g}", figure, bound, at_least=False)


def speed(limit: float, torch: float, orbax: float) -> tuple[Target, ...]:
    return (
        at_least("of the copy limit", faster_than(LIMIT), limit),
        at_least("of the read limit", faster_than(READ_LIMIT), limit),
        at_least("times safetensors.torch", faster_than(TORCH), torch),
        at_least("times Orbax v1", faster_than(ORBAX), orbax),
    )


def of_the_disk(bound: float) -> tuple[Target, ...]:
    def cpu_for_a_gigabyte(runs: Runs) -> float:
        return statistics.median(run["cpu_seconds"] / run["loaded_bytes"] * 1e9 for run in runs[DIRECT])

    return (
        at_least("of the direct limit", lambda runs: seconds(runs, DIRECT_LIMIT) / seconds(runs, DIRECT), bound),
        at_most("CPU seconds for a gigabyte", cpu_for_a_gigabyte, 0.3),
    )


SCENARIOS = {
    "whole": Scenario("whole, 1 device", "llama", {"layout": "leading"}, targets=speed(0.9, 2, 5)),
    "leading": Scenario(
        "leading dimension, 8 devices", "llama", {"layout": "leading", "devices": 8}, targets=speed(0.9, 2, 5)
    ),
    "inner": Scenario(
        "last dimension, 8 devices",
        "llama",
        {"layout": "inner", "devices": 8},
        rounds={ORBAX: 1},
        targets=speed(0.75, 3, 50),
    ),
    "cold": Scenario(
        "whole, 1 device, nothing in the page cache",
        "llama",
        {"layout": "leading", "cold": True},
        loaders=COLD,
        targets=of_the_disk(0.9),
        slow_check=True,
    ),
    "cold-aligned": Scenario(
        "whole, 1 device, aligned files, nothing in the page cache",
        "llama-aligned",
        {"layout": "leading", "cold": True},
        loaders=(DIRECT_LIMIT, READ_LIMIT, DIRECT, PACKAGE),
        targets=of_the_disk(0.9),
        slow_check=True,
    ),
    "cold-inner": Scenario(
        "last dimension, 8 devices, nothing in the page cache",
        "llama",
        {"layout": "inner", "devices": 8, "cold": True},
        loaders=COLD,
        slow_check=True,
    ),
    "aligned": Scenario(
        "aligned files, 1 device",
        "llama-aligned",
        {"layout": "leading"},
        loaders=(LIMIT, READ_LIMIT, ALIAS, PACKAGE, TORCH, NUMPY),
        targets=(at_most("seconds, alias=True", lambda runs: seconds(runs, ALIAS), 0.1),),
    ),
    "replicated": Scenario(
        "replicated on 8 devices, first file",
        "llama",
        {"layout": "replicated", "devices": 8, "subset": True},
        rounds={ORBAX: 2},
        memory=9.0,
        targets=(at_most("peak memory / tensor bytes", peak, 1.1),),
    ),
    "many": Scenario("200,000 tensors, 1 device", "many", {"layout": "leading"}, loaders=(PACKAGE, TORCH, NUMPY)),
    "processes-leading": Scenario(
        "8 processes, leading dimension",
        "llama",
        {"layout": "leading", "devices": 8, "processes": 8},
        loaders=(PACKAGE, ORBAX),
        rounds={PACKAGE: 1, ORBAX: 1},
        memory=0.0,
        targets=(
            at_most("bytes read / needed", over_read, 1.0),
            at_most("bytes from read calls / needed", over_read_calls, 1.02),
        ),
    ),
    "processes-inner": Scenario(
        "8 processes, last dimension, runs of 4 KiB",
        "wide",
        {"layout": "inner", "devices": 8, "processes": 8},
        loaders=(PACKAGE, ORBAX),
        rounds={PACKAGE: 1, ORBAX: 1},
        memory=0.0,
        targets=(
            at_most("bytes read / needed", over_read, 1.1),
            at_most("bytes from read calls / needed", over_read_calls, 1.12),
        ),
    ),
}


def make_checkpoints(directory: Path, quick: bool) -> None:
    """Writes what is not there yet."""
    small: dict[str, int] = {"layers": 2, "hidden": 1024, "feed_forward": 4096, "vocabulary": 16_384}
    checkpoints.write(directory / "llama", checkpoints.llama(**small if quick else {}), files=4)
    checkpoints.write_aligned(directory / "llama-aligned", directory / "llama")
    checkpoints.write(directory / "wide", checkpoints.wide(rows=128 if quick else 2048), files=2)
    checkpoints.write(directory / "many", checkpoints.many(tensors=2000 if quick else 200_000), files=1)


def measure(scenario: Scenario, loader: str, directory: Path, first: bool) -> list[dict[str, Any]]:
    """One run: what each of its processes measured. Raises RuntimeError where one fails or takes too long.

    Sampling takes a little time, so only the first run has it; the median does not see it.
    """
    path = directory / scenario.checkpoint
    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    job = {"loader": loader, "directory": os.fspath(path), **scenario.job, **scenario.instead.get(loader, {})}
    if job.get("subset"):
        nbytes = min(path.glob("*.safetensors")).stat().st_size
    job["pretouch_bytes"] = int(scenario.memory * nbytes)
    processes = job.get("processes", 1)
    if processes > 1:
        job["coordinator"] = f"localhost:{_free_port()}"
    job["check"] = first or not scenario.slow_check
    with ThreadPoolExecutor(processes) as pool:
        results = pool.map(lambda process: _process({**job, "process": process}, first), range(processes))
        return [result for result in results if result is not None]


def _process(job: dict[str, Any], sample: bool) -> dict[str, Any] | None:
    command = [sys.executable, os.fspath(Path(__file__).with_name("loaders.py")), json.dumps(job)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        samples: list[tuple[float, int]] = []
        sampler = threading.Thread(target=_sample, args=(process, samples))
        if sample:
            sampler.start()
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError(f"took more than {TIMEOUT_SECONDS} s") from None
        finally:
            if sample:
                sampler.join()
        if process.returncode:
            errors.seek(0)
            raise RuntimeError("failed:\n" + errors.read()[-2000:])
    result: dict[str, Any] | None = json.loads(output.splitlines()[-1])
    if result is None:
        return None
    within = [nbytes for at, nbytes in samples if result["began"] <= at <= result["ended"]]
    if within:
        result["peak_anonymous_bytes"] = max(within) - result["anonymous_before"]
    return result


def _sample(process: subprocess.Popen[str], samples: list[tuple[float, int]]) -> None:
    """Anonymous memory of a running process, every now and then. The kernel keeps a peak of the total only."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        try:
            kinds = dict(line.split(":", 1) for line in status.read_text().splitlines())
            anonymous = sum(int(kinds[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssShmem"))
        except (OSError, KeyError):  # it is just ending
            return
        samples.append((time.monotonic(), anonymous))
        time.sleep(SAMPLE_SECONDS)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def run(scenario: Scenario, directory: Path, rounds: int, console: Console) -> Runs:
    """All runs of a scenario, by loader; a loader that fails has none."""
    loaders = [
        loader
        for loader in scenario.loaders
        if all(importlib.util.find_spec(module) for module in NEEDS.get(loader, ()))
    ]
    runs: Runs = {loader: [] for loader in loaders}
    failed: set[str] = set()
    for number in range(rounds):
        for loader in loaders:
            if loader in failed or number >= scenario.rounds.get(loader, rounds):
                continue
            try:
                runs[loader] += measure(scenario, loader, directory, first=number == 0)
            except RuntimeError as error:
                failed.add(loader)
                console.print(f"{scenario.title}: {loader} {error}", style="red", markup=False)
    return runs


def show(scenario: Scenario, runs: Runs, console: Console) -> None:
    """The table of a scenario."""
    table = Table(title=scenario.title)
    columns = (
        "loader",
        "median s",
        "GB/s",
        "of copy limit",
        "of read limit",
        "time / package",
        "CPU s",
        "peak",
        "anonymous",
        "read / needed",
        "runs",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "loader" else "right")
    base = ALIAS if ALIAS in runs else PACKAGE
    for loader, own in runs.items():
        if not own:
            table.add_row(loader, "failed")
            continue
        took = seconds(runs, loader)
        needed = own[0]["needed_bytes"] or runs[PACKAGE][0]["needed_bytes"]
        anonymous = [run["peak_anonymous_bytes"] for run in own if "peak_anonymous_bytes" in run]
        table.add_row(
            loader,
            f"{took:.3f}",
            f"{own[0]['loaded_bytes'] / took / 1e9:.2f}",
            *(f"{seconds(runs, limit) / took:.2f}" if limit in runs else "" for limit in (LIMIT, READ_LIMIT)),
            f"{took / seconds(runs, base):.2f}",
            f"{statistics.median(run['cpu_seconds'] for run in own):.2f}",
            f"{max(run['peak_bytes'] for run in own) / needed:.2f}",
            f"{max(anonymous) / needed:.2f}" if anonymous else "",
            f"{max(run['read_bytes'] for run in own) / needed:.3f}",
            str(len(own)),
        )
    console.print(table)


def versions() -> dict[str, str]:
    """Where and with what this was measured."""
    names = ("jax", "orbax-checkpoint", "safetensors", "torch", "fastsafetensors", "instanttensor", "numpy")
    names += ("obstore", "tensorstore", "fsspec", "aiohttp")
    found = {name: metadata.version(name) for name in names if importlib.util.find_spec(name.split("-")[0])}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {memory / 2**30:.0f} GiB, Linux {platform.release()}",
        "python": platform.python_version(),
        **found,
    }


def main() -> int:
    return measure_all(SCENARIOS, make_checkpoints, __doc__ or "")


def measure_all(
    scenarios: dict[str, Scenario],
    make: Callable[[Path, bool], None],
    description: str,
) -> int:
    """What the command line asks for. Returns 1 where this package failed, else 0."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoints.add_directory(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of 0.1 GB: shows that everything runs")
    parser.add_argument("--only", nargs="+", choices=scenarios, default=list(scenarios), metavar="SCENARIO")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    args = parser.parse_args()
    console = Console(width=140)
    directory = args.directory / ("orbax-safetensors-bench-quick" if args.quick else "orbax-safetensors-bench")
    make(directory, args.quick)
    report: dict[str, Any] = {"versions": versions(), "scenarios": {}}
    console.print(report["versions"])
    broken = False
    for name in args.only:
        scenario = scenarios[name]
        runs = run(scenario, directory, 1 if args.quick else args.rounds, console)
        show(scenario, runs, console)
        broken = broken or not all(runs[loader] for loader in (PACKAGE, ALIAS) if loader in runs)
        targets = []
        # The targets are for checkpoints that take longer than starting up.
        for target in scenario.targets if not (broken or args.quick) else ():
            value = target.figure(runs)
            targets.append({"target": target.text, "found": value, "met": target.met(value)})
            console.print(f"  {'met    ' if target.met(value) else 'NOT MET'} {target.text}: {value:.3f}", markup=False)
        report["scenarios"][name] = {"scenario": scenario.title, "runs": runs, "targets": targets}
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
