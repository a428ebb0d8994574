"""`TileJob`: a conversion from any source into any sink, which all processes run together.

One batch of tiles is read while the ones before are written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

import jax

from orbax_safetensors.format.digest import digest_of
from orbax_safetensors.mapping.family import NO_FAMILY, FamilyUse
from orbax_safetensors.options import Progress
from orbax_safetensors.storage.interrupts import plain_interrupts
from orbax_safetensors.storage.process_memory import resident, trim
from orbax_safetensors.storage.threads import Threads
from orbax_safetensors.streaming.cutting import step_bytes
from orbax_safetensors.streaming.sink import Sink
from orbax_safetensors.streaming.tiles import Tile, TileSource, nbytes
from orbax_safetensors.transfer.engine import batches
from orbax_safetensors.transfer.progress import SECONDS

_T = TypeVar("_T")

# Of a batch, between two calls of `progress`: a shorter one is told of when it is written.
_STEP_BYTES = 2**20


class TileJob:
    """A conversion: which process moves which units. The caller closes `source`."""

    def __init__(self, source: TileSource, sink: Sink, use: FamilyUse = NO_FAMILY) -> None:
        """Touch nothing. `use` is the family whose tree is read or written."""
        self.source, self.sink, self.use = source, sink, use

    @property
    def digest(self) -> str:
        """A digest of what is written, equal in all processes that see the same source."""
        return digest_of(self.sink.workspace.record)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays, in the dtypes of the destination."""
        return self._nbytes(range(len(self.sink.units)))

    def run(
        self, *, resume: bool, progress: Progress | None, begun: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Convert, together with all other processes.

        Calls `begun` before the first byte moves, with the bytes of arrays that all processes are going to write.
        Raises in every process if one fails; the bytes written so far stay, for a run that resumes.
        """
        with self.sink.begin(resume=resume) as sink:
            left = [unit for unit in range(len(sink.units)) if not sink.has(unit)]
            begun(self._nbytes(left))
            early, last = self._share_of(left)
            sink.expect([*early, *last])
            moved = _ConversionProgress(progress, self._nbytes([*early, *last]), sink)
            self._move(early, moved)
            sink.commit(lambda: self._move(last, moved) if last else None)

    def _move(self, units: Sequence[int], moved: _ConversionProgress) -> None:
        """Move units. A batch is read while up to `Sink.writers` batches are written, each by a thread.

        With two, one batch is encoded or copied while another waits for the disk.
        """
        sink = self.sink
        # Freed memory that libraries keep serves the next batch, as long as the process stays below its limit.
        most = resident() + 6 * sink.batch_bytes
        with plain_interrupts(), Threads(sink.writers, "writer") as pool:
            writing: deque[tuple[Future[None], int]] = deque()

            def finish(left: int) -> None:
                """Wait until at most `left` batches are being written."""
                while len(writing) > left:
                    written, size = writing[0]
                    if wait([written], SECONDS).done:
                        writing.popleft()
                        written.result()
                        moved.has_written(size)
                    else:
                        moved.look()

            for tiles, size, overlap in self._batches(units):
                finish(overlap)
                arrays = self.source.read(tiles, partial(moved.look, size))
                moved.has_read(size)
                finish(overlap - 1)
                if resident() > most:
                    trim()
                # The list passes to the writer with its arrays, so that their memory is free once they are written.
                writing.append((pool.submit(sink.write, tiles, arrays), size))
                del arrays
            finish(0)
        self.source.check()

    def _batches(self, units: Iterable[int]) -> Iterator[tuple[list[Tile], int, int]]:
        """Yield batches as `(tiles, their bytes, overlap)`: at most `Sink.batch_bytes`, or one larger bundle.

        `overlap` is how many of the batches before it may still be written while this one is read. That is
        `Sink.writers`, unless a batch is larger than the others: then it is lower, but at least 1, so that the batches
        in memory have no more bytes than `writers + 1` usual ones. With two writers and batches of at most 100 MB, the
        third of three batches of 100, 100 and 150 MB overlaps with one, because all three would have 350 MB.
        """
        writers, limit, leaves = self.sink.writers, self.sink.batch_bytes, self.source.leaves
        before: deque[int] = deque([0] * writers, writers)
        bundles = [(bundle, nbytes(bundle, leaves)) for unit in units for bundle in self.sink.units[unit]]
        total = sum(size for _, size in bundles)
        for batch in batches(bundles, step_bytes(total, limit)):
            tiles = [tile for bundle in batch for tile in bundle]
            size, overlap = nbytes(tiles, leaves), writers
            while overlap > 1 and size + sum(list(before)[-overlap:]) > (writers + 1) * limit:
                overlap -= 1
            yield tiles, size, overlap
            before.append(size)

    def _nbytes(self, units: Iterable[int]) -> int:
        return sum(nbytes(bundle, self.source.leaves) for unit in units for bundle in self.sink.units[unit])

    def _share_of(self, units: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the units that this process moves with the others; and the last unit, which process 0 moves later."""
        last, process, count = self.sink.last, jax.process_index(), jax.process_count()
        early = share([unit for unit in units if unit != last], lambda unit: self._nbytes([unit]), process, count)
        return early, [unit for unit in units if unit == last and process == 0]


class _ConversionProgress:
    """Tells `progress` of each batch that is written, and of a long one also while it is read and written.

    Until then, a byte counts half when it is read, and half when it is written.
    """

    def __init__(self, progress: Progress | None, total: int, sink: Sink) -> None:
        """Tell that nothing has moved yet."""
        self._progress, self._total, self._sink = progress, total, sink
        self._before = sink.moved_bytes
        self._read = self._written = self._told = 0
        self._tell(0)

    def has_read(self, nbytes: int) -> None:
        """Count a batch that is read."""
        self._read += nbytes
        self.look()

    def has_written(self, nbytes: int) -> None:
        """Count a batch that is written."""
        self._written += nbytes
        if self._written >= self._told:
            self._tell(self._written)

    def look(self, batch: int = 0, share: float = 0) -> None:
        """Tell how much has moved if that is worth it, with this share of a batch that is being read."""
        written = max(self._sink.moved_bytes - self._before, self._written)
        done = (self._read + int(batch * share) + written) // 2
        if self._told + _STEP_BYTES <= done < self._total:
            self._tell(done)

    def _tell(self, done: int) -> None:
        self._told = done
        if self._progress is not None:
            self._progress(done, self._total)


def share(items: Sequence[_T], size: Callable[[_T], int], process: int, count: int) -> list[_T]:
    """Return the share of one of `count` processes: consecutive items, in bytes about as many as each other share."""
    sizes = [size(item) for item in items]
    total, before = sum(sizes), 0
    shared = []
    for item, item_nbytes in zip(items, sizes, strict=True):
        # An item belongs to the process in whose part of all bytes its middle lies.
        if min((2 * before + item_nbytes) * count // max(2 * total, 1), count - 1) == process:
            shared.append(item)
        before += item_nbytes
    return shared
