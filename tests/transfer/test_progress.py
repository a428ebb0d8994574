"""Progress that grows from 0 to all bytes, seldom."""

import pytest

from orbax_safetensors.transfer import progress
from orbax_safetensors.transfer.progress import Meter


@pytest.fixture
def told(monkeypatch):
    """What is told if there is no pause between calls."""
    monkeypatch.setattr(progress, "SECONDS", 0)
    return []


def meter(told, total):
    return Meter(lambda *now: told.append(now), total)


def test_parts_add_up(told):
    counted = meter(told, 100)
    counted.begin(60)
    counted.moved(0.5)
    counted.begin(40)
    counted.moved(0.25)
    counted.end()
    assert told == [(0, 100), (30, 100), (60, 100), (70, 100), (100, 100)]


def test_it_never_falls_and_is_complete_only_in_the_end(told):
    counted = meter(told, 100)
    counted.begin(100)
    for share in (0.5, 0.4, 0.5, 1, 1.5):
        counted.moved(share)
    assert told == [(0, 100), (50, 100)]
    counted.end()
    assert told[-1] == (100, 100)


def test_nothing_to_move_is_told_once(told):
    meter(told, 0).end()
    assert told == [(0, 0)]


def test_what_came_from_elsewhere_has_both_calls(told):
    meter(told, 8).end()
    assert told == [(0, 8), (8, 8)]


def test_calls_are_seldom(monkeypatch):
    told, now = [], [0]
    monkeypatch.setattr(progress, "SECONDS", 100)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    counted = meter(told, 1000)
    counted.begin(1000)
    for now[0] in range(1, 1000):
        counted.moved(now[0] / 1000)
    counted.end()
    assert [done for done, _ in told] == list(range(0, 1001, 100))
