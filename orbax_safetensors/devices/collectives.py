"""Programs that devices of several processes run together: how many may be in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax

# XLA's CPU client lets 32 programs be in flight on a device (`CpuClientOptions::max_inflight_computations_per_device`).
# It starts programs on a pool with a thread for each core, or for each device if there are more devices. A further
# program waits in such a thread; once all threads wait, none is left to run the programs before, and all processes
# hang. Half of the 32 leaves room for the caller's programs. Accelerators run programs one after the other anyway.
MAX_IN_FLIGHT = 16


def start(programs: Iterable[Callable[[], jax.Array]]) -> list[jax.Array]:
    """Start programs in order, which must be the same in all processes; on return, only the last few may still run."""
    results: list[jax.Array] = []
    for program in programs:
        results.append(program())
        if len(results) % MAX_IN_FLIGHT == 0:
            jax.block_until_ready(results[-MAX_IN_FLIGHT:])
    return results
