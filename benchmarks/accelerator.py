"""Restoring onto accelerators: this package beside a loop that maps the files, and beside other loaders.

    python benchmarks/accelerator.py [--quick] [--rounds 5] [--directory DIR] [--json FILE] [--only SCENARIO ...]

It takes the accelerators that JAX finds, at most eight; without one it emulates them (`emulation.py`). Measured as in
`restore.py`: fresh processes in turn. What is transferred to an emulated device is compared with the `safetensors`
package in a process of its own, off the clock. `README.md` says what the columns mean.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import families
from restore import (
    CUDA,
    DIRECT,
    DIRECT_LIMIT,
    FAST,
    INSTANT,
    NUMPY,
    ORBAX,
    PACKAGE,
    RUNAI,
    TORCH,
    Runs,
    Scenario,
    Target,
    at_least,
    at_most,
    faster_than,
    measure_all,
    seconds,
)
from rich.console import Console
from rich.table import Table

MAPPING, TURNED, PINNED_LIMIT = "mapping loop", "mapping loop, transposed", "pinned limit"
MATERIALISED = "NumPy, then shards"
LOADERS = (MAPPING, PACKAGE, TORCH, FAST, RUNAI, NUMPY, ORBAX)
COLD = (DIRECT_LIMIT, MAPPING, PACKAGE, DIRECT, TORCH, FAST, RUNAI, NUMPY)
IN_FLIGHT_BYTES = 2 * 2**30  # the default of `SafetensorsOptions`


def make_checkpoints(directory: Path, quick: bool) -> None:
    """Writes what is not there yet."""
    families.make_checkpoints(directory, quick, ("llama", "deepseek-fp8"))
    # Half of the layers of Llama 3.1 8B.
    shape = {"layers": 2, "hidden": 1024, "feed_forward": 3584, "vocabulary": 4096}
    large = checkpoints.llama(**shape if quick else {"hidden": 4096, "feed_forward": 14_336})
    checkpoints.write(directory / "large", large, files=8)


def cpu_for_a_gigabyte(runs: Runs) -> float:
    """Processor seconds of all threads, those of the emulated transfers included."""
    return statistics.median(run["cpu_seconds"] / run["loaded_bytes"] * 1e9 for run in runs[PACKAGE])


def anonymous_above_the_budget(runs: Runs) -> float:
    """In MB."""
    peaks = [run["peak_anonymous_bytes"] for run in runs[PACKAGE] if "peak_anonymous_bytes" in run]
    return (max(peaks) - IN_FLIGHT_BYTES) / 1e6


def of_the_mapping_loop(bound: float) -> Target:
    return at_least("of the mapping loop", faster_than(MAPPING), bound)


CPU = at_most("CPU seconds for a gigabyte", cpu_for_a_gigabyte, 0.12)
PINNED = at_least("of the pinned limit", faster_than(PINNED_LIMIT), 0.8)


def scenarios(device: str) -> dict[str, Scenario]:
    """What is measured on a `device` of `loaders.Job`."""
    limit = (PINNED_LIMIT,) if device == "real" else ()
    onto_cuda = (CUDA, INSTANT) if device == "real" else ()  # which know one device
    of_the_limit = (PINNED,) if device == "real" else ()

    def scenario(title: str, layout: str, devices: int = 8, checkpoint: str = "llama", **more: Any) -> Scenario:
        job = {"layout": layout, "devices": devices, "device": device, **more.pop("job", {})}
        common = {"loaders": (*LOADERS, *limit), "slow_check": True}
        return Scenario(title, checkpoint, job, **{**common, **more})

    return {
        "whole": scenario(
            "whole, 1 device",
            "leading",
            1,
            loaders=(*LOADERS, *limit, *onto_cuda),
            targets=(of_the_mapping_loop(0.8), CPU, *of_the_limit),
        ),
        "leading": scenario(
            "leading dimension, 8 devices", "leading", targets=(of_the_mapping_loop(0.8), CPU, *of_the_limit)
        ),
        "inner": scenario(
            "last dimension, 8 devices", "inner", rounds={ORBAX: 1}, targets=(of_the_mapping_loop(0.85),)
        ),
        "replicated": scenario("replicated on 8 devices, first file", "replicated", job={"subset": True}),
        "both": scenario("both dimensions, 2 x 4 devices", "both", loaders=LOADERS[:-1]),
        "maxtext": scenario(
            "MaxText's scanned tree, width over 8 devices",
            "width",
            job={"family": "maxtext.llama3"},
            loaders=(TURNED, PACKAGE, MATERIALISED),
            instead={TURNED: {"family": ""}},  # the same shards of the stored tensors
            rounds={MATERIALISED: 1},
            memory=3.0,
            targets=(at_least("of the transposed mapping loop", faster_than(TURNED), 2.4),),
        ),
        "fp8": scenario(
            "MaxText's tree of DeepSeek-V3, fp8 to bf16, experts over 8 devices",
            "experts",
            checkpoint="deepseek-fp8",
            job={"family": "maxtext.deepseek3"},
            loaders=(MATERIALISED, PACKAGE),
            rounds={MATERIALISED: 1},
            memory=6.0,
        ),
        "cold": scenario(
            "whole, 1 device, nothing in the page cache",
            "leading",
            1,
            job={"cold": True},
            loaders=COLD,
            targets=(at_least("of the direct limit", faster_than(DIRECT_LIMIT), 0.9),),
        ),
        "memory": scenario(
            "8 GB, leading dimension, 8 devices",
            "leading",
            checkpoint="large",
            loaders=(MAPPING, PACKAGE),
            memory=0.4,
            targets=(at_most("MB of anonymous memory above in_flight_bytes", anonymous_above_the_budget, 100),),
        ),
        "large": scenario(
            "8 GB, whole, 1 device",
            "leading",
            1,
            checkpoint="large",
            loaders=(MAPPING, PACKAGE, TORCH, *limit, *onto_cuda),
            memory=0.4,
            targets=of_the_limit,
        ),
    }


def show(scenario: Scenario, runs: Runs, console: Console) -> None:
    """The table of a scenario."""
    base = next(iter(runs))
    table = Table(title=scenario.title)
    columns = (
        "loader",
        "median s",
        "GB/s",
        f"of the {base}",
        "CPU s/GB",
        "anonymous MB",
        "device MB",
        "again s",
        "runs",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "loader" else "right")
    for loader, own in runs.items():
        if not own:
            table.add_row(loader, "failed")
            continue
        took, nbytes = seconds(runs, loader), own[0]["loaded_bytes"]
        anonymous = [run["peak_anonymous_bytes"] for run in own if "peak_anonymous_bytes" in run]
        of_device = [run["device_peak_bytes"] for run in own if "device_peak_bytes" in run]
        again = [run["again_seconds"] for run in own if "again_seconds" in run]
        table.add_row(
            loader,
            f"{took:.3f}",
            f"{nbytes / took / 1e9:.2f}",
            f"{seconds(runs, base) / took:.2f}",
            f"{statistics.median(run['cpu_seconds'] for run in own) / nbytes * 1e9:.3f}",
            *(f"{max(peaks) / 1e6:.0f}" if peaks else "" for peaks in (anonymous, of_device)),
            f"{statistics.median(again):.3f}" if again else "",
            str(len(own)),
        )
    console.print(table)


def device_at_hand() -> str:
    """Which `device` of a job is meant. Another process looks, because the device's memory would stay taken here."""
    program = "import jax; print(jax.devices()[0].platform)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return "emulated" if done.stdout.split() == ["cpu"] else "real"


def main() -> int:
    return measure_all(scenarios(device_at_hand()), make_checkpoints, __doc__ or "", show)


if __name__ == "__main__":
    sys.exit(main())
