"""What needs threads does with fewer if the system starts no more, and without any says what is the matter."""

import asyncio
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait

import jax.numpy as jnp
import pytest

import orbax_safetensors as ost
from orbax_safetensors.storage import event_loop
from orbax_safetensors.storage.threads import Threads, start
from orbax_safetensors.streaming.comparison import compare
from orbax_safetensors.streaming.open_source import open_source
from orbax_safetensors.transfer.threads import run_tasks
from tests.support import hang

TREE = {f"w{number}": jnp.full((40, 50), number, jnp.float32) for number in range(8)}
REFUSED = "the system starts no more threads for this process"


def start_only(monkeypatch, number):
    """Let the system refuse a thread while `number` of those since then are running, as a container's limit does."""
    start_thread, running = threading.Thread.start, []

    def limited(thread):
        running[:] = [other for other in running if other.is_alive()]
        if len(running) >= number:
            raise RuntimeError("can't start new thread")
        start_thread(thread)
        running.append(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.mark.parametrize("number", [1, 3])
def test_a_pool_goes_on_with_fewer(monkeypatch, number):
    with monkeypatch.context() as patched, Threads(8) as pool:
        start_only(patched, number)
        assert list(pool.map(lambda value: value + 1, range(20))) == list(range(1, 21))
        assert isinstance(pool.submit(int, "no number").exception(), ValueError)
    done = []
    with monkeypatch.context() as patched:
        start_only(patched, number)
        run_tasks((lambda value=value: done.append(value) for value in range(20)), 8, lambda: None)
    assert sorted(done) == list(range(20))


def test_a_pool_is_pythons_besides():
    """A failed task keeps no memory, not even until a collection of garbage; what is cancelled is so for its caller."""
    assert "_adjust_thread_count" in vars(ThreadPoolExecutor), "`Threads` overrides it"
    held, begun, may_end = [], threading.Event(), threading.Event()

    def fail():
        array = jnp.ones(4)
        held.append(weakref.ref(array))
        raise ValueError("wrong")

    def blocked():
        begun.set()
        assert may_end.wait(hang.SECONDS)

    with Threads(1) as pool:
        wait([pool.submit(fail)])
        pool.submit(blocked)
        assert begun.wait(hang.SECONDS)
        waiting = pool.submit(print)
        pool.shutdown(wait=False, cancel_futures=True)
        may_end.set()
    assert held[0]() is None
    assert waiting.cancelled()


def test_without_any_thread_there_is_a_reason(monkeypatch):
    start_only(monkeypatch, 0)
    for call in (
        lambda: Threads(2).submit(print),
        lambda: start(print, "name"),
        lambda: run_tasks(iter([print]), 2, lambda: None),
    ):
        with pytest.raises(ost.StorageError, match=REFUSED):
            call()
    with Threads(1) as pool:
        pool.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(print)


def test_jobs_go_on_with_fewer_or_say_why_not(monkeypatch, tmp_path):
    """Orbax itself needs some for a save."""
    ost.save(tmp_path / "from", TREE)
    jobs = {
        "load": lambda: ost.load(tmp_path / "from"),
        "save": lambda: ost.save(tmp_path / "again", TREE),
        "convert": lambda: ost.convert(tmp_path / "from", tmp_path / "orbax", to="orbax"),
        "verify": lambda: ost.verify(tmp_path / "from", data=True),
        "compare": lambda: compare(*(open_source(tmp_path / "from", 2**20) for _ in range(2)), 2**20),
    }
    for name, job in jobs.items():
        for threads in range(10):
            with monkeypatch.context() as patched:
                start_only(patched, threads)
                try:
                    job()
                    break
                except ost.StorageError as error:
                    refusal = str(error)
        assert 0 < threads < 9, name
        assert REFUSED in refusal


def test_a_loop_without_a_thread_is_not_kept(monkeypatch):
    """Or every later request would wait for it."""
    monkeypatch.setattr(event_loop, "_loops", {})
    with monkeypatch.context() as patched, pytest.raises(ost.StorageError, match=REFUSED):
        start_only(patched, 0)
        event_loop.Requests().run("it", asyncio.sleep(0))
    assert not event_loop._loops


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("http://127.0.0.1:1/model.safetensors?Signature=SECRET", {}),
        ("hf://owner/name", {"endpoint": "http://127.0.0.1:1", "token": False}),
        ("memory://models/model.safetensors", {}),
    ],
)
def test_a_request_without_a_thread_is_no_answer(monkeypatch, url, more):
    """Of no server, and not made again."""
    event_loop.Requests().run("it", asyncio.sleep(0))  # starts the loop's own thread
    attempts = []
    monkeypatch.setattr(event_loop, "start", lambda *args: attempts.append(args) or start(*args))
    start_only(monkeypatch, 0)
    with pytest.raises(ost.StorageError, match=f"^{REFUSED}"):
        ost.open_checkpoint(url, options=ost.SafetensorsOptions(storage_options=more))
    assert len(attempts) == 1
