"""What a restore costs a process, told by JAX's monitoring, by the kernel, and by counting the bytes of its shards."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# The longest gap between two runs of a shard that the default options read over.
MAX_GAP_BYTES = 16 * 2**10

_PREFIX = "/jax/orbax/read/safetensors/"


def measured(call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """The result of `call`; the monitoring scalars of each restore in it, and the bytes this process read meanwhile."""
    events: dict[str, list[float]] = {}

    def listen(event: str, value: float, **_: Any) -> None:
        if event.startswith(_PREFIX):
            events.setdefault(event.removeprefix(_PREFIX), []).append(value)

    jax.monitoring.register_scalar_listener(listen)
    try:
        before, counting = _read_chars()
        result = call()
        after, _ = _read_chars()
    finally:
        jax.monitoring.unregister_scalar_listener(listen)
    return result, {**events, "rchar": after - before - counting}


def _read_chars() -> tuple[int, int]:
    """Bytes that this process asked the kernel to read so far, and how many more this question costs."""
    descriptor = os.open("/proc/self/io", os.O_RDONLY)
    try:
        text = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    return int(text.split()[1]), len(text)


def counted(array: jax.Array) -> dict[str, int]:
    """The stored bytes that this process's shards of an array hold, by looking at every element.

    `needed` counts each once; `spanned` adds the gaps that are short enough to be read over. `one_box` is 1 where all
    shards of the process together are a box.
    """
    held = np.zeros(array.shape, np.bool_)
    for index in array.sharding.addressable_devices_indices_map(array.shape).values():
        held[index] = True
    (elements,) = np.nonzero(held.reshape(-1))
    gaps = (np.diff(elements) - 1) * array.dtype.itemsize
    needed = elements.size * array.dtype.itemsize
    return {
        "needed": needed,
        "spanned": needed + int(gaps[gaps <= MAX_GAP_BYTES].sum()),
        "one_box": int(
            elements.size == math.prod(int(np.ptp(places)) + 1 for places in np.nonzero(np.atleast_1d(held)))
        ),
    }


def different_shards(array: jax.Array, expected: np.ndarray) -> list[str]:
    """The shards of this process that are not, bit for bit, the same slice of `expected`."""
    if array.shape != expected.shape or array.dtype != expected.dtype:
        return [f"expected {expected.dtype}{expected.shape}, found {array.dtype}{array.shape}"]
    return [
        f"{shard.device} {shard.index}"
        for shard in array.addressable_shards
        if np.asarray(shard.data).tobytes() != expected[shard.index].tobytes()
    ]
