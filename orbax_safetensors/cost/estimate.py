"""How long a restore takes, given its plan and what storage can do: a model that is stated in full, not a measurement.

A process keeps `streams` requests in flight. Each first waits for `latency`, then its bytes come, one request's after
the other's, at `bandwidth`. Where the bytes are what takes long, latency hides behind them, all but the first one:
`latency + nbytes / bandwidth`. Where the latency is, requests go in rounds of `streams`, and only the bytes of what a
stream itself asked for add to it; with one stream that is the sum of both. The longer of the two counts, which for
requests of equal length is what such storage takes to the last digit. Processes do not wait for one another, so the
slowest of them is when all are done.

What is not in it: opening the files and reading their headers, casts and transposes that a processor is too slow for,
copies to accelerators, and processes that share one bandwidth: give each its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from orbax_safetensors.cost.restore import RestorePlan
from orbax_safetensors.errors import SafetensorsError


@dataclass(frozen=True)
class TimeEstimate:
    """When the processes of a plan are done, in seconds.

    Attributes:
      seconds: of the slowest process.
      slowest: its number, the first of those that are equally slow.
      processes: for every process.
    """

    seconds: float
    slowest: int
    processes: tuple[float, ...]


def estimate_time(plan: RestorePlan, *, bandwidth: float, latency: float = 0.0, streams: int = 1) -> TimeEstimate:
    """How long what `plan` reads takes from storage that gives every process the same.

    Args:
      plan: what `plan_restore` returned.
      bandwidth: bytes per second for each process, all its requests together.
      latency: seconds from a request to its first byte.
      streams: requests that a process has in flight at once; a restore has `SafetensorsOptions.threads`.

    Raises:
      SafetensorsError: a number is out of range.
    """
    return estimate([(cost.read_bytes, cost.num_requests) for cost in plan.processes], bandwidth, latency, streams)


def estimate(processes: Sequence[tuple[int, int]], bandwidth: float, latency: float, streams: int) -> TimeEstimate:
    """`estimate_time` of the bytes and requests of every process."""
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
    # A stream has moved the bytes of one request in every round, and in the last it waits for those of all before it.
    return max(latency + transfer, rounds * latency + (rounds + in_last - 1) / requests * transfer)
