"""Which tests are slow, and why: the marks in `MARKS`.

    python -m pytest            the fast tier: what has none of the marks
    python -m pytest -m ''      everything
    python -m pytest PATH...    everything in these files and folders

Folders and fixtures give the marks. A test that starts a Python process or listens to a port itself is marked by hand;
without its mark the audit hook stops it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.roots import ROOT

MARKS = {
    "process": "starts Python processes",
    "server": "needs a server on this machine",
    "full_size": "takes as many tensors as the largest models have",
    "cross": "is of a cross of parameters that other cases cover",
    "memory": "traces memory, which slows down all that runs",
}
_FOLDERS = {"multiprocess": "process", "servers": "server"}
_FIXTURES = {
    **dict.fromkeys(("azure", "gcs", "hub", "moto", "orbax_gcs", "s3", "server", "web"), "server"),
    **dict.fromkeys(("by_stock_orbax", "forks"), "process"),
}
only_fast = False
_running: pytest.Item | None = None


def cross(cases: Iterable[Any], cover: Collection[Any]) -> list[Any]:
    """Parameters for all of `cases`; the fast tier has those that are in `cover`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in cover else pytest.mark.cross)
        for case in cases
    ]


def pytest_configure(config: pytest.Config) -> None:
    for mark, reason in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {reason}")
    global only_fast
    by_default = config.option.markexpr in config.getini("addopts")
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    # A worker of xdist cannot tell by itself: it is always given names.
    only_fast = getattr(config, "workerinput", {}).get("only_fast", by_default and not named)
    if by_default and not only_fast:
        config.option.markexpr = ""
    # Shared machines stall for longer than any deadline.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("all", deadline=None, suppress_health_check=slow, print_blob=True)
    hypothesis.settings.register_profile("fast", hypothesis.settings.get_profile("all"), max_examples=20)
    hypothesis.settings.load_profile("fast" if only_fast else "all")


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput["only_fast"] = only_fast


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        # What a parameter names is there by `request.getfixturevalue`.
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        fixtures = [*getattr(item, "fixturenames", ()), *(name for name in parameters if isinstance(name, str))]
        for mark in {_FOLDERS.get(folder), *map(_FIXTURES.get, fixtures)} - {None}:
            item.add_marker(mark)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _running
    _running = item
    try:
        return (yield)
    finally:
        _running = None


def _is_slow(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an audit event is the start of a Python process or of a server."""
    if event == "subprocess.Popen":
        return Path(os.fsdecode(arguments[0])) == Path(sys.executable)
    return event in ("os.fork", "socket.bind")


def _stop_unmarked(event: str, arguments: tuple[Any, ...]) -> None:
    if _running and _is_slow(event, arguments) and not any(map(_running.get_closest_marker, ("process", "server"))):
        raise RuntimeError(f"{_running.nodeid}: {event}: the test takes the mark 'process' or 'server'")


sys.addaudithook(_stop_unmarked)
