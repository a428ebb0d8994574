"""What one array holds, in numbers: read in tiles, whatever its size."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors.devices.bits import is_float
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.names import hint
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.options import Progress
from orbax_safetensors.streaming.cutting import bundles
from orbax_safetensors.streaming.tiles import Tile, TileSource, nbytes
from orbax_safetensors.transfer.progress import Meter

# Values at the beginning of an array that are shown.
_FIRST = 8
# Elements that are widened at once.
_PART = 2**20


class Statistics(NamedTuple):
    """What an array holds.

    Attributes:
      minimum, maximum, mean: of all values that are not NaN; None if there are none.
      nans: how many values are NaN.
      first: the first values of the first row.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    minimum: float | None
    maximum: float | None
    mean: float | None
    nans: int
    first: list[Any]


def statistics(source: TileSource, name: str, memory_bytes: int, progress: Progress | None = None) -> Statistics:
    """Read the array `name` in tiles, in about `memory_bytes`, and call `progress` with the bytes of it.

    Raises `TensorMismatchError` if there is no such array, or if its numbers are complex.
    """
    if name not in source.leaves:
        raise TensorMismatchError(f"{source.path}: has no array {name!r}{hint(name, source.leaves)}")
    leaf = source.leaves[name]
    if leaf.dtype.kind == "c":
        raise TensorMismatchError(f"{source.path}: {name!r}: expected real numbers, found {leaf.dtype}")
    wide = np.float64 if is_float(leaf.dtype) else np.uint64 if leaf.dtype.kind == "u" else np.int64
    lows: list[Any] = []
    highs: list[Any] = []
    sums: list[float] = []
    count = nans = 0
    meter = Meter(progress or (lambda done, total: None), prod(leaf.shape) * leaf.dtype.itemsize)
    for bundle in bundles(source, {name: source.atomic_tile(name)}, {}, [(name,)], memory_bytes):
        meter.begin(nbytes(bundle, source.leaves))
        (tile,) = source.read(bundle, lambda share: meter.moved(share / 2))
        flat = tile.reshape(-1)
        for begin in range(0, flat.size, _PART):
            meter.moved(0.5 + begin / flat.size / 2)
            values = flat[begin : begin + _PART].astype(wide)
            numbers = values[~np.isnan(values)]
            nans += values.size - numbers.size
            if numbers.size:
                count += numbers.size
                lows.append(numbers.min().item())
                highs.append(numbers.max().item())
                sums.append(float(numbers.sum(dtype=np.float64)))
    source.check()
    meter.end()
    return Statistics(
        shape=leaf.shape,
        dtype=leaf.dtype,
        minimum=min(lows, default=None),
        maximum=max(highs, default=None),
        mean=sum(sums) / count if count else None,
        nans=nans,
        first=_first(source, name),
    )


def _first(source: TileSource, name: str) -> list[Any]:
    shape, dtype = source.leaves[name].shape, source.leaves[name].dtype
    ends = [*(min(size, 1) for size in shape[:-1]), *(min(size, _FIRST) for size in shape[-1:])]
    (array,) = source.read([Tile(name, Box((0, end) for end in ends))])
    values: list[Any] = array.reshape(-1).astype(np.float64 if is_float(dtype) else np.int64).tolist()
    return values
