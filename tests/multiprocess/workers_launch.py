"""What `test_launch.py` runs in several processes."""

from __future__ import annotations

import time
import warnings
from typing import Any

import jax


def describe(arguments: Any) -> dict[str, Any]:
    return {
        "arguments": arguments,
        "process": jax.process_index(),
        "processes": jax.process_count(),
        "local": jax.local_device_count(),
        "devices": jax.device_count(),
    }


def fail_in_one(arguments: dict[str, int]) -> None:
    if jax.process_index() == arguments["process"]:
        raise RuntimeError("this one fails")
    time.sleep(600)


def never_end(arguments: None) -> None:
    time.sleep(600)


def warn(arguments: None) -> None:
    warnings.warn("look out", stacklevel=1)
