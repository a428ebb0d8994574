"""What `test_launch.py` runs in several processes."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import jax

from tests.support import hang


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
    threading.Event().wait(hang.SECONDS)


def warn(arguments: None) -> None:
    warnings.warn("look out", stacklevel=1)
