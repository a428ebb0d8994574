"""What a test finds open at its end counts only if the test has opened it."""

import os
import threading

import pytest

from tests.support.files import nothing_left


def start(name):
    """A thread, and what ends it."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name=name, daemon=True)
    thread.start()
    return thread, end


def test_what_other_tests_left_may_end_or_begin(tmp_path):
    left = [start("safetensors_0"), start("server")]
    elsewhere = os.open(os.devnull, os.O_RDONLY)
    with nothing_left(tmp_path):
        for thread, end in left:
            end.set()
            thread.join()
        os.close(elsewhere)
        thread, end = start("request")
    end.set()
    thread.join()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr("tests.support.hang.SECONDS", 0.0)


def test_a_thread_that_a_test_leaves_is_noticed(tmp_path):
    with pytest.raises(AssertionError), nothing_left(tmp_path):
        thread, end = start("safetensors_0")
    end.set()
    thread.join()


def test_a_file_that_a_test_leaves_is_noticed(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(AssertionError), nothing_left(tmp_path):
        left = os.open(tmp_path / "x", os.O_RDONLY)
    os.close(left)
