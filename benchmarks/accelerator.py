"""Restoring onto an accelerator: this package beside a loop that maps the files, and beside other loaders.

    python benchmarks/accelerator.py [--quick] [--rounds 5] [--directory DIR] [--json FILE] [--only SCENARIO ...]
"""

from __future__ import annotations

import sys
from typing import Any

from restore import FAST, NUMPY, ORBAX, PACKAGE, RUNAI, TORCH, Scenario, measure_all
from families import make_checkpoints

MAPPING = "mapping loop"
LOADERS = (MAPPING, PACKAGE)


def scenario(title: str, layout: str, devices: int, **more: Any) -> Scenario:
    job = {"layout": layout, "devices": devices, "accelerator": True, **more.pop("job", {})}
    return Scenario(title, "llama", job, **{"loaders": LOADERS, "slow_check": True, **more})


SCENARIOS = {
    "whole": scenario("whole, 1 device", "leading", 1),
    "leading": scenario("leading dimension, 8 devices", "leading", 8),
    "inner": scenario("last dimension, 8 devices", "inner", 8),
}


def main() -> int:
    return measure_all(SCENARIOS, make_checkpoints, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
