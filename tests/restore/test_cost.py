"""The time a plan takes: what a simulation of the storage that the model describes says."""

import heapq
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.restore.cost import ProcessCost, RestorePlan, ShardSize, estimate_time


def plan(*processes):
    """A plan of processes that read so many bytes in so many requests."""
    costs = tuple(
        ProcessCost(number, nbytes, nbytes, requests, 0, 0, ()) for number, (nbytes, requests) in enumerate(processes)
    )
    return RestorePlan(0, 0, 0, ShardSize(0, 0), ShardSize(0, 0), len(costs), costs, (), (), ())


def simulated(requests, request_bytes, bandwidth, latency, streams):
    """Every stream waits for `latency`, then queues for the one line, then asks again."""
    waiting = [latency] * min(streams, requests)
    left, free = requests - len(waiting), 0.0
    while waiting:
        free = max(free, heapq.heappop(waiting)) + request_bytes / bandwidth
        if left:
            heapq.heappush(waiting, free + latency)
            left -= 1
    return free


@given(
    requests=st.integers(1, 200),
    request_bytes=st.integers(1, 10**9),
    bandwidth=st.floats(1e6, 1e11),
    latency=st.floats(0, 10),
    streams=st.integers(1, 64),
)
def test_requests_of_equal_length_take_what_a_simulation_says(requests, request_bytes, bandwidth, latency, streams):
    found = estimate_time(
        plan((requests * request_bytes, requests)), bandwidth=bandwidth, latency=latency, streams=streams
    )
    assert found.seconds == pytest.approx(simulated(requests, request_bytes, bandwidth, latency, streams), rel=1e-9)


def test_where_bytes_or_latency_or_both_count():
    one = plan((10**9, 100))
    assert estimate_time(one, bandwidth=1e9).seconds == pytest.approx(1)
    assert estimate_time(one, bandwidth=1e9, latency=0.01, streams=1).seconds == pytest.approx(1 + 1)  # the sum
    assert estimate_time(one, bandwidth=1e9, latency=0.01, streams=16).seconds == pytest.approx(1 + 0.01)
    assert estimate_time(one, bandwidth=1e15, latency=0.01, streams=16).seconds == pytest.approx(7 * 0.01, rel=1e-3)


def test_the_slowest_process_counts():
    found = estimate_time(plan((100, 1), (300, 1), (0, 0), (300, 1)), bandwidth=100, latency=1)
    assert found.processes == (2, 4, 0, 4)
    assert (found.seconds, found.slowest) == (4, 1)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"bandwidth": 0}, "bandwidth is 0, must be a number of bytes per second above 0"),
        ({"bandwidth": inf}, "bandwidth is inf"),
        ({"bandwidth": 1, "latency": -1}, "latency is -1, must be a number of seconds, 0 or more"),
        ({"bandwidth": 1, "latency": nan}, "latency is nan"),
        ({"bandwidth": 1, "streams": 0}, "streams is 0, must be at least 1"),
    ],
)
def test_numbers_that_cannot_be(numbers, message):
    with pytest.raises(SafetensorsError, match=message):
        estimate_time(plan((1, 1)), **numbers)
