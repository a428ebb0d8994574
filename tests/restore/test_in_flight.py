"""Memory in flight: bounded, used again in the order of arrival, and never before a device is done with it."""

import threading
from concurrent.futures import CancelledError

import pytest

from orbax_safetensors.restore.batches import Batch
from orbax_safetensors.restore.in_flight import InFlight
from tests.support import hang


class Sent:
    """An array on its way, which arrives when the test says so."""

    def __init__(self):
        self.arrived = threading.Event()
        self.waited = threading.Event()
        self.error = None

    def is_ready(self):
        return self.arrived.is_set()

    def block_until_ready(self):
        self.waited.set()
        assert self.arrived.wait(hang.SECONDS)
        if self.error is not None:
            raise self.error
        return self


def of(nbytes):
    batch = Batch([], leaves_host=True)
    batch.nbytes = nbytes
    return batch


def taken(in_flight, nbytes, sizes=()):
    batch = of(nbytes)
    assert [buffer.nbytes for buffer in in_flight.take(batch, sizes)] == list(sizes)
    return batch


def send(in_flight, batch, array):
    batch.sent.append(array)
    in_flight.send(batch)


def in_thread(function, *arguments):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments)), daemon=True)
    thread.start()
    return thread, results


def test_who_takes_memory_waits_for_what_was_sent_first():
    in_flight = InFlight(100, 100, 100)
    first, second = taken(in_flight, 60, [60]), taken(in_flight, 40, [40])
    sent = Sent(), Sent()
    send(in_flight, first, sent[0])
    send(in_flight, second, sent[1])
    thread, results = in_thread(taken, in_flight, 50, [50])
    assert sent[0].waited.wait(hang.SECONDS)
    sent[1].arrived.set()
    assert not results
    sent[0].arrived.set()
    thread.join(hang.SECONDS)
    assert len(results) == 1
    assert in_flight.arrived == 100


def test_who_takes_memory_waits_for_what_is_not_sent_yet():
    in_flight = InFlight(100, 100, 100)
    batch = taken(in_flight, 80, [80])
    thread, results = in_thread(taken, in_flight, 50, [50])
    assert not results
    sent = Sent()
    sent.arrived.set()
    send(in_flight, batch, sent)
    thread.join(hang.SECONDS)
    assert len(results) == 1


def test_memory_is_free_only_once_it_has_arrived():
    in_flight = InFlight(2**20, 2**20, 2**20)
    batch, sent = of(10), Sent()
    (first,) = in_flight.take(batch, [10])
    send(in_flight, batch, sent)
    (second,) = in_flight.take(of(10), [10])
    assert second.ctypes.data != first.ctypes.data
    sent.arrived.set()
    (third,) = in_flight.take(of(10), [10])
    assert third.ctypes.data == first.ctypes.data


@pytest.mark.parametrize(
    ("held", "wanted"),
    [((1000, [1000]), (1, [1])), ((100,), (1,))],
    ids=["more than the limit goes alone", "bytes without memory of ours count as well"],
)
def test_who_takes_memory_waits_if_the_limit_is_reached(held, wanted):
    in_flight = InFlight(100, 100, 100)
    batch = taken(in_flight, *held)
    thread, results = in_thread(taken, in_flight, *wanted)
    sent = Sent()
    sent.arrived.set()
    assert not results
    send(in_flight, batch, sent)
    thread.join(hang.SECONDS)
    assert len(results) == 1


def test_memory_is_used_again_before_all_that_may_be_in_flight_is():
    in_flight = InFlight(1000, 20, 1000)
    first, answered = taken(in_flight, 20, [20]), taken(in_flight, 500)
    thread, results = in_thread(taken, in_flight, 20, [20])
    sent = Sent(), Sent()
    send(in_flight, first, sent[0])
    send(in_flight, answered, sent[1])
    assert sent[0].waited.wait(hang.SECONDS)
    assert not results
    sent[0].arrived.set()
    thread.join(hang.SECONDS)
    assert len(results) == 1


def test_who_waits_fails_at_the_end(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(arguments.exc_type))
    raised = []
    in_flight = InFlight(100, 100, 100)
    taken(in_flight, 100)
    thread, _ = in_thread(taken, in_flight, 1)
    in_flight.end()
    thread.join(hang.SECONDS)
    assert raised == [CancelledError]
    with pytest.raises(CancelledError):
        in_flight.wait_for_one()


def test_a_wait_ends_with_the_batch_that_arrives():
    in_flight = InFlight(100, 100, 100)
    sent = Sent()
    send(in_flight, taken(in_flight, 10), sent)
    thread, results = in_thread(in_flight.wait_for_one)
    assert sent.waited.wait(hang.SECONDS)
    assert not results
    sent.arrived.set()
    thread.join(hang.SECONDS)
    assert results == [True]
    assert in_flight.arrived == 10
    assert not in_flight.wait_for_one()


def test_an_array_that_fails_is_the_error_of_who_waits_and_settle_passes_over_it():
    in_flight = InFlight(100, 100, 100)
    sent = Sent(), Sent()
    for number in range(2):
        send(in_flight, taken(in_flight, 10), sent[number])
    sent[0].error = RuntimeError("out of memory on the device")
    is_ready = sent[0].is_ready
    sent[0].is_ready = lambda: False
    sent[0].arrived.set()
    with pytest.raises(RuntimeError, match="out of memory"):
        in_flight.wait_for_one()
    sent[0].is_ready = is_ready
    thread, _ = in_thread(in_flight.settle)
    assert sent[1].waited.wait(hang.SECONDS)
    assert thread.is_alive()
    sent[1].arrived.set()
    thread.join(hang.SECONDS)
    assert not thread.is_alive()


def test_a_transfer_that_has_failed_is_an_error_even_if_nobody_waited_for_it():
    in_flight = InFlight(100, 100, 100)
    batch = taken(in_flight, 10)
    failed = Sent()
    failed.arrived.set()
    failed.error = RuntimeError("RESOURCE_EXHAUSTED")
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        send(in_flight, batch, failed)
    assert in_flight.arrived == 0
