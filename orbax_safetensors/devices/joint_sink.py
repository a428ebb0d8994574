"""`JointSink`: the life cycle of a checkpoint that all processes of a program write together."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

import jax

from orbax_safetensors.devices.agreement import agree, all_gather, announce, announced, forget, new_key, together
from orbax_safetensors.errors import StorageError

# Seconds between two looks at whether another process has given up.
_LOOK_SECONDS = 1.0


class JointSink:
    """A checkpoint under way. Every process has one, begins it, writes its part and calls `commit`.

    Each step is done in all processes or fails in all of them. As a context manager, a sink gives up if the block is
    left without `commit` or by an exception: all processes fail then, and what they have written stays, for a run that
    resumes. Until the last step, nothing is there that opens.

    Attributes:
      path: what becomes the checkpoint.
    """

    path: str
    _failure: Exception | None = None
    _ended = False

    def _start(self, purpose: str, plan: Callable[[], str], *, resume: bool) -> None:
        """Begins in all processes, for which `plan` has to return the same; it touches nothing."""
        self._key = new_key(purpose, self.path)
        self._looked = time.monotonic()
        self._process = jax.process_index()
        self._is_first = self._process == 0
        # Tells this run from all others, in all processes alike.
        self._run = all_gather(f"{self._key}/run", secrets.token_hex(8))[0]
        self._steps = ["run"]
        self._step("plan", plan, str)
        try:
            self._step("begin", partial(self._begin, resume=resume), only_first=True)
            self._step("open", self._open)
            self._step("see", self._see, str)
        except BaseException:
            self._release()
            raise

    def _begin(self, *, resume: bool) -> None:
        """Makes the place where it is written, anew unless `resume` finds one. Called in the first process."""
        raise NotImplementedError

    def _open(self) -> None:
        """Opens what the first process has made."""

    def _see(self) -> str:
        """Looks at what has been written before; returns what all processes have to see alike."""
        return ""

    def _flush(self) -> None:
        """Returns when all that this process has written is stored; raises what has failed."""
        raise NotImplementedError

    def _complete(self) -> None:
        """Adds what belongs to it, once all processes have written their parts."""

    def _finish(self) -> None:
        """Makes it a checkpoint, if all is there. Called in the first process."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Ends what is under way, before this process gives up."""

    def _release(self) -> None:
        """Closes what is open, and lets others begin."""

    def _step(
        self,
        name: str,
        do: Callable[[], object],
        facts: Callable[[object], str] | str = "",
        *,
        only_first: bool = False,
    ) -> None:
        together(f"{self._key}/{name}", do if self._is_first or not only_first else lambda: None, facts)
        self._steps.append(name)

    def commit(self, last: Callable[[], None] = lambda: None) -> None:
        """Makes it a checkpoint, once every process has called this; returns when it is there.

        `last` is what the first process has still to write when all others have written. Raises `TensorMismatchError`
        if something is missing, and `StorageError` if any process failed: in all processes, and nothing is there then.
        """
        self._check_open()
        self._ended = True

        def finish() -> None:
            last()
            self._finish()

        try:
            self._step("tiles", self._flush)
            self._step("complete", self._complete)
            self._step("finish", finish, only_first=True)
        finally:
            self._release()
        for step in self._steps[:-1]:
            forget(f"{self._key}/{step}")

    def abort(self, failure: BaseException | None = None) -> None:
        """Gives up: ends what is under way, tells the other processes why and leaves all as it is.

        Returns once the other processes have noticed, which they do as they write or at `commit`.
        """
        if self._ended:
            return
        self._ended = True
        failure = failure or self._failure or StorageError(f"{self.path}: was given up before all was written")
        try:
            with contextlib.suppress(Exception):  # what has failed first is told
                self._stop()
            if jax.process_count() > 1:
                text = f"process {self._process} failed: {type(failure).__name__}: {failure}"
                announce(f"{self._key}/given_up", text)
            with contextlib.suppress(Exception, type(failure)):
                agree(f"{self._key}/tiles", failure)
        finally:
            self._release()

    def check_others(self) -> None:
        """Raises `StorageError` if another process has given up."""
        if jax.process_count() > 1 and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            if (failure := announced(f"{self._key}/given_up")) is not None:
                raise StorageError(f"{self.path}: {failure}")

    def _check_open(self) -> None:
        if self._ended:
            raise StorageError(f"{self.path}: this sink has been committed or given up")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort(error)
