"""How far a long run is, on stderr: a bar on a terminal, a line every few seconds in a log; and what it warns of."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from orbax_safetensors.cli.tables import human_bytes
from orbax_safetensors.cli.units import human_seconds
from orbax_safetensors.errors import printable

# All that the package logs.
_LOGGER = logging.getLogger(__package__.partition(".")[0])
# Between two lines in a log.
_LINE_SECONDS = 5.0


class Warnings(logging.Handler):
    """While it is entered, warnings of the package are lines like errors, said by `say` and nobody else."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        self._say(f"{record.levelname.lower()}: {printable(record.getMessage())}")

    def __enter__(self) -> Self:
        self._before = _LOGGER.handlers, _LOGGER.propagate
        _LOGGER.handlers, _LOGGER.propagate = [self], False
        return self

    def __exit__(self, *_: object) -> None:
        _LOGGER.handlers, _LOGGER.propagate = self._before


class Reporter:
    """Says how many bytes of how many there are, at what rate, and for how long this will take at that rate.

    Used as a context manager and called with both numbers, from one thread. Meanwhile warnings are above the bar.
    """

    def __init__(self, label: str, stream: TextIO | None) -> None:
        """Nothing is said if `stream` is None."""
        self._label, self._stream = label, stream
        self._started: float | None = None
        self._told = 0.0
        self._bar: Any = None
        self._task: Any = None
        self._warnings = Warnings(self.say)

    @property
    def begun(self) -> bool:
        """Whether it was called, thus bytes were about to move."""
        return self._started is not None

    def __enter__(self) -> Self:
        self._warnings.__enter__()
        if self._stream is not None and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[state]}"),
                console=Console(file=self._stream),
            )
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=None, state="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._warnings.__exit__()
        if self._bar is not None:
            # A bar of what never began would stand above the error that says why.
            self._bar.live.transient = not self.begun
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """`done` bytes of `total` have been moved."""
        now = time.monotonic()
        if self._started is None:
            self._started = now
        state = progress_text(done, total, now - self._started)
        if self._bar is not None:
            # A bar without a length is full only if it has one.
            self._bar.update(self._task, completed=done or not total, total=total or 1, state=state)
        elif self._stream is not None and (done in (0, total) or now - self._told >= _LINE_SECONDS):
            self._told = now
            self.say(f"{self._label}: {state}")

    def say(self, line: str) -> None:
        """Print one line by itself."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self._stream is not None:
            try:
                print(line, file=self._stream, flush=True)
            except OSError:
                self._stream = None  # nobody reads it any more, which is no reason to stop


def progress_text(done: int, total: int, seconds: float) -> str:
    """Return `1.2 GiB of 4.8 GiB, 310.5 MiB/s, 12.3 s left`, as far as there is something to say."""
    text = f"{human_bytes(done)} of {human_bytes(total)}"
    if done and seconds > 0:
        text += f", {human_bytes(round(done / seconds))}/s"
        if done < total:
            text += f", {human_seconds(seconds * (total - done) / done)} left"
    return text
