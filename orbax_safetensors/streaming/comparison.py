"""Two checkpoints compared, in tiles that are read of both: names, shapes, dtypes and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from orbax_safetensors.devices.bits import is_float
from orbax_safetensors.format.names import by_path
from orbax_safetensors.options import Progress
from orbax_safetensors.storage.threads import Threads
from orbax_safetensors.streaming.cutting import batch_bytes, bundles, step_bytes
from orbax_safetensors.streaming.tiles import Bundle, Tile, TileSource, nbytes
from orbax_safetensors.transfer.engine import batches

# Elements that are compared at once. Their differences take float64, whatever the dtype of a tile.
_ELEMENTS = 2**20


class ArrayDifference(NamedTuple):
    """An array that both checkpoints have, and that is not the same in both.

    Attributes:
      name: as the first checkpoint has it.
      shapes, dtypes: of the first and of the second checkpoint.
      changed: the elements that differ, in their bits if the dtypes are the same, else in value; None if the shapes
        differ, as elements are then not compared.
      largest: the largest absolute difference of two elements, among those that are numbers; None as `changed`.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[np.dtype, np.dtype]
    changed: int | None
    largest: float | None

    @property
    def elements(self) -> int:
        """Return how many elements the array of the first checkpoint has."""
        return prod(self.shapes[0])


class Comparison(NamedTuple):
    """What tells two checkpoints apart.

    Attributes:
      only: the names that only the first has, and those that only the second has.
      different: the arrays that both have, and that differ.
      equal: how many arrays have the same name, shape, dtype and bits in both.
    """

    only: tuple[list[str], list[str]]
    different: list[ArrayDifference]
    equal: int

    @property
    def same(self) -> bool:
        """Return whether the checkpoints have the same arrays."""
        return not (any(self.only) or self.different)


def compare(first: TileSource, second: TileSource, memory_bytes: int, progress: Progress | None = None) -> Comparison:
    """Compare two checkpoints, in memory of about `memory_bytes` besides that of the sources.

    A leading `params` level of names is optional. `progress` is called with bytes of the first checkpoint, as for a
    conversion. Raises `StorageError` if files change meanwhile.
    """
    other = by_path({name: name for name in second.leaves}, first.leaves)
    shared = [name for name in first.leaves if name in other]
    alike = [name for name in shared if first.leaves[name].shape == second.leaves[other[name]].shape]
    counts = dict.fromkeys(alike, (0, 0.0))
    with Threads(2, "side") as pool:
        for tiles in _batches(first, second, alike, other, memory_bytes, progress):
            theirs = [Tile(other[tile.name], tile.box) for tile in tiles]
            both = pool.map(lambda source, part: source.read(part), (first, second), (tiles, theirs))
            for tile, *arrays in zip(tiles, *both, strict=True):
                changed, largest = counts[tile.name]
                more, larger = differences(*arrays)
                counts[tile.name] = changed + more, max(largest, larger)
    for source in (first, second):
        source.check()
    different = []
    for name in shared:
        leaves = first.leaves[name], second.leaves[other[name]]
        dtypes = leaves[0].dtype, leaves[1].dtype
        found = counts.get(name)
        if found is None or found[0] or dtypes[0] != dtypes[1]:
            shapes = leaves[0].shape, leaves[1].shape
            different.append(ArrayDifference(name, shapes, dtypes, *(found or (None, None))))
    only = [name for name in first.leaves if name not in other], [name for name in other if name not in first.leaves]
    return Comparison(only, different, len(shared) - len(different))


def _batches(
    first: TileSource,
    second: TileSource,
    names: Sequence[str],
    other: Mapping[str, str],
    memory_bytes: int,
    progress: Progress | None,
) -> Iterator[list[Tile]]:
    """Yield the tiles of arrays in batches, and report each when its successor is asked for."""
    # A chunk is decoded whole, so tiles are of whole chunks if only one of both has them.
    cut: list[Bundle]
    if first.decoded and not second.decoded:
        atomic_tiles = {other[name]: first.atomic_tile(name) for name in names}
        back = {other[name]: name for name in names}
        found = bundles(second, atomic_tiles, {}, [(name,) for name in atomic_tiles], memory_bytes)
        cut = [tuple(Tile(back[tile.name], tile.box) for tile in bundle) for bundle in found]
    else:
        atomic_tiles = {name: second.atomic_tile(other[name]) for name in names}
        cut = bundles(first, atomic_tiles, {}, [(name,) for name in names], memory_bytes)
    sizes = [nbytes(bundle, first.leaves) for bundle in cut]
    done, total = 0, sum(sizes)
    for batch in batches(zip(cut, sizes, strict=True), step_bytes(total, batch_bytes(memory_bytes))):
        if progress is not None:
            progress(done, total)
        tiles = [tile for bundle in batch for tile in bundle]
        yield tiles
        done += nbytes(tiles, first.leaves)
    if progress is not None and total:
        progress(done, total)


def differences(first: np.ndarray, second: np.ndarray) -> tuple[int, float]:
    """Return how many elements of two arrays of one shape differ, and the largest absolute difference.

    Elements of one dtype differ in any bit, elements of two dtypes in their values, where NaN is NaN. A difference from
    NaN is none, and that of integers exact.
    """
    one, two = first.reshape(-1), second.reshape(-1)
    same_dtype = one.dtype == two.dtype
    if same_dtype and np.array_equal(one.view(np.uint8), two.view(np.uint8)):
        return 0, 0
    changed, largest = 0, 0.0
    for begin in range(0, one.size, _ELEMENTS):
        x, y = one[begin : begin + _ELEMENTS], two[begin : begin + _ELEMENTS]
        if same_dtype:
            differ = _bits(x) != _bits(y)
            x, y = _wide(x[differ]), _wide(y[differ])
        else:
            x, y = _wide(x), _wide(y)
            differ = (x != y) & ~((x != x) & (y != y))
            x, y = x[differ], y[differ]
        if x.size:
            changed += x.size
            largest = max(largest, _largest(x, y))
    return changed, largest


def _bits(array: np.ndarray) -> np.ndarray:
    """Return elements as something whose comparison is that of their bits: integers, or bytes if there are none."""
    itemsize = array.dtype.itemsize
    return array.view(f"u{itemsize}" if itemsize <= 8 else f"V{itemsize}")


def _wide(array: np.ndarray) -> np.ndarray:
    """Return numbers as NumPy's widest of their kind: `complex128`, `float64`, `uint64` or `int64`."""
    dtype = array.dtype
    if dtype.kind == "c":
        return array.astype(np.complex128)
    if is_float(dtype):
        return array.astype(np.float64)
    return array.astype(np.uint64 if dtype.kind in "ub" else np.int64)


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        one, two = a.astype(np.uint64), b.astype(np.uint64)  # modulo 2**64, where differences are what they are
        return int(np.where(a > b, one - two, two - one).max())
    with np.errstate(invalid="ignore"):  # infinity less infinity
        apart = np.abs(a - b)
    return float(np.fmax.reduce(np.nan_to_num(apart, nan=0.0, posinf=np.inf)))
