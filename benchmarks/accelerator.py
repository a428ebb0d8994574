"""Loading onto one GPU or TPU: this package beside InstantTensor and the card's own limit, within a few minutes.

    python benchmarks/accelerator.py [--minutes 8] [--rounds 2] [--directory DIR] [--json FILE] [--only SCENARIO ...]

Every measurement is a fresh process (`card_loads.py`), which loads several times; loaders take turns, round after
round, and every leaf of every load is checked. What no longer fits into the minutes is left out and named. Without a
card, everything is small, runs once and on an emulated device (`emulation.py`), and only the check counts. `README.md`
says what the columns mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import digests
import families
from restore import Runs, Target, at_most, versions
from rich.console import Console
from rich.table import Table

STORED, CODES, TREE, COPY = "as stored", "codes as stored", "MaxText's tree", "bf16 copy, MaxText's tree"
CACHED = "MaxText's tree, cached"
INSTANT, TORCH, LIMIT = "InstantTensor", "safetensors.torch", "pinned limit"
NEEDS = {INSTANT: ("instanttensor", "torch"), TORCH: ("torch",)}
LOADS = 4  # in each process; the first is a column of its own
IN_FLIGHT_BYTES = 2 * 2**30  # the default of `SafetensorsOptions`
SHARED_MEMORY = Path("/dev/shm")
# All checkpoints of one run, and the buffers that tmpfs does not have to share with them.
SHARED_MEMORY_BYTES = 32e9
# What a process takes, as long as none has run.
PROCESS_SECONDS = 15


@dataclass(frozen=True)
class Load:
    """What one process loads: a `checkpoint` other than the scenario's if it has one, and the tree of a `family`.

    With `cached`, the process finds the programs of another one in `jax_compilation_cache_dir`; otherwise it compiles
    them. A `spare` load is measured once, if all others are done.
    """

    loader: str = "this package"
    family: str = ""
    checkpoint: str = ""
    cached: bool = False
    spare: bool = False

    @property
    def processes(self) -> int:
        return 2 if self.cached else 1

    @property
    def needs_card(self) -> bool:
        return self.loader != "this package" or self.cached


@dataclass(frozen=True)
class Scenario:
    """Loads of one checkpoint, by their names in the table."""

    title: str
    checkpoint: str
    loads: dict[str, Load]
    targets: tuple[Target, ...]


def first(name: str) -> Callable[[Runs], float]:
    """Median seconds of the first load of a process, NaN if there is none."""
    return lambda runs: _median([run["seconds"][0] for run in runs.get(name, [])])


def later(name: str) -> Callable[[Runs], float]:
    """The same of all others."""
    return lambda runs: _median([seconds for run in runs.get(name, []) for seconds in run["seconds"][1:]])


def _median(values: list[float]) -> float:
    return statistics.median(values or [math.nan])


def over(figure: Callable[[Runs], float], other: Callable[[Runs], float]) -> Callable[[Runs], float]:
    return lambda runs: figure(runs) / other(runs)


def host_above_the_budget(runs: Runs) -> float:
    """In MB."""
    return (_median([run["host_bytes"] for run in runs.get(STORED, [])]) - IN_FLIGHT_BYTES) / 1e6


def stored(first_bound: float) -> tuple[Target, ...]:
    return (
        at_most("first load as stored, x of InstantTensor", over(first(STORED), first(INSTANT)), first_bound),
        at_most("later load as stored, x of InstantTensor", over(later(STORED), later(INSTANT)), 1.1),
        at_most("host memory above in_flight_bytes, MB", host_above_the_budget, 100),
    )


IN_TREE = (
    at_most("later load into the tree, x of as stored", over(later(TREE), later(STORED)), 1.25),
    at_most("first load into the tree, s above as stored", lambda runs: first(TREE)(runs) - first(STORED)(runs), 0.3),
)
DECODED = at_most("later load into the tree, x of the codes as stored", over(later(TREE), later(CODES)), 1.5)
FASTER_THAN_COPY = (
    at_most("first load into the tree, x of the bf16 copy", over(first(TREE), first(COPY)), 1),
    at_most("later load into the tree, x of the bf16 copy", over(later(TREE), later(COPY)), 1),
)


def llama(family: str) -> dict[str, Load]:
    return {
        STORED: Load(),
        INSTANT: Load(INSTANT),
        LIMIT: Load(LIMIT),
        TREE: Load(family=family),
        CACHED: Load(family=family, cached=True),
        TORCH: Load(TORCH, spare=True),
    }


def quantised(family: str) -> dict[str, Load]:
    return {CODES: Load(), TREE: Load(family=family), CACHED: Load(family=family, cached=True)}


LLAMA, DEEPSEEK = "maxtext.llama3", "maxtext.deepseek3"
SCENARIOS = {
    "llama": Scenario("Llama, 2.5 GB of bf16", "llama", llama(LLAMA), stored(1.0)),
    "llama-8": Scenario("Llama, 8.0 GB of bf16", "llama-8", llama(LLAMA), (*stored(1.2), *IN_TREE)),
    "fp8": Scenario("DeepSeek-V3, fp8 in blocks of 128 x 128", "deepseek-fp8", quantised(DEEPSEEK), (DECODED,)),
    "int4": Scenario(
        "Llama, 8.0 GB as bf16, int4 in groups of 32",
        "llama-8-int4",
        {**quantised(LLAMA), COPY: Load(family=LLAMA, checkpoint="llama-8")},
        (DECODED, *FASTER_THAN_COPY),
    ),
}


@dataclass
class Budget:
    """The time that is left, and how long processes took. One that does not end in time is killed."""

    deadline: float
    process_seconds: list[float] = field(default_factory=list)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def fits(self, processes: int) -> bool:
        return self.left() > processes * statistics.median(self.process_seconds or [PROCESS_SECONDS])


@dataclass
class Bench:
    """One run of this program: where it writes, what it has measured, and what it left out."""

    directory: Path
    emulated: bool
    budget: Budget
    rounds: int
    console: Console
    runs: dict[str, Runs] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    broken: bool = False

    def measure(self, name: str, scenario: Scenario, following: int) -> None:
        """All rounds of a scenario. From the second on, they leave time for as many processes as are `following`."""
        loads = {label: load for label, load in scenario.loads.items() if self.has(label, load) and not load.spare}
        self.runs[name] = {label: [] for label in loads}
        for checkpoint in {load.checkpoint or scenario.checkpoint for load in loads.values()}:
            if (self.directory / checkpoint).exists():
                checkpoints.warm(self.directory / checkpoint)
        for number in range(self.rounds):
            for label, load in loads.items():
                if not (load.cached and number):  # one is enough
                    self.measure_one(name, scenario, label, load, number, following if number else 0)

    def has(self, label: str, load: Load) -> bool:
        """Whether something can be measured here; says so if a package is missing."""
        if self.emulated:
            return not load.needs_card
        missing = [module for module in NEEDS.get(load.loader, ()) if not importlib.util.find_spec(module)]
        if missing:
            self.console.print(f"skipped: {label}, which needs {', '.join(missing)}")
        return not missing

    def measure_one(
        self, name: str, scenario: Scenario, label: str, load: Load, number: int = 0, following: int = 0
    ) -> None:
        """One run, if there is time for it and for processes that are `following`."""
        what = f"{name}: {label}, round {number + 1}"
        if not self.budget.fits(load.processes + following):
            self.left_out.append(what)
            return
        try:
            self.runs[name][label].append(self.loaded(scenario, load))
        except subprocess.TimeoutExpired:
            self.left_out.append(what)
        except RuntimeError as error:
            self.broken = self.broken or load.loader == "this package"
            self.console.print(f"failed: {what}: {error}", style="red", markup=False)

    def loaded(self, scenario: Scenario, load: Load) -> dict[str, Any]:
        checkpoint = load.checkpoint or scenario.checkpoint
        job = {
            "loader": load.loader,
            "directory": os.fspath(self.directory / checkpoint),
            "family": load.family,
            "expected": os.fspath(self.expected(checkpoint, load.family)),
            "loads": 2 if self.emulated else LOADS,
            "emulated": self.emulated,
        }
        if not load.cached:
            return self.process(job, {"JAX_ENABLE_COMPILATION_CACHE": "false"})
        with tempfile.TemporaryDirectory() as cache:
            # JAX's default would leave out programs that took less than a second.
            settings = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            self.process({**job, "loads": 1}, settings)
            return self.process(job, settings)

    def process(self, job: dict[str, Any], settings: dict[str, str]) -> dict[str, Any]:
        """What a process measured. Raises RuntimeError if it fails, TimeoutExpired if it takes longer than is left."""
        command = [sys.executable, os.fspath(Path(__file__).with_name("card_loads.py")), json.dumps(job)]
        if job["loader"] in NEEDS:
            settings = {**settings, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # or PyTorch would have no memory
        began = time.monotonic()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | settings,
            timeout=None if self.emulated else self.budget.left(),
        )
        self.budget.process_seconds.append(time.monotonic() - began)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def expected(self, checkpoint: str, family: str) -> Path:
        """The file of digests of what is loaded, which is made if it is not there, as is the checkpoint."""
        families.make_checkpoint(self.directory, checkpoint, self.emulated)
        path = self.directory / checkpoint / f"{family or 'stored'}.digests.json"
        if not path.exists():
            path.write_text(json.dumps(digests.expected(self.directory / checkpoint, family)))
        return path

    def measure_spare(self, name: str, scenario: Scenario) -> None:
        """What else there is time for."""
        for label, load in scenario.loads.items():
            if load.spare and self.has(label, load):
                self.runs[name][label] = []
                self.measure_one(name, scenario, label, load)
                if self.runs[name][label]:
                    self.show(scenario, {known: self.runs[name][known] for known in (STORED, label)})

    def show(self, scenario: Scenario, runs: Runs) -> None:
        """The table of a scenario."""
        table = Table(title=scenario.title, caption="Each process compiles its programs, unless they are cached.")
        bases = [name for name in (INSTANT, STORED, CODES) if name in runs]
        ratio_columns = [f"{when}, x of {name}" for name in bases for when in ("first", "later")]
        columns = ["load", "first s", "later s", *ratio_columns, "CPU s/GB, first", "later", "host MB", "device MB"]
        columns += ["processes"]
        for column in columns:
            table.add_column(column, justify="left" if column == "load" else "right")
        for name, own in runs.items():
            if not own:
                table.add_row(name, "not measured")
                continue
            took = first(name)(runs), later(name)(runs)
            ratios = [when(name)(runs) / when(base)(runs) for base in bases for when in (first, later)]
            processor = [[seconds / run["array_bytes"] * 1e9 for seconds in run["cpu_seconds"]] for run in own]
            memory = [_median([run[of] for run in own]) / 1e6 for of in ("host_bytes", "device_bytes")]
            table.add_row(
                name,
                *(f"{value:.3f}" for value in took),
                *("" if math.isnan(ratio) else f"{ratio:.2f}" for ratio in ratios),
                f"{_median([each[0] for each in processor]):.2f}",
                f"{_median([seconds for each in processor for seconds in each[1:]]):.2f}",
                *("" if value < 0 else f"{value:.0f}" for value in memory),
                str(len(own)),
            )
        self.console.print(table)

    def judge(self, scenario: Scenario, runs: Runs) -> list[dict[str, Any]]:
        """Prints the targets and returns them."""
        out = []
        for target in scenario.targets:
            value = target.figure(runs)
            if math.isnan(value):
                self.console.print(f"  not measured: {target.text}", highlight=False)
                continue
            out.append({"target": target.text, "found": value, "met": target.met(value)})
            word = "met" if target.met(value) else "MISSED"
            self.console.print(f"  {word}: {target.text}: {value:.2f}", highlight=False)
        return out


def default_directory() -> Path:
    """Memory if it has room, because making checkpoints counts."""
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > SHARED_MEMORY_BYTES
    return SHARED_MEMORY if has_room else checkpoints.TEMPORARY


def device_at_hand() -> tuple[str, str]:
    """Platform and kind of JAX's first device. Another process looks, because the memory would stay taken here."""
    program = "import jax; device = jax.devices()[0]; print(device.platform, device.device_kind)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    platform, _, kind = done.stdout.strip().partition(" ")
    return platform, kind


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoints.add_directory(parser, default_directory())
    parser.add_argument("--minutes", type=float, default=8, help="all that the program may take (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each load (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    args = parser.parse_args()
    console = Console(width=160)
    platform, kind = device_at_hand()
    emulated = platform == "cpu"
    report: dict[str, Any] = {"versions": {"device": "emulated" if emulated else kind, **versions()}, "scenarios": {}}
    console.print(report["versions"])
    directory = args.directory / ("orbax-safetensors-bench-quick" if emulated else "orbax-safetensors-bench")
    budget = Budget(math.inf if emulated else began + 60 * args.minutes)
    bench = Bench(directory, emulated, budget, 1 if emulated else args.rounds, console)
    try:
        for number, name in enumerate(args.only):
            scenario = SCENARIOS[name]
            others = [load for other in args.only[number + 1 :] for load in SCENARIOS[other].loads.values()]
            bench.measure(name, scenario, sum(load.processes for load in others if not load.spare))
            runs = bench.runs[name]
            report["scenarios"][name] = {"title": scenario.title, "runs": runs}
            if emulated:
                console.print(f"{scenario.title}, small: {sum(map(len, runs.values()))} of {len(runs)} loads are right")
                continue
            bench.show(scenario, runs)
            report["scenarios"][name]["targets"] = bench.judge(scenario, runs)
        for name in args.only if not emulated else ():
            bench.measure_spare(name, SCENARIOS[name])
    finally:
        if directory.is_relative_to(SHARED_MEMORY):
            shutil.rmtree(directory, ignore_errors=True)
    for what in bench.left_out:
        console.print(f"left out for lack of time: {what}", highlight=False)
    report["left_out"] = bench.left_out
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return int(bench.broken)


if __name__ == "__main__":
    sys.exit(main())
