"""The figures that plans have in common.

*Needed* bytes are those that shards hold, each counted once; *read* bytes are those that requests cover.
A request is one storage operation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import Field, asdict, dataclass
from typing import Any, ClassVar, Protocol

# Plans report leaves with a higher ratio of read to needed bytes; below it, another sharding would gain little.
REPORTED_OVER_READ = 1.1


class OverRead:
    """A mixin that adds the over-read to a class with needed and read bytes."""

    needed_bytes: int
    read_bytes: int

    @property
    def over_read(self) -> float:
        """Return the read bytes for each needed byte; 1.0 if none is needed."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0


@dataclass(frozen=True)
class Reads(OverRead):
    """Needed and read bytes."""

    needed_bytes: int
    read_bytes: int

    @staticmethod
    def total(costs: Iterable[OverRead]) -> Reads:
        """Return the sums over `costs`."""
        figures = [(cost.needed_bytes, cost.read_bytes) for cost in costs]
        return Reads(sum(needed for needed, _ in figures), sum(read for _, read in figures))


@dataclass(frozen=True)
class FileReads(OverRead):
    """What one process reads of one file."""

    file: str
    needed_bytes: int
    read_bytes: int
    num_requests: int


class RestoreFigures(Protocol):
    """A dataclass with the figures of a restore, of files or of an Orbax checkpoint."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def processes(self) -> Sequence[OverRead]:
        """The figures of each process."""

    @property
    def over_reads(self) -> Sequence[OverRead]:
        """The figures of leaves that read much more than they need."""


def restore_plan_json(plan: RestoreFigures) -> str:
    """Return a plan of a restore as a JSON object with the names of its attributes, and over-reads beside bytes."""
    document = asdict(plan)
    for key, costs in (("processes", plan.processes), ("over_reads", plan.over_reads)):
        for cost, fields in zip(costs, document[key], strict=True):
            fields["over_read"] = cost.over_read
    return json.dumps(document)


# Of more processes, a plan looks at so many, spread from the first to the last.
_LOOKED_AT = 4


def looked_at(process_count: int, *, everyone: bool) -> tuple[int, ...]:
    """Return the processes that a plan looks at: all if they are few, or if `everyone` is wanted."""
    if everyone or process_count <= _LOOKED_AT:
        return tuple(range(process_count))
    return tuple(round(number * (process_count - 1) / (_LOOKED_AT - 1)) for number in range(_LOOKED_AT))
