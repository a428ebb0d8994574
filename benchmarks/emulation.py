"""Accelerators for machines that have none, to check results: JAX's CPU devices, which never share the host's memory.

    with emulation.accelerator():
        arrays = load()  # by `orbax_safetensors`

JAX gives a CPU device the memory of a NumPy array as it is. Within `accelerator`, what is handed over is copied, as on
the way to a card, and `orbax_safetensors` takes no device for a CPU. Nothing here says how long that takes on a card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np


@contextlib.contextmanager
def accelerator() -> Iterator[None]:
    """Make JAX's devices accelerators to all that runs within."""
    device_put, from_callback = jax.device_put, jax.make_array_from_callback

    def put(tree: Any, *args: Any, **kwargs: Any) -> Any:
        return device_put(jax.tree.map(_copied, tree), *args, **kwargs)

    def callback(shape: Any, sharding: Any, data: Any, *args: Any, **kwargs: Any) -> jax.Array:
        return from_callback(shape, sharding, lambda index: _copied(data(index)), *args, **kwargs)

    with (
        mock.patch.object(jax, "device_put", put),
        mock.patch.object(jax, "make_array_from_callback", callback),
        mock.patch("orbax_safetensors.devices.arrays.is_cpu", return_value=False),
    ):
        yield


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
