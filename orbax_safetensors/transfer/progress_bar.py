"""How far a job is, drawn on a terminal, or a line now and then where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from orbax_safetensors.format.amounts import human_bytes, human_seconds

# Seconds between two lines of progress in a log.
_LINE_SECONDS = 5.0


class Bar:
    """Says how many of all bytes have been moved, at what rate, and how long the rest takes at that rate.

    Used as a context manager and called with both numbers, from one thread.
    """

    def __init__(self, label: str, stream: TextIO | None, text: Callable[[int, int, float], str] | None = None) -> None:
        """Nothing is said if `stream` is None. `text` replaces `progress_text`."""
        self._label, self._stream, self._state = label, stream, text or progress_text
        self._started: float | None = None
        self._last_line, self._last_done = 0.0, -1
        self._bar: Any = None
        self._task: Any = None

    @property
    def begun(self) -> bool:
        """Whether it was called, which a job does before it moves the first byte."""
        return self._started is not None

    def __enter__(self) -> Self:
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
        if self._bar is not None:
            # A bar of what never began would stand above the error that says why.
            self._bar.live.transient = not self.begun
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` bytes of `total` have been moved."""
        now = time.monotonic()
        if self._started is None:
            self._started = now
        state = self._state(done, total, now - self._started)
        if self._bar is not None:
            # A bar without a length is full only if it has one.
            self._bar.update(self._task, completed=done or not total, total=total or 1, state=state)
        elif done != self._last_done and (done in (0, total) or now - self._last_line >= _LINE_SECONDS):
            self._last_line, self._last_done = now, done
            self.say(f"{self._label}: {state}")

    def say(self, line: str) -> None:
        """Print one line by itself."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self._stream is not None:
            try:
                print(line, file=self._stream, flush=True)
            except OSError:
                self._stream = None  # nobody reads it any more: the job goes on


def progress_text(done: int, total: int, seconds: float) -> str:
    """Return `1.2 GiB of 4.8 GiB, 310.5 MiB/s, 12.3 s left`, as far as there is something to say."""
    text = f"{human_bytes(done)} of {human_bytes(total)}"
    if done and seconds > 0:
        text += f", {human_bytes(round(done / seconds))}/s"
        if done < total:
            text += f", {human_seconds(seconds * (total - done) / done)} left"
    return text
