"""Tests with the mark `both_devices` run twice: with the CPU devices that there are, and with emulated accelerators.

With `both_devices(fast="cpu")`, the fast tier has the first only: accelerators compile a program for each layout.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.accelerator import Accelerator, accelerator


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "both_devices: runs with CPU devices, and with emulated accelerators")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if mark := metafunc.definition.get_closest_marker("both_devices"):
        in_fast = mark.kwargs.get("fast", "both") == "both"
        accelerated = pytest.param("accelerator", marks=() if in_fast else pytest.mark.cross)
        metafunc.parametrize("device", ["cpu", accelerated], indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[Accelerator | None]:
    """The emulated accelerator of this run of a test, None if its devices are CPUs."""
    if getattr(request, "param", "cpu") == "cpu":
        yield None
    else:
        with accelerator() as emulated:
            yield emulated
