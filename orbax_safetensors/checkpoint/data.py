"""Read all data of a checkpoint, and compare it with what was recorded of it: checksums of a save, digests of the Hub.

Threads take pieces of several files in turn. Each has one buffer, so memory does not grow with the files. SHA-256 needs
the bytes of a file in their order: a thread then waits until it is the turn of its piece.
"""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.checksums import Recorded, changed_tensors, other_file
from orbax_safetensors.devices.reported_progress import reported_progress
from orbax_safetensors.errors import ChecksumError, SafetensorsError
from orbax_safetensors.format.checksums import FileChecksums
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.storage.direct import reading
from orbax_safetensors.storage.memory import allocate
from orbax_safetensors.storage.store import File
from orbax_safetensors.transfer.progress import Meter
from orbax_safetensors.transfer.sums import Sums
from orbax_safetensors.transfer.threads import run_tasks


@dataclass(frozen=True)
class DataCheck:
    """What a check of data found.

    Attributes:
      faults: tensors and files that differ, and files with nothing to compare them with.
      tensors: how many were compared with the checksums of a save.
      files: how many were compared with the Hub's SHA-256.
      nbytes: bytes that were read.
      unknown: files with nothing to compare them with.
    """

    faults: tuple[SafetensorsError, ...]
    tensors: int
    files: int
    nbytes: int
    unknown: int


def check_data(checkpoint: Checkpoint, recorded: Recorded, options: SafetensorsOptions) -> DataCheck:
    """Read every file that has something to compare it with, once, from its beginning to its end.

    `recorded` are the checksums of its save. `threads`, `direct`, `in_flight_bytes` and `progress` of `options` count.
    A file that cannot be read is a fault.
    """
    faults: list[SafetensorsError] = []
    checks: list[_FileCheck] = []
    unknown = 0
    for number, stored in enumerate(checkpoint.files):
        checksums = recorded.get(posixpath.basename(stored.path))
        sha256 = checkpoint.store.sha256(stored.path)
        if checksums is None and sha256 is None:
            faults.append(
                ChecksumError(
                    f"{stored.path}: there is nothing to check its data against: no save has recorded its checksums, "
                    "and no SHA-256 of the Hugging Face Hub is known"
                )
            )
            unknown += 1
        if checksums is not None and (other := other_file(checkpoint, number, checksums)) is not None:
            faults.append(other)
            checksums = None
        if checksums is not None or sha256 is not None:
            checks.append(_FileCheck(checkpoint, number, checksums, sha256))
    if not checks:
        return DataCheck(tuple(faults), 0, 0, 0, unknown)
    nbytes = sum(check.nbytes for check in checks)
    store = reading(checkpoint.store, options.direct, nbytes)
    checkpoint = replace(checkpoint, store=store)
    limits = store.cost.request_limits(options.threads, None, options.in_flight_bytes)
    with reported_progress(options.progress, "verify") as progress:
        meter = Meter(progress or (lambda done, total: None), nbytes)
        for first in range(0, len(checks), limits.requests):
            _read(checkpoint, checks[first : first + limits.requests], limits.requests, limits.max_request_bytes, meter)
        meter.end()
    tensors = files = 0
    for check in checks:
        found, compared = check.result()
        faults += found
        tensors += compared
        files += check.sha256 is not None and check.failure is None
    return DataCheck(tuple(faults), tensors, files, nbytes, unknown)


class _FileCheck:
    """A file, what to compare it with, and what was found of it so far."""

    def __init__(self, checkpoint: Checkpoint, number: int, recorded: FileChecksums | None, sha256: str | None) -> None:
        self.stored = checkpoint.files[number]
        self.number = number
        self.sha256 = sha256
        self.failure: SafetensorsError | None = None
        self._checkpoint = checkpoint
        self._recorded = recorded
        self._entries = sorted(self.stored.header.tensors.values(), key=lambda entry: (entry.begin, entry.end))
        self._sums = Sums(with_gaps=False)
        self._digest = hashlib.sha256()
        self._begin = 0 if sha256 is not None else self.stored.header.data_start  # the header is compared already
        self._hashed = self._begin
        self._turn = threading.Condition()

    @property
    def nbytes(self) -> int:
        return self.stored.stamp.nbytes - self._begin

    def pieces(self, length: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges `[begin, end)` to read."""
        size = self.stored.stamp.nbytes
        for begin in range(self._begin, size, length):
            yield begin, min(begin + length, size)

    def open(self, stack: contextlib.ExitStack) -> File | None:
        """Open the file, which `stack` closes; None if that fails."""
        try:
            return stack.enter_context(contextlib.closing(self._checkpoint.open_file(self.number)))
        except SafetensorsError as error:
            self.failure = error
            return None

    def read(self, file: File, begin: int, end: int, memory: memoryview) -> None:
        """Read a piece into `memory`, and sum it. Every piece is read, in any order, unless one has failed."""
        try:
            if self.failure is None:
                file.read([(begin, [memory])])
                if self._recorded is not None:
                    self._sum(begin, end, memory)
        except SafetensorsError as error:
            self.failure = error
        finally:
            if self.sha256 is not None:
                with self._turn:
                    self._turn.wait_for(lambda: self._hashed == begin)
                if self.failure is None:
                    self._digest.update(memory)
                with self._turn:
                    self._hashed = end
                    self._turn.notify_all()

    def _sum(self, begin: int, end: int, memory: memoryview) -> None:
        base = self.stored.header.data_start
        first = bisect_right(self._entries, begin - base, key=lambda entry: entry.end)
        for entry in self._entries[first:]:
            low, high = max(base + entry.begin, begin), min(base + entry.end, end)
            if low >= end:
                return
            self._sums.add_buffers(self.number, low, [memory[low - begin : high - begin]])

    def result(self) -> tuple[Sequence[SafetensorsError], int]:
        """Return the faults of the file, and how many of its tensors were compared with recorded checksums."""
        if self.failure is not None:
            return [self.failure], 0
        faults: list[SafetensorsError] = []
        tensors = 0
        if self._recorded is not None:
            changed, tensors = changed_tensors(self._checkpoint, self.number, self._recorded, self._sums)
            faults += changed
        if self.sha256 is not None and (found := self._digest.hexdigest()) != self.sha256:
            faults.append(
                ChecksumError(
                    f"{self.stored.path}: is not the file that the Hugging Face Hub has: expected SHA-256 "
                    f"{self.sha256}, found {found}"
                )
            )
        return faults, tensors


def _read(checkpoint: Checkpoint, checks: Sequence[_FileCheck], threads: int, piece_bytes: int, meter: Meter) -> None:
    """Read a few files at once, and close them."""
    done: list[int] = []
    total = sum(check.nbytes for check in checks)
    meter.begin(total)
    buffers = deque(allocate([piece_bytes])[0] for _ in range(threads))

    def read(check: _FileCheck, file: File, begin: int, end: int) -> None:
        buffer = buffers.pop()
        check.read(file, begin, end, buffer.data[: end - begin])
        buffers.append(buffer)
        done.append(end - begin)

    with contextlib.ExitStack() as stack:
        opened = {check: file for check in checks if (file := check.open(stack)) is not None}

        def cancel() -> None:
            for file in opened.values():
                file.cancel()

        pieces = ([(*pair, *piece) for piece in pair[0].pieces(piece_bytes)] for pair in opened.items())
        turns = zip_longest(*pieces)
        tasks = (partial(read, *task) for turn in turns for task in turn if task is not None)
        run_tasks(tasks, threads, cancel, lambda: meter.moved(sum(done) / max(total, 1)))
        for check, file in opened.items():
            if check.failure is None:
                try:
                    file.check(check.stored.stamp)
                except SafetensorsError as error:
                    check.failure = error
