"""A number for each array that NumPy and a device compute alike, so that a check moves no array back to the host.

The digest is the sum of an array's elements, as unsigned integers, each times a weight that depends on its place in the
array; all modulo 2**32. So what lies elsewhere, or has another bit, gives another sum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from maxtext_reference import Parameter, parameters
from models import Decoded, map_tensors

# What a step along each dimension adds to a place. Odd, so that no place is counted twice.
STEPS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
CHUNK_ELEMENTS = 2**18

Described = tuple[list[int], str, int]  # shape, dtype and digest


def expected(directory: Path, family: str) -> dict[str, Described]:
    """What the leaves of a family's tree are, by path, or the stored tensors without one; by NumPy, from the files."""
    stored = map_tensors(directory)
    leaves = [Parameter(name, [partial(stored.__getitem__, name)], False) for name in stored]
    if family:
        config = json.loads((directory / "config.json").read_text())
        leaves = list(parameters(family.removeprefix("maxtext."), config, Decoded(stored)))

    def of_part(leaf: Parameter, number: int) -> Described:
        values = leaf.parts[number]()
        if not leaf.stacked:
            return list(values.shape), str(values.dtype), of_numpy(values)
        shape = [*values.shape[:1], len(leaf.parts), *values.shape[1:]]
        return shape, str(values.dtype), of_numpy(values, (STEPS[0], *STEPS[2:]), number * STEPS[1])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = [[pool.submit(of_part, leaf, number) for number in range(len(leaf.parts))] for leaf in leaves]
        out = {}
        for leaf, futures in zip(leaves, parts, strict=True):
            described = [future.result() for future in futures]
            digest = sum(digest for *_, digest in described) % 2**32
            out[leaf.path.replace("-", ".")] = (*described[0][:2], digest)
    return out


def of_numpy(values: np.ndarray, steps: Sequence[int] = STEPS, start: int = 0) -> int:
    """The digest of an array, whose first element is at `start`; computed in the order in which it lies in memory."""
    order = sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis]))
    bits = np.atleast_1d(values.transpose(order).view(f"u{values.itemsize}"))
    sizes = [np.arange(size, dtype=np.uint32) for size in bits.shape]
    places = [size * np.uint32(step) for size, step in zip(sizes, [steps[axis] for axis in order] or [0], strict=True)]
    inner = np.uint32(start % 2**32) + _outer_sum(places[1:])
    rows = max(1, CHUNK_ELEMENTS // max(inner.size, 1))
    total = 0
    for begin in range(0, len(bits), rows):
        at = places[0][begin : begin + rows].reshape(-1, *(1,) * inner.ndim) + inner
        total += int(np.sum(bits[begin : begin + rows] * _weights(at), dtype=np.uint32))
    return total % 2**32


def of_devices(arrays: dict[str, jax.Array]) -> dict[str, Described]:
    """The same of arrays on devices, one program for each shape and dtype."""
    digests = jax.device_get([_of_array(array) for array in arrays.values()])
    return {
        name: (list(array.shape), str(array.dtype), int(digest))
        for (name, array), digest in zip(arrays.items(), digests, strict=True)
    }


@jax.jit
def _of_array(array: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    places = jnp.zeros(array.shape, np.uint32)
    for axis, step in zip(range(array.ndim), STEPS, strict=False):
        places += jax.lax.broadcasted_iota(np.uint32, array.shape, axis) * np.uint32(step)
    return jnp.sum(bits.astype(np.uint32) * _weights(places), dtype=np.uint32)


def _weights(places: Any) -> Any:
    """Odd numbers for places, which are all but random."""
    mixed = (places ^ (places >> np.uint32(16))) * np.uint32(0x7FEB352D)
    return (mixed ^ (mixed >> np.uint32(15))) | np.uint32(1)


def _outer_sum(places: Sequence[np.ndarray]) -> np.ndarray:
    out = np.zeros((), np.uint32)
    for each in places:
        out = out[..., None] + each
    return out
