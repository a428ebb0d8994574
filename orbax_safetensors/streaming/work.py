"""`Work`: a conversion from any source into any output, which all processes plan or run together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax

from orbax_safetensors.cost.conversion import ConversionCost, ConversionPlan, PlannedArray
from orbax_safetensors.cost.figures import PlannedFile
from orbax_safetensors.mapping.family import NO_FAMILY, FamilyUse
from orbax_safetensors.options import Progress
from orbax_safetensors.streaming.pipeline import (
    Bundle,
    PlannedSink,
    TileSink,
    TileSource,
    nbytes,
    planned,
    share,
    stream,
)

Unit = tuple[Bundle, ...]  # what one process moves, in this order


class Moved(NamedTuple):
    """What this process has moved: the destination, bytes of arrays that it wrote, and requests to both sides."""

    path: str
    nbytes: int
    requests: int


class OutputSink(TileSink, Protocol):
    """An unfinished checkpoint that all processes have begun; see `JointSink`."""

    @property
    def nbytes(self) -> int:
        """Bytes of arrays that this process has written."""

    def has(self, unit: int) -> bool:
        """Return whether a unit was written before this run, which resumes another."""

    def expect(self, units: Sequence[int]) -> None:
        """Expect this process to write these units, in this order."""

    def commit(self, last: Callable[[], None]) -> None:
        """See `JointSink`."""

    def __enter__(self) -> Self:
        """See `JointSink`."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """See `JointSink`."""


class Output(Protocol):
    """The checkpoint that a conversion makes of all leaves of a source. Nothing is touched until `begin`.

    Attributes:
      path: where the checkpoint will be.
      units: the units of work that processes share.
      batch_bytes: the bytes that move at once.
      writers: the threads that may write batches at once.
    """

    path: str
    units: Sequence[Unit]
    batch_bytes: int
    writers: int

    @property
    def last(self) -> int | None:
        """The number of the unit that is written when all others are, if there is one."""

    @property
    def files(self) -> tuple[PlannedFile, ...]:
        """The safetensors files of the checkpoint; empty for Orbax."""

    @property
    def arrays(self) -> tuple[PlannedArray, ...]:
        """The arrays of a checkpoint of Orbax; empty for safetensors files."""

    def check_place(self) -> None:
        """Raise `StorageError` if something is in the way."""

    def planned(self, units: Sequence[int]) -> PlannedSink:
        """Return a sink that tells the cost of writing units."""

    def begin(self, *, resume: bool) -> OutputSink:
        """Begin the checkpoint and return its sink. Every process calls this; it succeeds or fails in all of them."""


class Work:
    """A conversion: which process moves which units. The caller closes `source`."""

    def __init__(self, source: TileSource, output: Output, use: FamilyUse = NO_FAMILY) -> None:
        """Touch nothing. `use` is the family whose tree is the source or the output."""
        self.source, self.output, self.use = source, output, use

    def plan(self, process_count: int) -> ConversionPlan:
        """Return the cost of `run` for each of `process_count` processes.

        Raises the errors of `run` if something is in the way at the destination.
        """
        source, output = self.source, self.output
        output.check_place()

        def cost(process: int) -> ConversionCost:
            shares = self._share_of(range(len(output.units)), process, process_count)
            return ConversionCost(
                tuple(
                    batch
                    for units in shares
                    for batch in planned(
                        source, output.planned(units), self._bundles(units), output.batch_bytes, output.writers
                    )
                )
            )

        return ConversionPlan(
            output.path,
            tuple(map(cost, range(process_count))),
            files=output.files,
            arrays=output.arrays,
            source_bytes=source.stored_bytes,
            from_orbax=source.decoded,
        )

    def run(self, *, resume: bool, progress: Progress | None) -> Moved:
        """Convert, together with all other processes.

        Raises in every process if one fails; the bytes written so far stay, for a run that resumes.
        """
        source, output = self.source, self.output
        with output.begin(resume=resume) as sink:
            left = [unit for unit in range(len(output.units)) if not sink.has(unit)]
            units, last = self._share_of(left, jax.process_index(), jax.process_count())
            sink.expect([*units, *last])
            total = sum(map(self._nbytes, (*units, *last)))
            moved = 0

            def move(units: Sequence[int]) -> None:
                nonlocal moved
                before = moved

                def report(done: int, _: int) -> None:
                    if progress is not None:
                        progress(before + done, total)

                moved += stream(source, sink, self._bundles(units), output.batch_bytes, output.writers, report)
                source.check()

            move(units)
            sink.commit(lambda: move(last) if last else None)
        return Moved(output.path, sink.nbytes, source.requests + sink.requests)

    def _nbytes(self, unit: int) -> int:
        return sum(nbytes(bundle, self.source.leaves) for bundle in self.output.units[unit])

    def _bundles(self, units: Iterable[int]) -> list[Bundle]:
        return [bundle for unit in units for bundle in self.output.units[unit]]

    def _share_of(self, units: Sequence[int], process: int, count: int) -> tuple[list[int], list[int]]:
        """Return the units that a process moves with the others; and the last unit, which process 0 moves later."""
        last = self.output.last
        early = share([unit for unit in units if unit != last], self._nbytes, process, count)
        return early, [unit for unit in units if unit == last and process == 0]
