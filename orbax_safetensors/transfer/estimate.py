"""Estimate how long a restore takes, from its plan and the speed of storage: a model, not a measurement.

A process keeps `streams` requests in flight. Each request waits for `latency`; then its bytes arrive at `bandwidth`,
one request after the other. If transfers dominate, they hide every latency except the first: `latency + nbytes /
bandwidth`. If latency dominates, requests go in rounds of `streams`, and each stream adds only the transfers of its
requests; with one stream, the time is the sum of all latencies and transfers. The longer of the two times counts, and
is exact for requests of equal length. Processes do not wait for each other, so the slowest one decides.

The model leaves out opening files and reading headers, casts and transposes that a processor is too slow for, and
copies to accelerators. If processes share one bandwidth, give each its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from orbax_safetensors.errors import SafetensorsError


@dataclass(frozen=True)
class TimeEstimate:
    """The time that the processes of a plan take, in seconds.

    ```python
    mesh = jax.sharding.AbstractMesh((8,), ("model",))
    plan = ost.plan_restore("/models/llama", NamedSharding(mesh, P()), process_count=2)
    time = ost.estimate_time(plan, bandwidth=2e9, latency=0.01, streams=64)
    print(f"process {time.slowest} takes {time.seconds:.2f} s")
    ```

    Attributes:
      seconds: of the slowest process.
      slowest: the number of the slowest process, the first if several are equally slow.
      processes: of every process that the plan looks at.
    """

    seconds: float
    slowest: int
    processes: tuple[float, ...]


def estimate(processes: Mapping[int, tuple[int, int]], bandwidth: float, latency: float, streams: int) -> TimeEstimate:
    """Return how long the requests of processes take, given the bytes and the requests of each, by its number.

    See `restore.cost.estimate_time` for the numbers, and for the errors.
    """
    if not (isfinite(bandwidth) and bandwidth > 0):
        raise SafetensorsError(f"bandwidth is {bandwidth!r}, must be a number of bytes per second above 0")
    if not (isfinite(latency) and latency >= 0):
        raise SafetensorsError(f"latency is {latency!r}, must be a number of seconds, 0 or more")
    if streams < 1:
        raise SafetensorsError(f"streams is {streams!r}, must be at least 1")
    seconds = {
        process: _seconds(nbytes, requests, bandwidth, latency, streams)
        for process, (nbytes, requests) in processes.items()
    }
    slowest = max(seconds, key=seconds.__getitem__, default=0)
    return TimeEstimate(seconds.get(slowest, 0.0), slowest, tuple(seconds.values()))


def _seconds(nbytes: int, requests: int, bandwidth: float, latency: float, streams: int) -> float:
    if not requests:
        return 0.0
    transfer = nbytes / bandwidth
    rounds = -(-requests // streams)
    last_requests = requests - (rounds - 1) * streams
    # A stream transfers one request in every round; in the last round it waits for all requests before its own.
    return max(latency + transfer, rounds * latency + (rounds + last_requests - 1) / requests * transfer)
