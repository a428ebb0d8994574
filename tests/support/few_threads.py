"""A system that has only so many threads at once."""

import threading

import pytest


def start_only(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the system refuse a thread while `number` of those since then are running, as a container's limit does."""
    start, running = threading.Thread.start, []

    def limited(thread):
        running[:] = [other for other in running if other.is_alive()]
        if len(running) >= number:
            raise RuntimeError("can't start new thread")
        start(thread)
        running.append(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
