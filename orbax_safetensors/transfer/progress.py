"""How far a job is: the caller's callback, called now and then by the thread that waits for the bytes."""

from __future__ import annotations

import time

from orbax_safetensors.options import Progress

# The least time between two calls, in seconds: a display shows no more, and the calls cost nothing.
SECONDS = 0.1


class Meter:
    """Counts the bytes of a restore or save in parts that move one after the other, and tells `progress`.

    The first call says 0 of `total` bytes, the last one `total`; those between grow, a few in a second.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        """Make no call yet: a call may raise, and the processes agree on failures only while bytes move."""
        self._progress, self._total = progress, total
        self._before = self._part = 0
        self._told, self._next = -1, 0.0

    def begin(self, nbytes: int) -> None:
        """Count the part before as moved, and go on with one of `nbytes`."""
        self._before += self._part
        self._part = nbytes
        self.moved(0)

    def moved(self, share: float) -> None:
        """Tell that this share of the part has moved."""
        done = self._before + int(self._part * share)
        if self._told < done < self._total and time.monotonic() >= self._next:
            self._tell(done)

    def end(self) -> None:
        """Make the last call, after a first one if there was none."""
        self.moved(0)
        if self._told < self._total:
            self._tell(self._total)

    def _tell(self, done: int) -> None:
        self._told, self._next = done, time.monotonic() + SECONDS
        self._progress(done, self._total)
