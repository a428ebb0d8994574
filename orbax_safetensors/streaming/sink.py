"""`Sink`: a new checkpoint, which all processes of a program write together, in tiles."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import jax
import numpy as np

from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.agreement import agree, all_gather, announce, announced, new_key, together, withdraw
from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage.workspace import Workspace
from orbax_safetensors.streaming.tiles import Tile, Unit
from orbax_safetensors.transfer.engine import Counters

# Seconds between two looks at whether another process has given up.
_LOOK_SECONDS = 1.0


class Sink:
    """A new checkpoint. Every process makes a sink, begins it, writes its tiles and calls `commit`.

    Each step succeeds in all processes or fails in all of them. As a context manager, a sink gives up if the block ends
    without `commit` or by an exception: all processes fail then, and the written parts stay, for a run that resumes.
    Nothing is touched until `begin`, and until the last step, nobody can open the checkpoint.

    Attributes:
      path: where the checkpoint will be.
      workspace: where it is until then.
      units: the units of work that processes share.
      last: the number of the unit that is written when all others are, if there is one.
      batch_bytes: the bytes that move at once.
      writers: the threads that may write batches at once.
      counters: the writes of this process so far, and the bytes of arrays that it has written.
    """

    path: str
    workspace: Workspace
    units: Sequence[Unit]
    last: int | None = None
    batch_bytes: int
    writers = 2
    counters: Counters
    _failure: Exception | None = None
    _ended = False
    _looked: float

    @property
    def moved_bytes(self) -> int:
        """The bytes of arrays that are stored so far, for progress: also those of a `write` that has not returned."""
        return self.counters.nbytes

    def begin(self, *, resume: bool) -> Self:
        """Begin the checkpoint. Every process calls this, with a sink of the same content.

        With `resume`, go on with the unfinished checkpoint of a sink of the same content, if there is one.

        Raises `StorageError` if something is in the way or room is lacking, and `TensorMismatchError` if something else
        was begun there; in every process, before anything is written.
        """
        self._key = new_key("sink", self.path)
        self._looked = time.monotonic()
        self._process = jax.process_index()
        self.workspace.run = all_gather(f"{self._key}/run", self.workspace.run)[0]
        try:
            begin = ActiveProcesses.all().by_primary(partial(self.workspace.begin, resume=resume))
            together(f"{self._key}/begin", begin)
            together(f"{self._key}/open", self._open)
            together(f"{self._key}/see", self._see, str)
        except BaseException:
            self._release()
            raise
        return self

    def has(self, unit: int) -> bool:
        """Return whether a unit was written before this run, which resumes another."""
        raise NotImplementedError

    def expect(self, units: Sequence[int]) -> None:
        """Expect this process to write these units, in this order. Comes after `begin`."""

    def write(self, tiles: Sequence[Tile], arrays: Sequence[np.ndarray]) -> None:
        """Write tiles, or keep them until the next call, at the latest until `commit`, and write them then.

        A later run that resumes finds a unit written, by `has`, once the sink has written all of its tiles.
        """
        raise NotImplementedError

    def commit(self, last: Callable[[], None] = lambda: None) -> None:
        """Finish the checkpoint, once every process has called this; return when it exists.

        `last` writes tiles of the first process after all others have written. Raises `TensorMismatchError` if parts
        are missing, and `StorageError` if any process failed: in all processes, and there is no checkpoint then.
        """
        self._ended = True

        def finish() -> None:
            last()
            self._finish()

        try:
            together(f"{self._key}/tiles", self._flush)
            together(f"{self._key}/finish", ActiveProcesses.all().by_primary(finish))
        finally:
            self._release()

    def check_others(self) -> None:
        """Raise `StorageError` if another process has given up."""
        if jax.process_count() > 1 and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            if (failure := announced(f"{self._key}/given_up")) is not None:
                raise StorageError(f"{self.path}: {failure}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up, unless `commit` was called: tell the other processes why, and leave all files as they are.

        Returns once the other processes have noticed, when they write or call `commit`.
        """
        if self._ended:
            return
        failure = error or self._failure or StorageError(f"{self.path}: was given up before all was written")
        try:
            with contextlib.suppress(Exception):  # the other processes see the first failure
                self._stop()
            if jax.process_count() > 1:
                text = f"process {self._process} failed: {type(failure).__name__}: {failure}"
                announce(f"{self._key}/given_up", text)
            with contextlib.suppress(Exception, type(failure)):
                agree(f"{self._key}/tiles", failure)
            withdraw(f"{self._key}/given_up")  # no process writes any more
        finally:
            self._release()

    # Each sink defines these steps.

    def _open(self) -> None:
        """Open the place that the first process has made."""

    def _see(self) -> str:
        """Look at files of an earlier run; return a text that must be the same in all processes."""
        return ""

    def _flush(self) -> None:
        """Return when all bytes of this process are stored; raise the error of a failed write."""

    def _finish(self) -> None:
        """Make the written parts a checkpoint if they are complete. The first process calls this."""
        self.workspace.finish()

    def _stop(self) -> None:
        """End pending writes, before this process gives up."""

    def _release(self) -> None:
        """Close open files, and let other runs begin."""
        self.workspace.release()
