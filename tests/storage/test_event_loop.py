"""The loop of all remote requests, when the program ends."""

import asyncio
import threading
from types import SimpleNamespace

from orbax_safetensors.storage import event_loop
from tests.support import hang


def test_an_ending_program_waits_for_a_thread_that_gives_an_answer(monkeypatch):
    """Such a thread uses the loop, whose own thread has ended by then."""
    registered = []
    monkeypatch.setattr(event_loop, "_loops", {})
    monkeypatch.setattr(event_loop, "_stopping", set())
    monkeypatch.setattr(event_loop, "atexit", SimpleNamespace(register=lambda *args: registered.append(args)))
    event_loop.Requests().run("it", asyncio.sleep(0))
    ((stop, loop, own_thread),) = registered

    lock, wake = loop.answering, loop._write_to_self
    holds, awaited, answered = threading.Event(), threading.Event(), []

    class Awaited:
        """The lock, which says when the program that ends comes to it."""

        def __enter__(self):
            if holds.is_set():
                awaited.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def slow():
        wake()
        if threading.current_thread() is answering:
            holds.set()
            assert awaited.wait(hang.SECONDS)
            answered.append(lock._is_owned())

    def join():
        own_thread.join()
        answering.start()
        assert holds.wait(hang.SECONDS)

    loop.answering, loop._write_to_self = Awaited(), slow
    answering = threading.Thread(target=loop.call_soon_threadsafe, args=(print,))
    stop(loop, SimpleNamespace(join=join))
    closed_first = not answered
    awaited.set()
    answering.join(hang.SECONDS)
    assert not closed_first
    assert answered == [True]
    assert loop.is_closed()
