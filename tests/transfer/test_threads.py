"""`run_tasks`: threads that take tasks in turn, and stop together."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import SimpleNamespace

import pytest

from orbax_safetensors.transfer import threads
from orbax_safetensors.transfer.threads import run_tasks, working
from tests.support import hang


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())  # threads that other tests have left, and which may end meanwhile
    yield
    assert before.issuperset(threading.enumerate())


def no_cancel():
    raise AssertionError("nothing has failed")


@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_task_runs_once(count):
    done = []
    run_tasks((partial(done.append, number) for number in range(100)), count, no_cancel)
    assert sorted(done) == list(range(100))
    assert count > 1 or done == sorted(done)


def test_a_failure_cancels_what_goes_on_and_no_task_begins():
    waiting, cancelled, begun = threading.Event(), threading.Event(), []

    def wait_long():
        waiting.set()
        assert cancelled.wait(hang.SECONDS)
        raise OSError("cancelled")

    def fail():
        assert waiting.wait(hang.SECONDS)
        raise ValueError("the first failure")

    with pytest.raises(ValueError, match="the first failure"):
        run_tasks(iter([wait_long, fail, *[partial(begun.append, number) for number in range(9)]]), 2, cancelled.set)
    assert begun == []
    assert cancelled.is_set()


@pytest.mark.parametrize("handled", [False, True])
def test_an_interrupt_is_raised_as_one(monkeypatch, handled):
    """Not as the error that it can become in Python's library; an error after it stays one."""

    def interrupted(*_):
        if handled:
            raise RuntimeError("release unlocked lock")
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    monkeypatch.setattr(threads, "wait", interrupted)
    with pytest.raises(RuntimeError if handled else KeyboardInterrupt):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            run_tasks(iter(()), 1, lambda: None)


def test_tasks_that_cannot_be_made_are_a_failure():
    done, cancelled = [], threading.Event()

    def tasks():
        yield partial(done.append, 1)
        raise ValueError("no second task")

    with pytest.raises(ValueError, match="no second task"):
        run_tasks(tasks(), 2, cancelled.set)
    assert done == [1]
    assert cancelled.is_set()


def test_an_interrupt_waits_for_what_goes_on(monkeypatch):
    begun, cancelled, ended = threading.Event(), threading.Event(), []

    def task():
        begun.set()
        assert cancelled.wait(hang.SECONDS)
        ended.append(True)

    def interrupted(futures, timeout=None):
        assert begun.wait(hang.SECONDS)
        wait(futures, 0)
        raise KeyboardInterrupt

    monkeypatch.setattr("orbax_safetensors.transfer.threads.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_tasks(iter([task, task]), 1, cancelled.set)
    assert ended == [True]


def test_a_report_that_raises_ends_all_and_leaves_nothing_behind(monkeypatch):
    class Memory:
        pass

    cancelled, memory = threading.Event(), Memory()
    left = weakref.ref(memory)

    def task(memory):
        assert cancelled.wait(hang.SECONDS)

    def report():
        raise ValueError("no report")

    monkeypatch.setattr("orbax_safetensors.transfer.threads.SECONDS", 0)
    said = ""
    gc.disable()
    try:
        try:
            run_tasks(iter([partial(task, memory)]), 1, cancelled.set, report)
        except ValueError as error:  # which `pytest.raises` would keep, and with it all that its traceback holds
            said = str(error)
        assert said == "no report"
        del memory
        assert left() is None
    finally:
        gc.enable()


def test_the_first_failure_is_raised_though_a_report_fails_as_well(monkeypatch):
    failed = threading.Event()

    def fail():
        raise ValueError("the first failure")

    def report():
        assert failed.wait(hang.SECONDS)
        raise OSError("no report")

    monkeypatch.setattr("orbax_safetensors.transfer.threads.SECONDS", 0)
    monkeypatch.setattr("orbax_safetensors.transfer.threads.wait", lambda *_: SimpleNamespace(not_done=[1]))
    with pytest.raises(ValueError, match="the first failure"):
        run_tasks(iter([fail]), 1, failed.set, report)


def test_a_thread_that_an_interrupt_has_left_behind_begins_no_task(monkeypatch, young):
    begun, go_on = threading.Event(), threading.Event()
    late, workers, submit = [], [], ThreadPoolExecutor.submit

    def tasks():
        yield lambda: (begun.set(), go_on.wait(hang.SECONDS))
        yield lambda: late.append(1)

    def interrupted(seconds):
        begun.wait(hang.SECONDS)
        raise KeyboardInterrupt

    # As a thread that the executor does not know, as it was interrupted when it started it.
    monkeypatch.setattr(ThreadPoolExecutor, "__exit__", lambda *_: None)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *args: workers.append(submit(*args)) or workers[-1])
    with pytest.raises(KeyboardInterrupt), working(tasks(), 1, lambda: None):
        interrupted(1)
    go_on.set()
    assert not wait(workers, hang.SECONDS).not_done
    assert not late
    executor_threads = [thread for thread in threading.enumerate() if thread.name.startswith("safetensors")]
    gc.collect(0)  # the executor tells its threads to end
    for thread in executor_threads:
        thread.join(hang.SECONDS)
