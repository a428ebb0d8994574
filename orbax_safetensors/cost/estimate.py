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

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from orbax_safetensors.cost.restore import RestorePlan
from orbax_safetensors.errors import SafetensorsError


@dataclass(frozen=True)
class TimeEstimate:
    """The time that the processes of a plan take, in seconds.

    Attributes:
      seconds: of the slowest process.
      slowest: the number of the slowest process, the first if several are equally slow.
      processes: of every process.
    """

    seconds: float
    slowest: int
    processes: tuple[float, ...]


def estimate_time(plan: RestorePlan, *, bandwidth: float, latency: float = 0.0, streams: int = 1) -> TimeEstimate:
    """Return how long the reads of `plan` take if storage serves every process equally.

    Args:
      plan: a result of `plan_restore`.
      bandwidth: bytes per second for each process, over all its requests.
      latency: seconds from a request to its first byte.
      streams: requests that a process has in flight at once; a restore has `SafetensorsOptions.threads`.

    Raises:
      SafetensorsError: a number is out of range.
    """
    return estimate([(cost.read_bytes, cost.num_requests) for cost in plan.processes], bandwidth, latency, streams)


def estimate(processes: Sequence[tuple[int, int]], bandwidth: float, latency: float, streams: int) -> TimeEstimate:
    """Return the estimate for `processes`, the bytes and the requests of each; see `estimate_time`."""
    if not (isfinite(bandwidth) and bandwidth > 0):
        raise SafetensorsError(f"bandwidth is {bandwidth!r}, must be a number of bytes per second above 0")
    if not (isfinite(latency) and latency >= 0):
        raise SafetensorsError(f"latency is {latency!r}, must be a number of seconds, 0 or more")
    if streams < 1:
        raise SafetensorsError(f"streams is {streams!r}, must be at least 1")
    seconds = tuple(_seconds(nbytes, requests, bandwidth, latency, streams) for nbytes, requests in processes)
    longest = max(seconds, default=0.0)
    return TimeEstimate(longest, seconds.index(longest) if seconds else 0, seconds)


def _seconds(nbytes: int, requests: int, bandwidth: float, latency: float, streams: int) -> float:
    if not requests:
        return 0.0
    transfer = nbytes / bandwidth
    rounds = -(-requests // streams)
    in_last = requests - (rounds - 1) * streams
    # A stream transfers one request in every round; in the last round it waits for all requests before its own.
    return max(latency + transfer, rounds * latency + (rounds + in_last - 1) / requests * transfer)
